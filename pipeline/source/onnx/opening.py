"""Opens and checks an ONNX file of a user.

A file of another kind is named in the error. External data is read only after a check: its location
must be inside of the model's folder.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import onnx
from onnx import TensorProto

from pipeline.errors import InputError
from pipeline.graph.external_data import outside_files
from pipeline.graph.files import check_source, is_heavy, is_outside, lightened, nodes_of
from pipeline.graph.origin import DOMAINS
from pipeline.graph.reading import read_onnx

_FULL_CHECK = 64 << 20  # bytes of a graph without weights; shape inference copies it several times
_RUNS = ("", "ai.onnx", "ai.onnx.ml", "com.microsoft", "com.microsoft.nchwc")


@dataclass(frozen=True)
class OnnxFile:
    """An ONNX file that passed all checks that need no run.

    Args:
        path: The file's path.
        model: The model. External weights are not in memory.
        outside: The real path of each external data file, by its location in the model.
        opset: The opset version of the standard ONNX domain.
        notes: Complaints of onnx's shape inference, one line each. ONNX Runtime may still run the
            file.
    """

    path: Path
    model: onnx.ModelProto
    outside: dict[str, Path]
    opset: int
    notes: tuple[str, ...] = ()


def open_onnx(path: Path) -> OnnxFile:
    """Reads and checks an ONNX file.

    Raises:
        InputError: The file is not an ONNX file, or is damaged. Or its external data is missing,
            cut short, or outside of its folder. Or onnx.checker refuses it, or ONNX Runtime can't
            run one of its ops.
    """
    model = read_onnx(path)
    newest = onnx.IR_VERSION
    if model.ir_version > newest:
        raise InputError(
            f"{path}: onnx {onnx.__version__} supports IR versions up to {newest}, but the file "
            f"has {model.ir_version}. Install a newer onnx, or save the file at {newest}"
        )
    outside = outside_files(path, model)
    _check_ops(path, model)
    _check_ends(path, model)
    bare = without_weights(model)
    opset = check_source(bare, path)
    return OnnxFile(path, model, outside, opset, _full_check(model, bare))


def without_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy in which inputs of the same type replace large and external weights."""
    return lightened(model, lambda tensor: is_heavy(tensor) or is_outside(tensor))


def _check_ops(path: Path, model: onnx.ModelProto) -> None:
    """Raises `InputError` for ops that ONNX, ONNX Runtime and the file do not define."""
    functions = {(f.domain, f.name) for f in model.functions}
    unknown: dict[str, onnx.NodeProto] = {}
    for node in (*nodes_of(model.graph), *(n for f in model.functions for n in f.node)):
        if node.domain not in _RUNS and (node.domain, node.op_type) not in functions:
            unknown.setdefault(f"{node.domain}.{node.op_type}", node)
    if unknown:
        names = ", ".join(list(unknown)[:5]) + (
            f" (and {len(unknown) - 5} more)" * (len(unknown) > 5)
        )
        node = next(iter(unknown.values()))
        where = f" (the first is node {node.name!r})" if node.name else ""
        known = next((DOMAINS[n.domain] for n in unknown.values() if n.domain in DOMAINS), "")
        raise InputError(
            f"{path}: ONNX Runtime can't run these custom ops, so nothing can be compared: "
            f"{names}{where}. Add an ONNX function with the same domain and name for each op, and "
            "pass its TensorRT plugin with --plugin" + (f" ({known})" if known else "")
        )


def _check_ends(path: Path, model: onnx.ModelProto) -> None:
    """Raises `InputError` for inputs and outputs of unsupported kinds, and for training nodes."""
    graph = model.graph
    constants = {tensor.name for tensor in graph.initializer}
    inputs = [v.name for v in graph.input if v.name not in constants]
    outputs = [v.name for v in graph.output]
    if not outputs:
        raise InputError(f"{path}: the graph has no output. Export the model with one")
    if not inputs:
        raise InputError(f"{path}: the graph has no input. Export the model with one")
    names = [*inputs, *outputs]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice in inputs and twice in outputs:
        raise InputError(f"{path}: output {twice} is also an input. Put an Identity between")
    if twice is not None:
        raise InputError(f"{path}: two inputs or outputs are called {twice!r}. Rename one")
    for node in nodes_of(graph):
        training = any(a.name == "training_mode" and a.i for a in node.attribute)
        if training and node.op_type == "BatchNormalization":
            raise InputError(
                f"{path}: BatchNormalization {node.name!r} has training_mode=1: its result depends "
                "on the whole batch. Export the model in eval mode, or set training_mode to 0"
            )
    for value in graph.input:
        if value.name not in constants:
            _check_type(f"{path}: input {value.name}", value.type)
    for value in graph.output:
        kind = value.type.WhichOneof("value")
        if kind != "tensor_type":
            raise InputError(f"{path}: output {value.name} is {_kind(kind)}. Only return tensors")


def _check_type(where: str, type_: onnx.TypeProto) -> None:
    kind = type_.WhichOneof("value")
    if kind != "tensor_type":
        raise InputError(f"{where} is {_kind(kind)}. Only use tensors as inputs")
    element = type_.tensor_type.elem_type
    name = TensorProto.DataType.Name(element).lower() if element else "of unknown type"
    allowed = "float16, float, double, bool, or an integer of 8 bits or more"
    if element not in _ALLOWED:
        raise InputError(f"{where} is {name}. Use {allowed}, and cast inside of the graph")
    if not type_.tensor_type.HasField("shape"):
        raise InputError(
            f"{where} has no shape. State its shape, with a name for each size that varies"
        )


_ALLOWED = {
    TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BOOL,
    TensorProto.INT8, TensorProto.INT16, TensorProto.INT32, TensorProto.INT64,
    TensorProto.UINT8, TensorProto.UINT16, TensorProto.UINT32, TensorProto.UINT64,
}  # fmt: skip


def _kind(kind: str | None) -> str:
    return f"a {kind.removesuffix('_type').replace('_', ' ')}" if kind else "of unknown type"


def _full_check(model: onnx.ModelProto, bare: onnx.ModelProto) -> tuple[str, ...]:
    """Notes from the checker with shape inference, which is stricter than a run.

    If the file states wrong shapes of inner values, this removes all of these shapes from `model`,
    because passes would use them.
    """
    if bare.ByteSize() > _FULL_CHECK or _inferred(bare) is None:
        return ()
    clean = onnx.ModelProto()
    clean.CopyFrom(bare)
    del clean.graph.value_info[:]
    for value in clean.graph.output:
        for dim in value.type.tensor_type.shape.dim:  # the checker needs the rank
            dim.Clear()
    words = _inferred(clean)
    if words is not None:
        return (f"onnx's shape inference refuses the file: {words}",)
    if not model.graph.value_info:
        return ()  # a stated output shape is wrong; a run reports it with the sizes
    del model.graph.value_info[:]
    return ("the file's shapes of inner values contradict its nodes: the shapes were removed",)


def _inferred(model: onnx.ModelProto) -> str | None:
    """The error of the checker with shape inference; None if there is none."""
    try:
        onnx.checker.check_model(model, full_check=True)
    except Exception as error:  # ValidationError or InferenceError: no common base
        return next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return None
