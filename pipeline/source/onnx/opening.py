"""Opening an ONNX file that somebody brings: what it is if it is none, and where its weights lie.

Nothing of the external data is read before every place of it is known to be inside of the model's
folder: a file can name any path of the machine.
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
    (0, b"PK\x03\x04", "a zip archive, as torch.save, torch.export.save and numpy write: a .pt2 "
     "goes in by that name; the weights of a module need the module: give package.module:factory"),
    (0, b"\x80\x02", "a Python pickle, as old torch.save writes: give package.module:factory"),
    (0, b"\x89HDF", "an HDF5 file, as Keras writes: tf2onnx makes an .onnx of it"),
    (0, b"\x1f\x8b", "compressed by gzip: gunzip it first"),
    (4, b"TFL3", "a TensorFlow Lite model: tf2onnx --tflite makes an .onnx of it"),
    (4, b"ORTM", "ONNX Runtime's own format (.ort), made from an .onnx: give that one"),
    (0, b"version https://git-lfs", "a Git LFS pointer, not the file itself: git lfs pull"),
    (0, b"<!DOCTYPE", "a web page: download the file itself"),
    (0, b"<html", "a web page: download the file itself"),
    (0, b"<", "ONNX as text: onnx.parser.parse_model reads it, onnx.save writes the .onnx"),
)  # fmt: skip


@dataclass(frozen=True)
class OnnxFile:
    """An ONNX file that is whole, as far as can be told without running it.

    Args:
        path: where it is.
        model: the file; weights that it keeps outside are not in memory.
        outside: external data files by their location in the model, as real paths.
        opset: of the standard ONNX domain.
        notes: what onnx's shape inference does not like though ONNX Runtime may, one line each.
    """

    path: Path
    model: onnx.ModelProto
    outside: dict[str, Path]
    opset: int
    notes: tuple[str, ...] = ()


def open_onnx(path: Path) -> OnnxFile:
    """Reads and checks an ONNX file.

    Raises:
        InputError: it is no ONNX file, or a damaged one; its external data are missing, cut short
            or outside of its folder; onnx.checker refuses it; nothing here runs one of its ops.
    """
    model = _parsed(path)
    newest = onnx.IR_VERSION
    if model.ir_version > newest:
        raise InputError(
            f"{path}: its IR version {model.ir_version} is newer than {newest}, the newest that "
            f"onnx {onnx.__version__} knows: install a newer onnx, or save it at {newest}"
        )
    outside = outside_files(path, model)
    _check_ops(path, model)
    _check_ends(path, model)
    bare = without_weights(model)
    opset = check_source(bare, path)
    return OnnxFile(path, model, outside, opset, _full_check(model, bare))


def without_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy in which weights that are large or outside stand as inputs of the same type."""
    return lightened(model, lambda tensor: is_heavy(tensor) or is_outside(tensor))


def _parsed(path: Path) -> onnx.ModelProto:
    if path.is_dir():
        inside = sorted(p.name for p in path.glob("*.onnx"))
        hint = f": give one of {', '.join(inside[:5])} in it" if inside else ""
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
    except Exception as error:  # protobuf's own kind
        raise InputError(
            f"{path}: cut short, damaged, or no ONNX file: protobuf can't read its {size} bytes "
            f"({error}); copy or download it again{_frozen(path)}"
        ) from error
    if (place := _no_text(model)) is not None:
        raise InputError(f"{path}: damaged: {place} in it is no text")
    if not model.HasField("graph") or not (model.graph.node or model.graph.output):
        raise InputError(f"{path}: not an ONNX model: it holds no graph{_frozen(path)}")
    if not model.opset_import:
        raise InputError(f"{path}: not an ONNX model: it names no opset{_frozen(path)}")
    return model


def _no_text(message: Any) -> str | None:
    """The first text field that is none, by its name; protobuf hands such ones out as bytes."""
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
        raise InputError(f"{path}: empty (0 bytes)")
    for at, magic, words in _MAGIC:
        if head[at : at + len(magic)] == magic:
            raise InputError(f"{path}: not an ONNX file but {words}")
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") < size:
        raise InputError(
            f"{path}: not an ONNX file but weights as safetensors writes them: give "
            "package.module:factory, and the weights by --weights"
        )
    if size >= PROTOBUF_ENDS:
        raise InputError(
            f"{path}: {size} bytes, and protobuf ends at 2 GiB: save it with "
            "onnx.save(..., save_as_external_data=True)"
        )


