"""Reads an ONNX file of anybody: names files of other kinds, and refuses what nothing can read.

Every command reads a user's ONNX file here first.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import onnx
from onnx import TensorProto

from pipeline.errors import InputError
from pipeline.graph.files import nodes_of
from pipeline.machine.files import open_plain

PROTOBUF_ENDS = 2 << 30
_MOST_NODES = 1_000_000  # after inlining; the largest language models have about 100,000
_Key = tuple[str, str]  # domain and name of a function
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


def read_onnx(path: Path) -> onnx.ModelProto:
    """Reads an ONNX file, without its external data.

    Raises:
        InputError: The file can't be read, is of another kind, or is damaged. Or it has no graph or
            no opset, or its functions become too many nodes.
    """
    if path.is_dir():
        inside = sorted(p.name for p in path.glob("*.onnx"))
        hint = f". Pass one of its files: {', '.join(inside[:5])}" if inside else ""
        raise InputError(f"{path}: a folder, not an ONNX file{hint}")
    try:
        with open_plain(path) as file:
            size = os.fstat(file.fileno()).st_size
            _check_head(path, file.read(64), size)
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
    for what in _damage(model):
        raise InputError(f"{path}: damaged: {what}. Copy the file again")
    if not model.HasField("graph") or not (model.graph.node or model.graph.output):
        raise InputError(f"{path}: not an ONNX model: the file has no graph{_frozen(path)}")
    if not model.opset_import:
        raise InputError(f"{path}: not an ONNX model: the file has no opset{_frozen(path)}")
    _check_functions(path, model)
    return model


def _damage(message: Any) -> Iterator[str]:
    """Text fields that are not valid text, which protobuf returns as bytes, and unknown types."""
    for field, value in message.ListFields():
        if field.type == field.TYPE_STRING:
            each = [value] if isinstance(value, (str, bytes)) else value
            if any(isinstance(text, bytes) for text in each):
                yield f"the field {field.full_name} is not text"
        elif field.type == field.TYPE_MESSAGE:
            for inner in [value] if hasattr(value, "ListFields") else value:
                yield from _damage(inner)
        elif field.name in ("data_type", "elem_type") and value not in _TYPES:
            whose = f" of {message.name!r}" if getattr(message, "name", "") else ""
            yield f"the element type {value}{whose} is unknown to onnx {onnx.__version__}"


_TYPES = frozenset(TensorProto.DataType.values())


def _check_functions(path: Path, model: onnx.ModelProto) -> None:
    """Raises `InputError` if the functions call themselves, or are too many nodes when inlined.

    A function that calls another one twice, and so on for thirty functions, is a billion nodes.
    """
    calls = {(f.domain, f.name): _called(f.node) for f in model.functions}
    sizes: dict[_Key, int] = {}
    waiting: dict[_Key, None] = {}  # the functions that wait for the size of another one, in order
    for first in calls:
        stack = [first]
        while stack:
            key = stack[-1]
            missing = [other for other in calls[key] if other in calls and other not in sizes]
            if key in sizes or not missing:
                stack.pop()
                waiting.pop(key, None)
                sizes[key] = sum(sizes.get(other, 1) for other in calls[key])
                continue
            waiting[key] = None
            if missing[0] in waiting:
                raise InputError(f"{path}: the function {missing[0][1]} calls itself")
            stack.append(missing[0])
    total = sum(sizes.get(key, 1) for key in _called(model.graph.node))
    if total > _MOST_NODES:
        raise InputError(
            f"{path}: its functions become {total} nodes when they are inlined, and the most is "
            f"{_MOST_NODES}. Use fewer nested functions"
        )


def _called(nodes: Iterable[onnx.NodeProto]) -> list[_Key]:
    graph = onnx.GraphProto(node=nodes)
    return [(node.domain, node.op_type) for node in nodes_of(graph)]


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
