"""Checks the arrays that a call passes to an engine, and reads them without a copy.

An input is a numpy array, or a GPU array with DLPack or ``__cuda_array_interface__`` (torch, cupy,
jax, numba, cuda.core). cuda.core reads GPU arrays. Outputs on the GPU are in
`pipeline.runtime.device_array`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from pipeline.errors import InputError

# TensorRT requires this alignment for its activation memory. Its kernels read 16 bytes or more at a
# time, and after a misaligned read the process can't use the GPU any more.
ALIGNMENT = 256
_LEGACY, _PER_THREAD = 1, 2
_GPU_ARRAY = "pass a numpy array, or an array on the GPU (DLPack or __cuda_array_interface__)"


@dataclass(frozen=True, eq=False, slots=True)
class Port:
    """An input or output of an engine.

    Args:
        name: the tensor's name.
        dtype: the dtype that TensorRT reads or writes.
        declared: the model's dtype. It differs from `dtype` if this TensorRT lacks the type (int64
            on 8.6).
        on_host: whether TensorRT reads the tensor on the host, to compute sizes from its values.

    Attributes:
        typestr: `dtype` in the notation of ``__cuda_array_interface__``.
    """

    name: str
    dtype: np.dtype[Any]
    declared: np.dtype[Any]
    on_host: bool = False
    typestr: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "typestr", self.dtype.str)


def named_inputs(
    mapping: Mapping[str, Any] | None, keywords: Mapping[str, Any], names: Sequence[str]
) -> Mapping[str, Any]:
    """Returns the inputs by name, passed as one mapping or as keywords.

    Raises:
        InputError: both were passed, or a name is missing, unknown or misspelt.
    """
    if mapping is not None:
        if keywords:
            raise InputError("pass the inputs as one mapping or as keywords, not both")
        if type(mapping) is not dict and not isinstance(mapping, Mapping):
            kind = type(mapping).__name__
            raise InputError(
                f"a {kind} without a name; pass it by name; the inputs are: {', '.join(names)}"
            )
        keywords = mapping
    if len(keywords) == len(names):
        for name in names:
            if name not in keywords:
                break
        else:
            return keywords
    for name in keywords:
        if name not in names:
            near = get_close_matches(str(name), names, 1)
            hint = f", did you mean {near[0]!r}?" if near else ""
            raise InputError(f"no input {name!r}{hint}; the inputs are: {', '.join(names)}")
    missing = [name for name in names if name not in keywords]
    raise InputError(f"missing: {', '.join(missing)}; the inputs are: {', '.join(names)}")


def host_array(port: Port, value: Any) -> np.ndarray[Any, Any]:
    """Returns a numpy array as TensorRT reads it: the array itself, or int64 converted to int32.

    Raises:
        InputError: it is not a C-contiguous numpy array of that dtype, or a value exceeds int32.
    """
    if not isinstance(value, np.ndarray):
        raise InputError(_no_array(port, value))
    if isinstance(value, np.ma.MaskedArray):
        raise InputError(f"{port.name}: is a masked array; pass its values (.filled(VALUE))")
    array: np.ndarray[Any, Any] = value
    if array.dtype != port.dtype:
        narrowed = array.dtype == port.declared == np.int64 and port.dtype == np.int32
        if not narrowed:
            raise dtype_error(port, array.dtype)
        limits = np.iinfo(np.int32)
        if array.size and not (limits.min <= array.min() and array.max() <= limits.max):
            raise InputError(
                f"{port.name}: holds {array.min()}..{array.max()}; this TensorRT computes in "
                f"int32, which ends at {limits.max}; pass smaller values"
            )
        array = array.astype(np.int32, order="K")
    if not array.flags.c_contiguous:
        raise InputError(
            f"{port.name}: is not C-contiguous (strides {array.strides} bytes for shape "
            f"{array.shape}); pass numpy.ascontiguousarray of it"
        )
    return array


class View(NamedTuple):
    """A GPU array's address and shape; `keep` keeps its memory alive."""

    pointer: int
    shape: tuple[int, ...]
    readonly: bool
    keep: Any


