"""Opens and checks an ONNX file of a user.

A file of another kind is named in the error. External data is read only after a check: its location
must be inside of the model's folder.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
from onnx import TensorProto

from pipeline.errors import InputError
from pipeline.graph.external_data import outside_files
from pipeline.graph.files import check_source, is_heavy, is_outside, lightened, nodes_of
from pipeline.graph.origin import DOMAINS

PROTOBUF_ENDS = 2 << 30
_FULL_CHECK = 64 << 20  # bytes of a graph without weights; shape inference copies it several times
_RUNS = ("", "ai.onnx", "ai.onnx.ml", "com.microsoft", "com.microsoft.nchwc")
_MAGIC: tuple[tuple[int, bytes, str], ...] = (
    (0, b"PK\x03\x04", "a zip archive, as torch.save, torch.export.save and numpy write. Rename a "
     "saved program to .pt2. For weights, pass package.module:factory and --weights"),
    (0, b"\x80\x02", "a Python pickle, as old torch.save writes. Pass package.module:factory"),
    (0, b"\x89HDF", "an HDF5 file, as Keras writes. Convert it to ONNX with tf2onnx"),
    (0, b"\x1f\x8b", "compressed by gzip. Run gunzip first"),
    (4, b"TFL3", "a TensorFlow Lite model. Convert it to ONNX with tf2onnx --tflite"),
    (4, b"ORTM", "ONNX Runtime's own format (.ort). Pass the .onnx that it was made from"),
    (0, b"version https://git-lfs", "a Git LFS pointer. Get the file with git lfs pull"),
    (0, b"<!DOCTYPE", "a web page. Download the file itself"),
    (0, b"<html", "a web page. Download the file itself"),
    (0, b"<", "ONNX as text. Read it with onnx.parser.parse_model, and save it with onnx.save"),
)  # fmt: skip


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
    model = _parsed(path)
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


def _parsed(path: Path) -> onnx.ModelProto:
    if path.is_dir():
        inside = sorted(p.name for p in path.glob("*.onnx"))
        hint = f". Pass one of its files: {', '.join(inside[:5])}" if inside else ""
        raise InputError(f"{path}: a folder, not an ONNX file{hint}")
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(64)
            _check_head(path, head, size)
            file.seek(0)
            data = file.read()
    except FileNotFoundError as error:
        raise InputError(f"{path}: no such file") from error
    except OSError as error:
        raise InputError(f"{path}: can't be read: {error.strerror}") from error
    model = onnx.ModelProto()
    try:
        model.ParseFromString(data)
    except Exception as error:  # an error of protobuf
        raise InputError(
            f"{path}: cut short, damaged, or not an ONNX file: protobuf can't read its {size} "
            f"bytes ({error}). Copy or download the file again{_frozen(path)}"
        ) from error
    if (place := _no_text(model)) is not None:
        raise InputError(f"{path}: damaged: the field {place} is not text. Copy the file again")
    if not model.HasField("graph") or not (model.graph.node or model.graph.output):
        raise InputError(f"{path}: not an ONNX model: the file has no graph{_frozen(path)}")
    if not model.opset_import:
        raise InputError(f"{path}: not an ONNX model: the file has no opset{_frozen(path)}")
    return model


def _no_text(message: Any) -> str | None:
    """The name of the first text field that is not valid text: protobuf returns it as bytes."""
    for field, value in message.ListFields():
        if field.type == field.TYPE_STRING:
            each = [value] if isinstance(value, (str, bytes)) else value
            if any(isinstance(text, bytes) for text in each):
                return str(field.full_name)
        elif field.type == field.TYPE_MESSAGE:
            for inner in [value] if hasattr(value, "ListFields") else value:
                if (found := _no_text(inner)) is not None:
                    return found
    return None


def _check_head(path: Path, head: bytes, size: int) -> None:
    if not size:
        raise InputError(f"{path}: the file is empty (0 bytes). Copy or download it again")
    for at, magic, words in _MAGIC:
        if head[at : at + len(magic)] == magic:
            raise InputError(f"{path}: not an ONNX file but {words}")
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") < size:
        raise InputError(
            f"{path}: not an ONNX file but weights of safetensors. Pass package.module:factory, "
            "and the weights with --weights"
        )
    if size >= PROTOBUF_ENDS:
        raise InputError(
            f"{path}: the file has {size} bytes, and protobuf's limit is 2 GiB. Save it with "
            "onnx.save(..., save_as_external_data=True)"
        )


def _frozen(path: Path) -> str:
    return ". Convert a TensorFlow graph (.pb) with tf2onnx" if path.suffix == ".pb" else ""


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
