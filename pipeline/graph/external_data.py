"""The external data of an ONNX file: checking and copying it.

A file can name any path of the machine as its external data. So every location is checked before
anything is read. It must be a file inside of the model's folder, after links are followed.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path, PureWindowsPath
from typing import BinaryIO

import onnx
from onnx import TensorProto, external_data_helper, helper

from pipeline.errors import InputError
from pipeline.graph.files import check_source, is_heavy, is_outside, lightened, tensors_in
from pipeline.graph.reading import read_onnx
from pipeline.spec.interface import Interface

_BITS = {"INT4": 4, "UINT4": 4, "FLOAT4E2M1": 4, "INT2": 2, "UINT2": 2}  # others are whole bytes
_ALIGNED = 64  # bytes; where a tensor begins in the data file
_CHUNK = 16 << 20


def load_model(path: Path) -> tuple[onnx.ModelProto, tuple[str, ...]]:
    """The model with all its weights in memory, and the names of its external data files.

    Raises:
        InputError: `read_onnx` refuses the file, or `outside_files` its external data.
    """
    model = read_onnx(path)
    names = tuple(outside_files(path, model))
    external_data_helper.load_external_data_for_model(model, str(path.parent))
    return model, names


def check_models(folder: Path, names: Iterable[str], interface: Interface) -> None:
    """Checks the ONNX files of an artifact, which somebody else may have made.

    Args:
        folder: The artifact's folder.
        names: Names of files. Those that do not exist, or are not ONNX files, are left out.
        interface: The inputs and outputs that the manifest states.

    Raises:
        InputError: A file is damaged, its external data is outside of the folder, or the checker
            refuses it. Or it has other inputs or outputs.
    """
    for name in names:
        path = folder / name
        if path.suffix != ".onnx" or not path.is_file():
            continue
        model = read_onnx(path)
        outside_files(path, model)
        check_source(lightened(model, lambda t: is_heavy(t) or is_outside(t)), path)
        constants = {tensor.name for tensor in model.graph.initializer}
        inputs = [value for value in model.graph.input if value.name not in constants]
        for kind, values, stated in (
            ("inputs", inputs, interface.inputs),
            ("outputs", model.graph.output, interface.outputs),
        ):
            if list(map(_end, values)) != [(t.name, len(t.shape or ())) for t in stated]:
                raise InputError(f"{path}: its {kind} are not those of the manifest. Convert again")


def _end(value: onnx.ValueInfoProto) -> tuple[str, int]:
    return value.name, len(value.type.tensor_type.shape.dim)


def outside_files(path: Path, model: onnx.ModelProto) -> dict[str, Path]:
    """The external data files by location, after a check of each.

    Raises:
        InputError: A file is missing, too short, or outside of the model's folder.
    """
    found: dict[str, Path] = {}
    for function in model.functions:
        for tensor in tensors_in(onnx.GraphProto(node=function.node)):
            if external_data_helper.uses_external_data(tensor):
                raise InputError(
                    f"{path}: function {function.name} has external data. Inline the function"
                )
    for tensor in tensors_in(model.graph):
        if not external_data_helper.uses_external_data(tensor):
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about unknown entries
                info = external_data_helper.ExternalDataInfo(tensor)
            offset, length = int(info.offset or 0), int(info.length or 0)
        except ValueError as error:
            raise InputError(
                f"{path}: the entry for the external data of {tensor.name} is damaged: {error}. "
                "Save the model again"
            ) from error
        location = str(info.location or "")
        if location not in found:
            found[location] = _inside(path, location, tensor.name)
        need, size = _bytes(tensor), found[location].stat().st_size
        if length and length != need:
            raise InputError(
                f"{path}: tensor {tensor.name} needs {need} bytes, but the model states {length} "
                f"bytes in external data {location}. Save the model again"
            )
        if offset < 0 or offset + need > size:
            raise InputError(
                f"{path}: its external data {location} is cut short: {tensor.name} is in bytes "
                f"{offset} to {offset + need}, but the file has {size}. Copy the file again"
            )
    return found


def _inside(path: Path, location: str, tensor: str) -> Path:
    """The file of a location, if it is inside of the model's folder."""
    if not location:
        raise InputError(
            f"{path}: tensor {tensor} has external data without a file name. Save it again"
        )
    windows = PureWindowsPath(location)
    if Path(location).is_absolute() or windows.drive or windows.root or ".." in windows.parts:
        raise InputError(
            f"{path}: external data {location!r} is outside of the model's folder: refused. Put "
            "the file beside the model, and save the model with that name"
        )
    folder = path.parent.resolve()
    place = path.parent / location
    real = place.resolve()
    if not real.is_relative_to(folder):
        raise InputError(
            f"{path}: external data {location!r} is a symbolic link that leads out of the model's "
            f"folder, to {real}: refused. If you trust it, copy model and data into one folder "
            "(cp -L)"
        )
    if not real.exists():
        raise InputError(
            f"{path}: its external data {location} is missing. Put it beside the model"
        )
    if not real.is_file():
        raise InputError(f"{path}: its external data {location} is not a file. Put the file there")
    return real


def _bytes(tensor: TensorProto) -> int:
    """The bytes of a tensor's elements as raw data."""
    count: int = math.prod(tensor.dims)
    try:
        bits = _BITS.get(TensorProto.DataType.Name(tensor.data_type))
        width: int = helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
    except (KeyError, ValueError):
        raise InputError(f"tensor {tensor.name} has an unknown type: {tensor.data_type}") from None
    return -(-count * bits // 8) if bits else count * width


def gather(source: Path, model: onnx.ModelProto, outside: Mapping[str, Path], path: Path) -> None:
    """Copies a model's external data into one file beside `path`, and updates the model."""
    location = f"{path.name}.data"
    target = path.with_name(location)
    if target.resolve() in outside.values():
        raise InputError(
            f"{source}: the copy would overwrite its external data {target}. Choose another path"
        )
    target.unlink(missing_ok=True)
    if not outside:
        return
    done: dict[tuple[str, int, int], int] = {}
    with target.open("wb") as out:
        for tensor in tensors_in(model.graph):
            if not external_data_helper.uses_external_data(tensor):
                continue
            info = external_data_helper.ExternalDataInfo(tensor)
            length = _bytes(tensor)
            key = (str(info.location), int(info.offset or 0), length)
            if key not in done:
                out.write(bytes(-out.tell() % _ALIGNED))
                done[key] = out.tell()
                _copy(outside[key[0]], key[1], length, out)
            _place(tensor, location, done[key], length)


def _copy(source: Path, offset: int, length: int, out: BinaryIO) -> None:
    with source.open("rb") as data:
        data.seek(offset)
        left = length
        while left:
            chunk = data.read(min(left, _CHUNK))
            if not chunk:
                raise InputError(f"{source}: became shorter during the copy. Run it again")
            out.write(chunk)
            left -= len(chunk)


def _place(tensor: TensorProto, location: str, offset: int, length: int) -> None:
    del tensor.external_data[:]
    for key, value in (("location", location), ("offset", offset), ("length", length)):
        entry = tensor.external_data.add()
        entry.key, entry.value = key, str(value)