def device_view(port: Port, value: Any, device: int, stream: int) -> View:
    """Reads an array on the GPU and makes the stream wait for the array's producer.

    Raises:
        InputError: the array is on the host or another GPU, has another dtype, is not C-contiguous,
            or is not aligned.
    """
    if isinstance(value, np.ndarray):
        raise InputError(
            f"{port.name}: is a numpy array, but other inputs are on the GPU; pass all on one side"
        )
    view = _read(port, value, stream)
    if view.device_id != device or not view.is_device_accessible:
        kind = type(value).__name__
        place = f"on GPU {view.device_id}" if view.is_device_accessible else "in host memory"
        raise InputError(
            f"{port.name}: the {kind} is {place}, the engine on GPU {device}; copy it there"
            + ("" if view.is_device_accessible else ", or pass numpy arrays")
        )
    shape, dtype = view.shape, view.dtype
    if dtype != port.dtype:
        raise dtype_error(port, dtype)
    if view.strides is not None and not _contiguous(shape, view.strides):
        raise InputError(
            f"{port.name}: is not C-contiguous (strides {view.strides} elements for shape "
            f"{shape}); pass a contiguous copy"
        )
    pointer = int(view.ptr)
    if pointer % ALIGNMENT and 0 not in shape:
        raise InputError(
            f"{port.name}: its address is not a multiple of {ALIGNMENT} bytes (is it part of "
            "another array?); pass a copy"
        )
    return View(pointer, shape, bool(view.readonly), view)


@cache
def cuda_views() -> Any:
    """cuda.core's StridedMemoryView."""
    from cuda.core.utils import StridedMemoryView

    return StridedMemoryView


def _read(port: Port, value: Any, stream: int) -> Any:
    try:
        if hasattr(value, "__dlpack__"):
            return cuda_views().from_dlpack(value, stream)
        if hasattr(value, "__cuda_array_interface__"):
            return cuda_views().from_cuda_array_interface(value, stream)
    except Exception as error:  # the producer's own error, of any type
        words = " ".join(str(error).split())
        raise InputError(f"{port.name}: the {type(value).__name__} can't be read: {words}") from (
            error
        )
    raise InputError(_no_array(port, value))


def _no_array(port: Port, value: Any) -> str:
    if hasattr(value, "__dlpack__") or hasattr(value, "__cuda_array_interface__"):
        return (
            f"{port.name}: is a {type(value).__name__}, but other inputs are numpy arrays; pass "
            "all on one side"
        )
    return f"{port.name}: is a {type(value).__name__}; {_GPU_ARRAY}"


def dtype_error(port: Port, dtype: np.dtype[Any]) -> InputError:
    """The error for an array whose dtype differs from TensorRT's."""
    wanted = str(port.dtype)
    if port.declared != port.dtype:
        wanted += f" (the model's dtype is {port.declared}, which this TensorRT lacks)"
    return InputError(f"{port.name}: dtype {dtype}, expected {wanted}; convert it")


def _contiguous(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """True for C order. Strides are in elements; those of axes of size 1 don't count."""
    step = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != step and 0 not in shape:
            return False
        step *= size
    return True


def stream_handle(stream: Any) -> int:
    """Returns the handle of a caller's stream; 0 for the legacy default stream.

    Args:
        stream: a handle, or an object with ``__cuda_stream__`` (cuda.core), ``cuda_stream`` (torch)
            or ``ptr`` (cupy).

    Raises:
        InputError: it is none of these, or it is the per-thread default stream.
    """
    if type(stream) is int and stream > _PER_THREAD:
        return stream
    handle = stream
    if hasattr(stream, "__cuda_stream__"):
        said = stream.__cuda_stream__() if callable(stream.__cuda_stream__) else None
        handle = said[1] if isinstance(said, tuple) and len(said) == 2 else None
    else:
        for attribute in ("cuda_stream", "ptr"):
            if hasattr(stream, attribute):
                handle = getattr(stream, attribute)
                break
    if isinstance(handle, bool) or not isinstance(handle, int) or handle < 0:
        raise InputError(
            f"stream={stream!r}: pass a handle, or an object with __cuda_stream__ or cuda_stream"
        )
    if handle == _PER_THREAD:
        raise InputError("stream: the per-thread default stream can't be used; create a stream")
    return 0 if handle == _LEGACY else handle
