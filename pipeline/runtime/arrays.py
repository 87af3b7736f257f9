"""Arrays on their way into an engine: what may come in, and what is said of what may not.

Numpy arrays, and anything on the GPU that speaks DLPack or ``__cuda_array_interface__`` (torch,
cupy, jax, numba, cuda.core), read by cuda.core without a copy. What comes out on the GPU:
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

# What TensorRT asks of the memory that it is given for itself; its kernels read 16 bytes at a
# time and more, and a misaligned read would end the process's use of the GPU.
ALIGNMENT = 256
_LEGACY, _PER_THREAD = 1, 2
_GPU_ARRAY = "give a numpy array, or an array on the GPU (DLPack or __cuda_array_interface__)"


@dataclass(frozen=True, eq=False, slots=True)
class Port:
    """An input or output of an engine.

    Args:
        name: of the tensor.
        dtype: what TensorRT reads or writes.
        declared: what the model says; another one than `dtype` where this TensorRT has no such
            type (int64 on 8.6).
        on_host: TensorRT reads it on the host (sizes are computed from its values).

    Attributes:
        typestr: `dtype` as ``__cuda_array_interface__`` has it.
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
    """The inputs by name, given as one mapping or as keywords.

    Raises:
        InputError: both, or a name that is missing, unknown or misspelt.
    """
    if mapping is not None:
        if keywords:
            raise InputError("give the inputs as one mapping or as keywords, not both")
        if type(mapping) is not dict and not isinstance(mapping, Mapping):
            kind = type(mapping).__name__
            raise InputError(f"a {kind} without a name; the inputs are: {', '.join(names)}")
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
    """A numpy array as TensorRT reads it: the array itself, or int32 made of int64.

    Raises:
        InputError: not a C-contiguous numpy array of that dtype, or values beyond int32.
    """
    if not isinstance(value, np.ndarray):
        raise InputError(_no_array(port, value))
    if isinstance(value, np.ma.MaskedArray):
        raise InputError(f"{port.name}: is a masked array; give its values (.filled(VALUE))")
    array: np.ndarray[Any, Any] = value
    if array.dtype != port.dtype:
        narrowed = array.dtype == port.declared == np.int64 and port.dtype == np.int32
        if not narrowed:
            raise dtype_error(port, array.dtype)
        limits = np.iinfo(np.int32)
        if array.size and not (limits.min <= array.min() and array.max() <= limits.max):
            raise InputError(
                f"{port.name}: holds {array.min()}..{array.max()}; this TensorRT computes in "
                f"int32, which ends at {limits.max}"
            )
        array = array.astype(np.int32, order="K")
    if not array.flags.c_contiguous:
        raise InputError(
            f"{port.name}: is not C-contiguous (strides {array.strides} bytes for shape "
            f"{array.shape}); give numpy.ascontiguousarray of it"
        )
    return array


class View(NamedTuple):
    """What an array on the GPU says of itself; `keep` holds its memory."""

    pointer: int
    shape: tuple[int, ...]
    readonly: bool
    keep: Any


def device_view(port: Port, value: Any, device: int, stream: int) -> View:
    """An array on the GPU, made ready for the stream (which waits for its producer).

    Raises:
        InputError: it is on the host or another GPU, of another dtype, not C-contiguous, or not
            aligned.
    """
    if isinstance(value, np.ndarray):
        raise InputError(
            f"{port.name}: is a numpy array, but others are on the GPU; give all on one side"
        )
    view = _read(port, value, stream)
    if view.device_id != device or not view.is_device_accessible:
        kind = type(value).__name__
        place = f"on GPU {view.device_id}" if view.is_device_accessible else "in host memory"
        raise InputError(
            f"{port.name}: the {kind} is {place}, the engine on GPU {device}; copy it there"
            + ("" if view.is_device_accessible else ", or give numpy arrays")
        )
    shape, dtype = view.shape, view.dtype
    if dtype != port.dtype:
        raise dtype_error(port, dtype)
    if view.strides is not None and not _contiguous(shape, view.strides):
        raise InputError(
            f"{port.name}: is not C-contiguous (strides {view.strides} elements for shape "
            f"{shape}); give a contiguous copy"
        )
    pointer = int(view.ptr)
    if pointer % ALIGNMENT and 0 not in shape:
        raise InputError(
            f"{port.name}: begins at an address that is no multiple of {ALIGNMENT} bytes (part of "
            "another array?); give a copy"
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
    except Exception as error:  # what the producer refuses, in its words
        words = " ".join(str(error).split())
        raise InputError(f"{port.name}: the {type(value).__name__} can't be read: {words}") from (
            error
        )
    raise InputError(_no_array(port, value))


def _no_array(port: Port, value: Any) -> str:
    if hasattr(value, "__dlpack__") or hasattr(value, "__cuda_array_interface__"):
        return (
            f"{port.name}: the {type(value).__name__} is no numpy array, but others are; give all "
            "on one side"
        )
    return f"{port.name}: is a {type(value).__name__}; {_GPU_ARRAY}"


def dtype_error(port: Port, dtype: np.dtype[Any]) -> InputError:
    """For an array of another dtype than TensorRT reads or writes."""
    wanted = str(port.dtype)
    if port.declared != port.dtype:
        wanted += f" (the model says {port.declared}, which this TensorRT does not have)"
    return InputError(f"{port.name}: dtype {dtype}, expected {wanted}; convert it")


def _contiguous(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """True for C order, strides in elements; those of axes of size 1 don't matter."""
    step = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != step and 0 not in shape:
            return False
        step *= size
    return True


def stream_handle(stream: Any) -> int:
    """The handle of a caller's stream: 0 for the legacy default stream.

    Takes a number, or an object with ``__cuda_stream__`` (cuda.core), ``cuda_stream`` (torch) or
    ``ptr`` (cupy).

    Raises:
        InputError: it is none of these, or the per-thread default stream.
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
            f"stream={stream!r}: give a handle, or an object with __cuda_stream__ or cuda_stream"
        )
    if handle == _PER_THREAD:
        raise InputError("stream: the per-thread default stream can't be used; make a stream")
    return 0 if handle == _LEGACY else handle
