"""Runs torch.onnx.export with our translations, and checks that each of them was used."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import torch

from pipeline.errors import ExportError
from pipeline.export.declared import declaring_symbols
from pipeline.export.ops import integers, pools, selections, small_matrices, translation_table
from pipeline.export.ops.bounded import knowing
from pipeline.export.ops.refusals import line_of, refusal
from pipeline.export.torch_2_13 import mended
from pipeline.graph.files import nodes_of
from pipeline.plugins import PLUGINS
from pipeline.plugins.base import DOMAIN
from pipeline.plugins.loading import find_plugin
from pipeline.spec.dims import Size

_FREE = "pipeline_end_"  # begins a name that no tensor of a model has


def to_onnx(
    program: torch.export.ExportedProgram,
    path: Path,
    *,
    opset: int,
    input_names: Sequence[str],
    output_names: Sequence[str],
    shapes: Sequence[Sequence[Size]],
) -> None:
    """Writes the program as ONNX; weights beyond 2 GB go into ``<path>.data`` beside it.

    Args:
        program: the program.
        path: the ONNX file to write.
        opset: the opset of the file.
        input_names: the names of the inputs, in order.
        output_names: the names of the outputs, in order.
        shapes: the declared shapes of the inputs, in order.

    Raises:
        ExportError: an op can't be exported; the text names it, the model's line and what to use.
        Exception: any other failure of torch.onnx.export.
    """
    _refuse_placeholders(program)
    called: set[Any] = set()
    table = {target: _noting(f, target, called) for target, f in translation_table().items()}
    try:
        with (
            mended(program.graph_module, {}, during="torch.onnx.export"),
            declaring_symbols(program, shapes),
            knowing(program),
            _unguarded(program),
        ):
            onnx_program = torch.onnx.export(
                program,
                dynamo=True,
                opset_version=opset,
                input_names=[f"{_FREE}input_{n}" for n in range(len(input_names))],
                output_names=[f"{_FREE}output_{n}" for n in range(len(output_names))],
                custom_translation_table=table,
                optimize=True,
                verbose=False,
            )
    except Exception as error:
        ours = refusal(error)
        if ours is None:
            raise
        raise ours from None
    assert onnx_program is not None
    _check_called(program, table.keys() - called)
    _name(onnx_program.model, input_names, output_names)
    onnx_program.save(path)


def _name(model: Any, inputs: Sequence[str], outputs: Sequence[str]) -> None:
    """Names the inputs and outputs, in place. A tensor inside that has such a name gets another.

    torch names a tensor after its op or parameter, so it may be called ``mean`` too.
    """
    graph = model.graph
    ends = [*graph.inputs, *graph.outputs]
    nodes = ir.traversal.RecursiveGraphIterator(graph)
    inner = [*graph.initializers.values(), *(v for node in nodes for v in node.outputs)]
    wanted = {*inputs, *outputs}
    names = wanted | {str(v.name) for v in inner}
    for value in inner:
        if value.name in wanted and not any(value is end for end in ends):
            value.name = next(n for k in count(1) if (n := f"{value.name}_{k}") not in names)
            names.add(value.name)
    for value, name in zip(ends, (*inputs, *outputs), strict=True):
        value.name = name


@contextlib.contextmanager
def _unguarded(program: torch.export.ExportedProgram) -> Iterator[None]:
    """The exporter does not run the program's guards: what held at the example's sizes.

    torch 2.13 would take them for true at every size. It would leave out the slice of ``x[:8]`` if
    the example has fewer than 8 elements. A branch that gives another result has narrowed the dims.
    """
    guards = program._guards_code
    program._guards_code = []
    try:
        yield
    finally:
        program._guards_code = guards


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


def _check_called(program: torch.export.ExportedProgram, missed: set[Any]) -> None:
    """Raises if an op of the program bypassed its translation."""
    needed = _needed(program)
    for node in _calls(program):
        op = isinstance(node.target, torch._ops.OpOverload) and node.target in missed
        if op and node in needed and not _goes_another_way(node):
            raise ExportError(
                f"{node.target}{_at(node)} did not reach its translation: torch "
                f"{torch.__version__} decomposes it differently from torch 2.13"
            )


def _needed(program: torch.export.ExportedProgram) -> set[torch.fx.Node]:
    """The nodes that an output needs. Arithmetic of sizes may exist for a guard only."""
    left = [
        node
        for module in program.graph_module.modules()
        if isinstance(module, torch.fx.GraphModule)
        for node in module.graph.nodes
        if node.op == "output"
    ]
    found = set(left)
    while left:
        new = set(left.pop().all_input_nodes) - found
        found |= new
        left += new
    return found


def _goes_another_way(node: torch.fx.Node) -> bool:
    """True for an op that reaches another translation.

    The exporter turns the number in ``x % 3`` into a tensor where x is not int64, and in ``3 % x``.
    ``remainder.Tensor`` has a translation of its own, and so has ``where.self``.
    """
    if node.target in selections.WITH_NUMBERS:
        return True
    value = node.meta.get("val")
    if node.target not in integers.WITH_NUMBERS or not isinstance(value, torch.Tensor):
        return False
    return node.target is not torch.ops.aten.remainder.Scalar or value.dtype is not torch.int64


def _refuse_placeholders(program: torch.export.ExportedProgram) -> None:
    """Raises if the program reads an output that its op's translation lacks."""
    for node in _calls(program):
        if node.target in pools.WITHOUT_INDICES and _reads(node, 1):
            raise ExportError(
                f"{node.target}{_at(node)}: the indices of an adaptive max pool can't be "
                "exported; return the values only"
            )
        if _reads(node, small_matrices.VALID_OUTPUTS.get(node.target)):
            raise ExportError(
                f"{node.target}{_at(node)}: its factors and its error code can't be exported; "
                "use the result only"
            )


def _reads(node: torch.fx.Node, first: int | None) -> bool:
    """Whether the program reads one of the node's outputs from the `first` on."""
    if first is None:
        return False
    numbers = {user.args[1] for user in node.users if user.users}
    return any(isinstance(n, int) and n >= first for n in numbers)


def _calls(program: torch.export.ExportedProgram) -> Iterator[torch.fx.Node]:
    """The calls of a program, including those inside its branches and loops."""
    for module in program.graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            yield from (node for node in module.graph.nodes if node.op == "call_function")


def _at(node: torch.fx.Node) -> str:
    place = line_of(node)
    return f" at {place}" if place else ""
