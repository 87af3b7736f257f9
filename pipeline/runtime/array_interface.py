"""A fast path for GPU arrays that implement ``__cuda_array_interface__``.

It handles plain arrays only: version 3, C-contiguous without strides, of the expected dtype, on the
engine's GPU, aligned, with no stream to wait for. `pipeline.runtime.arrays.device_view` handles all
other arrays, and raises the errors. It goes through cuda.core, which takes as long as TensorRT's
own call for a small network.

Source: Numba's documentation, CUDA Array Interface (version 3).
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any
from weakref import ref

from pipeline.runtime import cuda as _cuda
from pipeline.runtime.arrays import ALIGNMENT, Port, View, device_view

_MOST = 64  # arrays


class KnownArrays:
    """Remembers which arrays are on a GPU.

    Asking CUDA takes a microsecond or more through cuda-python. So it is asked once for an array,
    while the array lives and keeps its address.

    Args:
        device: CUDA's number of the GPU.
    """

    __slots__ = ("_arrays", "device")

    def __init__(self, device: int) -> None:
        self.device = device
        self._arrays: dict[int, tuple[ref[Any], int]] = {}

    def has(self, value: Any, pointer: int) -> bool:
        """True for an array in this GPU's memory."""
        arrays = self._arrays
        known = arrays.get(id(value))
        if known is not None and known[1] == pointer and known[0]() is value:
            return True
        if _cuda.gpu_of(pointer) != self.device:
            return False
        if len(arrays) >= _MOST:
            arrays.clear()
        with suppress(TypeError):  # no weak reference to this type: CUDA is asked every time
            arrays[id(value)] = ref(value), pointer
        return True


def plain(
    port: Port, value: Any, known: KnownArrays, stream: int
) -> tuple[int, tuple[int, ...], bool] | None:
    """A plain array's address, its shape, and whether it is read-only; None for anything else."""
    if hasattr(value, "__dlpack__"):  # DLPack goes first: it also orders the streams
        return None
    try:
        said = value.__cuda_array_interface__
        pointer, readonly = said["data"]
        shape, producer = said["shape"], said.get("stream")
        if (
            said["typestr"] == port.typestr
            and said.get("strides") is None
            and (producer is None or (producer == stream and type(producer) is int))
            and said["version"] >= 3
            and said.get("mask") is None
            and type(shape) is tuple
            and type(pointer) is int
            and pointer > 0
            and not pointer % ALIGNMENT
            and known.has(value, pointer)
        ):
            return pointer, shape, bool(readonly)
    except Exception:  # not an array, or its producer failed; `device_view` raises the error
        pass
    return None


def view_of(port: Port, value: Any, known: KnownArrays, stream: int) -> View:
    """Same as `pipeline.runtime.arrays.device_view`, but faster for plain arrays."""
    found = plain(port, value, known, stream)
    return device_view(port, value, known.device, stream) if found is None else View(*found, value)
