"""A saved ``torch.export`` program (``.pt2``) as the source of a conversion.

`program_spec` makes a spec of the file with the inputs, dims and ranges that torch stores. The
program is then exported again like any module, so all later stages are the same.

torch does not store the names of the dims. A dim is named after its first input axis (``x_0``).
torch does not store the values that an input may have either. Each input uses the range of the
values in the program's example.

A ``.pt2`` can carry code of its author. It is refused unless the caller trusts the author; see
`pipeline.export.program_archive`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.errors import InputError
from pipeline.export.program import KINDS, ProgramModule, load_program
from pipeline.machine.files import hash_file
from pipeline.source.program.dims import Axes, named_axes
from pipeline.spec.dims import Dim
from pipeline.spec.model import Input, ModelSpec

if TYPE_CHECKING:
    import torch


def program_spec(
    path: Path,
    dims: Mapping[str, Dim],
    *,
    trust: bool = False,
) -> ModelSpec:
    """The spec of a saved ExportedProgram.

    Args:
        path: The file.
        dims: Ranges that replace the program's ranges, and lie inside of them.
        trust: True to load parts of the file that could run code of its author.

    Raises:
        InputError: The file is missing, damaged, or of another kind or torch version. Or it could
            run code, and `trust` is not set. Or an input
            is not a tensor of numbers. Or dims have no largest size (the message lists them), or
            the program does not have or allow `dims`.
    """
    program = load_program(path, trust=trust)
    _check(path, program)
    axes = named_axes(path, program, dims)
    inputs = _inputs(path, program, axes)
    key = hash_file(path).sha256

    def build(weights: Path | None) -> torch.nn.Module:
        del weights  # they are in the file
        return ProgramModule(load_program(path, trust=trust))

    return ModelSpec(
        name=re.sub(r"[^A-Za-z0-9_.-]", "_", path.stem).lstrip(".-") or "model",
        build=build,
        inputs=inputs,
        rules=axes.rules,
        libraries=("torch",),
        key=key,
    )


def _check(path: Path, program: torch.export.ExportedProgram) -> None:
    """Raises `InputError` for a program that can't be converted."""
    signature = program.graph_signature
    for spec in signature.input_specs:
        if spec.kind.name != "USER_INPUT":
            continue
        kind = type(spec.arg).__name__
        if kind not in ("TensorArgument", "ConstantArgument"):
            what = KINDS.get(kind, kind.removesuffix("Argument"))
            raise InputError(
                f"{path}: input {spec.arg.name} is {what} that varies, but an engine's inputs are "
                "tensors. Export with a tensor or a constant in its place"
            )
    for node in program.graph.nodes:
        if _trains(node):
            raise InputError(
                f"{path}: was exported in training mode ({node.name} is random, or uses the "
                "batch's statistics). Call .eval() on the model before torch.export.export"
            )
    for name in _changed_buffers(program):
        raise InputError(
            f"{path}: the program changes its buffer {name} in every call, but an engine keeps "
            "no state. Make the buffer an input and an output"
        )


def _changed_buffers(program: torch.export.ExportedProgram) -> list[str]:
    """The buffers that the program writes to, directly or through a view."""
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
    """True for an active dropout, or a batch norm that uses the batch's mean."""
    name = str(node.target).removeprefix("aten.").split(".")[0]
    if node.op != "call_function" or not str(node.target).startswith("aten."):
        return False
    if name in ("dropout", "native_dropout", "feature_dropout", "alpha_dropout"):
        return all(node.args[1:3])  # p, train
    return name == "batch_norm" and bool(node.args[5])  # training


def _inputs(path: Path, program: torch.export.ExportedProgram, axes: Axes) -> tuple[Input, ...]:
    """The program's tensor inputs, each with its dims and its example's range of values."""
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
                "accept as an input. Use a float32 input, and cast it in the model"
            )
        if value.device.type != "cpu":
            raise InputError(
                f"{path}: input {argument.name} is on {value.device}. Export the program on the "
                "CPU, or move it with torch.export.passes.move_to_device_pass and save it again"
            )
        example = examples[place] if len(examples) == len(user) else None
        low, high = _value_range(example, dtype)
        inputs.append(Input(argument.name, axes.shapes[argument.name], dtype, low, high))
    if not inputs:
        raise InputError(f"{path}: the program has no tensor input. Export it with one")
    return tuple(inputs)


def _value_range(example: Any, dtype: str) -> tuple[float, float]:
    """The lowest and highest value of the example; integers exclude the highest."""
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
    if low == high:  # a constant example, such as zeros, does not show the range
        return (min(low, 0.0), max(high, 1.0))
    return float(f"{low:.2g}"), float(f"{high:.2g}")
