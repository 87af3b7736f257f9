"""Runs torch.onnx.export with our translations, and checks that each of them was used."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import onnx
import torch

from pipeline.errors import ExportError
from pipeline.export.ops import integers, pools, translation_table
from pipeline.export.torch_2_13 import mended
from pipeline.graph.files import nodes_of
from pipeline.plugins import PLUGINS
from pipeline.plugins.base import DOMAIN
from pipeline.plugins.loading import find_plugin


def to_onnx(
    program: torch.export.ExportedProgram,
    path: Path,
    *,
    opset: int,
    input_names: Sequence[str],
    output_names: Sequence[str],
) -> None:
    """Writes the program as ONNX; weights beyond 2 GB go into ``<path>.data`` beside it.

    Args:
        program: the program.
        path: the ONNX file to write.
        opset: the opset of the file.
        input_names: the names of the inputs, in order.
        output_names: the names of the outputs, in order.

    Raises:
        ExportError: an op can't be exported correctly; the text names the model's line.
        Exception: any other failure of torch.onnx.export.
    """
    _refuse_indices(program)
    called: set[Any] = set()
    table = {target: _noting(f, target, called) for target, f in translation_table().items()}
    try:
        with mended(program.graph_module, {}, during="torch.onnx.export"):
            onnx_program = torch.onnx.export(
                program,
                dynamo=True,
                opset_version=opset,
                input_names=list(input_names),
                output_names=list(output_names),
                custom_translation_table=table,
                optimize=True,
                verbose=False,
            )
    except Exception as error:
        ours = _export_error(error)
        if ours is None:
            raise
        raise ours from None
    assert onnx_program is not None
    _check_called(program, table.keys() - called)
    onnx_program.save(path)


def add_functions(model: onnx.ModelProto) -> None:
    """Adds the ONNX functions of our plugins' ops to the model, in place.

    With them ONNX Runtime, and targets without the plugin, can run the model.
    """
    present = {node.op_type for node in nodes_of(model.graph) if node.domain == DOMAIN}
    for name in PLUGINS:
        plugin = find_plugin(name)
        if plugin.name in present:
            model.functions.append(plugin.function())


def _noting(function: Callable[..., Any], target: Any, called: set[Any]) -> Callable[..., Any]:
    @functools.wraps(function)  # the exporter reads the signature
    def call(*args: Any, **kwargs: Any) -> Any:
        called.add(target)
        return function(*args, **kwargs)

    return call


def _export_error(error: BaseException) -> ExportError | None:
    """The ExportError of a translation, out of the exporter's own exceptions round it."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ExportError):
            return cause
        cause = cause.__cause__
    return None


def _check_called(program: torch.export.ExportedProgram, missed: set[Any]) -> None:
    """Raises if an op of the program bypassed its translation."""
    for node in _calls(program):
        # arithmetic of sizes may exist for a guard only
        op = isinstance(node.target, torch._ops.OpOverload) and node.target in missed
        if op and node.users and not _of_floats(node):
            raise ExportError(
                f"{node.target}{_line(node)} did not reach its translation: torch "
                f"{torch.__version__} decomposes it differently from torch 2.13"
            )


def _of_floats(node: torch.fx.Node) -> bool:
    """True for a float op whose translation handles only integers."""
    value = node.meta.get("val")
    return (
        node.target in integers.OF_INTEGERS
        and isinstance(value, torch.Tensor)
        and value.is_floating_point()
    )


def _refuse_indices(program: torch.export.ExportedProgram) -> None:
    """Raises if the program reads the indices of an adaptive max pool: its translation has none."""
    for node in _calls(program):
        if node.target in pools.WITHOUT_INDICES and any(
            user.args[1] == 1 and user.users for user in node.users
        ):
            raise ExportError(
                f"{node.target}{_line(node)}: the indices of an adaptive max pool can't be "
                "exported; return the values only"
            )


def _calls(program: torch.export.ExportedProgram) -> Iterator[torch.fx.Node]:
    """The calls of a program, including those inside its branches and loops."""
    for module in program.graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            yield from (node for node in module.graph.nodes if node.op == "call_function")


def _line(node: torch.fx.Node) -> str:
    """The model's line: the last one of the stack trace that torch keeps."""
    places = [line.strip() for line in (node.stack_trace or "").splitlines() if "File " in line]
    return f" at {places[-1].removeprefix('File ')}" if places else ""