def _frozen(path: Path) -> str:
    return (
        "; a TensorFlow graph (.pb)? tf2onnx makes an .onnx of it" if path.suffix == ".pb" else ""
    )


def _check_ops(path: Path, model: onnx.ModelProto) -> None:
    """Raises for ops that neither the standard, nor ONNX Runtime, nor the file itself defines."""
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
            f"{path}: custom ops that ONNX Runtime can't run, so that nothing could be compared: "
            f"{names}{where}: "
            "give each a body, a function of the ONNX file by the same domain and name, and its "
            "plugin for TensorRT by --plugin" + (f" ({known})" if known else "")
        )


def _check_ends(path: Path, model: onnx.ModelProto) -> None:
    """Raises for inputs and outputs that no conversion can have, and nodes that are in training."""
    graph = model.graph
    constants = {tensor.name for tensor in graph.initializer}
    inputs = [v.name for v in graph.input if v.name not in constants]
    outputs = [v.name for v in graph.output]
    if not outputs:
        raise InputError(f"{path}: the graph has no output")
    if not inputs:
        raise InputError(f"{path}: the graph has no input: all it gives is constant")
    names = [*inputs, *outputs]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice in inputs and twice in outputs:
        raise InputError(f"{path}: output {twice} is the input itself: put an Identity between")
    if twice is not None:
        raise InputError(f"{path}: two inputs or outputs are called {twice!r}: rename one")
    for node in nodes_of(graph):
        training = any(a.name == "training_mode" and a.i for a in node.attribute)
        if training and node.op_type == "BatchNormalization":
            raise InputError(
                f"{path}: BatchNormalization {node.name!r} has training_mode=1, so that a result "
                "depends on its whole batch: export the model in eval mode, or set it to 0"
            )
    for value in graph.input:
        if value.name not in constants:
            _check_type(f"{path}: input {value.name}", value.type)
    for value in graph.output:
        kind = value.type.WhichOneof("value")
        if kind != "tensor_type":
            raise InputError(f"{path}: output {value.name} is {_kind(kind)}: only tensors go out")


def _check_type(where: str, type_: onnx.TypeProto) -> None:
    kind = type_.WhichOneof("value")
    if kind != "tensor_type":
        raise InputError(f"{where} is {_kind(kind)}: only tensors go in")
    element = type_.tensor_type.elem_type
    name = TensorProto.DataType.Name(element).lower() if element else "of no type"
    allowed = "float16, float, double, bool and integers of 8 bits and more"
    if element not in _TAKEN:
        raise InputError(f"{where} is {name}: inputs can be {allowed}; cast it inside of the graph")
    if not type_.tensor_type.HasField("shape"):
        raise InputError(
            f"{where} has no shape, not even a rank: state it, with names for the sizes that vary"
        )


_TAKEN = {
    TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BOOL,
    TensorProto.INT8, TensorProto.INT16, TensorProto.INT32, TensorProto.INT64,
    TensorProto.UINT8, TensorProto.UINT16, TensorProto.UINT32, TensorProto.UINT64,
}  # fmt: skip


def _kind(kind: str | None) -> str:
    return f"a {kind.removesuffix('_type').replace('_', ' ')}" if kind else "of no type"


def _full_check(model: onnx.ModelProto, bare: onnx.ModelProto) -> tuple[str, ...]:
    """The checker with shape inference: notes on what it says, since it is stricter than a run.

    Where the shapes that the file states for values inside are to blame, they go: passes would
    rely on them.
    """
    if bare.ByteSize() > _FULL_CHECK or _inferred(bare) is None:
        return ()
    clean = onnx.ModelProto()
    clean.CopyFrom(bare)
    del clean.graph.value_info[:]
    for value in clean.graph.output:
        for dim in value.type.tensor_type.shape.dim:  # the checker wants the rank
            dim.Clear()
    words = _inferred(clean)
    if words is not None:
        return (f"onnx's shape inference refuses the file: {words}",)
    if not model.graph.value_info:
        return ()  # a stated output shape is wrong; a run tells it with the sizes
    del model.graph.value_info[:]
    return ("shapes that the file states for values inside contradict its nodes: left out",)


def _inferred(model: onnx.ModelProto) -> str | None:
    """What the checker says against a model with shape inference; None if nothing."""
    try:
        onnx.checker.check_model(model, full_check=True)
    except Exception as error:  # ValidationError, InferenceError: of no common base
        return next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return None
