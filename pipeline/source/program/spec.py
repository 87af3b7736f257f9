"""A saved ``torch.export`` program (``.pt2``) as the source of a conversion.

`program_spec` makes a spec of the file: inputs, dims and ranges as torch keeps them. The program
is then exported anew like any module, so that everything downstream is the same for it.

torch does not keep the names of the dims: a dim is called after the first input axis that it is
(``x_0``). Nor does a file say which values an input takes: each is tried with the range of values
of the example that the program was exported with.

A ``.pt2`` is a program: loading one can run what its maker wrote into it. Take trusted ones only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.errors import InputError
from pipeline.export.program import KINDS, load_program
from pipeline.source.program.dims import Axes, named_axes
from pipeline.spec.dims import Dim
from pipeline.spec.model import Input, ModelSpec, Tolerance

if TYPE_CHECKING:
    import torch


def program_spec(
    path: Path, dims: Mapping[str, Dim], *, tolerance: Tolerance | None = None
) -> ModelSpec:
    """The spec of a saved ExportedProgram.

    Args:
        path: the file.
        dims: ranges in place of those that the program was exported with, inside of them.
        tolerance: for every comparison; None means that it is measured.

    Raises:
        InputError: the file is missing, damaged, of another kind or torch version; an input that
            is no tensor of numbers; a dim without a largest size (all of them are listed), or
            `dims` that the program does not have or not allow.
    """
    from pipeline.machine.files import hash_file

    program = load_program(path)
    _check(path, program)
    axes = named_axes(path, program, dims)
    inputs = _inputs(path, program, axes)
    key = hash_file(path).sha256

    def build(weights: Path | None) -> torch.nn.Module:
        del weights  # they are in the file
        from pipeline.export.program import ProgramModule

        return ProgramModule(load_program(path))

    return ModelSpec(
        name=re.sub(r"[^A-Za-z0-9_.-]", "_", path.stem).lstrip(".-") or "model",
        build=build,
        inputs=inputs,
        tolerance=tolerance,
        rules=axes.rules,
        libraries=("torch",),
        key=key,
    )


def _check(path: Path, program: torch.export.ExportedProgram) -> None:
    """Raises `InputError` for a program that a conversion can't stand for."""
    signature = program.graph_signature
    for spec in signature.input_specs:
        if spec.kind.name != "USER_INPUT":
            continue
        kind = type(spec.arg).__name__
        if kind not in ("TensorArgument", "ConstantArgument"):
            what = KINDS.get(kind, kind.removesuffix("Argument"))
            raise InputError(
                f"{path}: input {spec.arg.name} is {what} that varies: an engine takes tensors "
                "only; export with a tensor or a constant in its place"
            )
    for node in program.graph.nodes:
        if _trains(node):
            raise InputError(
                f"{path}: was exported in training mode ({node.name} acts at random, or on the "
                "batch): call .eval() on the model before torch.export.export"
            )
    for name in _changed_buffers(program):
        raise InputError(
            f"{path}: the program changes its buffer {name} in every call, and an engine keeps "
            "nothing: make it an input and an output"
        )


def _changed_buffers(program: torch.export.ExportedProgram) -> list[str]:
    """The buffers that the program writes to, itself or through a view of them."""
    signature = program.graph_signature
    found = list(signature.buffers_to_mutate.values())
    for node in program.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if node.op != "call_function" or schema is None or not schema.is_mutable:
            continue
        source: Any = node.args[0] if node.args else None
        while getattr(source, "op", "") == "call_function":
            returns = getattr(getattr(source, "target", None), "_schema", None)
            if returns is None or not any(r.alias_info for r in returns.returns):
                break
            source = source.args[0]
        name = signature.inputs_to_buffers.get(getattr(source, "name", ""))
        found += [name] if name else []
    return found


def _trains(node: torch.fx.Node) -> bool:
    """True for a dropout that drops, or a batch norm of the batch's own mean."""
    name = str(node.target).removeprefix("aten.").split(".")[0]
    if node.op != "call_function" or not str(node.target).startswith("aten."):
        return False
    if name in ("dropout", "native_dropout", "feature_dropout", "alpha_dropout"):
        return all(node.args[1:3])  # p, train
    return name == "batch_norm" and bool(node.args[5])  # training


def _inputs(path: Path, program: torch.export.ExportedProgram, axes: Axes) -> tuple[Input, ...]:
    """The program's tensors, each with its dims and the range of its example's values."""
    from torch.utils._pytree import tree_leaves

    examples = tree_leaves(program.example_inputs) if program.example_inputs else []
    values = {n.name: n.meta.get("val") for n in program.graph.nodes if n.op == "placeholder"}
    user = [s.arg for s in program.graph_signature.input_specs if s.kind.name == "USER_INPUT"]
    inputs = []
    for place, argument in enumerate(user):
        value = values.get(argument.name)
        if type(argument).__name__ != "TensorArgument" or value is None:
            continue
        dtype = str(value.dtype).removeprefix("torch.")
        if value.dtype.is_complex or dtype.startswith(("bfloat", "float8")):
            raise InputError(
                f"{path}: input {argument.name} is {dtype}, which ONNX Runtime and TensorRT don't "
                "take as an input: let the model take float32 and cast"
            )
        if value.device.type != "cpu":
            raise InputError(
                f"{path}: input {argument.name} is on {value.device}: export the program on the "
                "CPU, or move it (torch.export.passes.move_to_device_pass) and save it again"
            )
        example = examples[place] if len(examples) == len(user) else None
        low, high = _value_range(example, dtype)
        inputs.append(Input(argument.name, axes.shapes[argument.name], dtype, low, high))
    if not inputs:
        raise InputError(f"{path}: the program takes no tensor")
    return tuple(inputs)


def _value_range(example: Any, dtype: str) -> tuple[float, float]:
    """low and high (exclusive for integers) for an input's values: those of the example."""
    usual = {"bool": (-1.0, 1.0), "uint8": (0, 256)}.get(
        dtype, (-1.0, 1.0) if "float" in dtype else (0, 2)
    )
    if example is None or not example.numel():
        return usual
    low, high = float(example.min()), float(example.max())
    if dtype == "bool":
        return (1.0, 2.0) if low else usual  # a mask of ones
    if "float" not in dtype:
        return (low, high + 1) if high > 0 else (low, 2)
    if not (abs(low) < float("inf") and abs(high) < float("inf")):
        return usual
    if low == high:  # zeros or ones say little
        return (min(low, 0.0), max(high, 1.0))
    return float(f"{low:.2g}"), float(f"{high:.2g}")
