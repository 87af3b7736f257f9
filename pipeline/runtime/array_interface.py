"""Arrays on the GPU that speak ``__cuda_array_interface__``, the quick way.

Only plain ones: version 3, C-contiguous without strides, of the right dtype, on the right GPU,
aligned, with no stream to wait for. Everything else, and everything that is wrong, is left to
`pipeline.runtime.arrays.device_view`, which has the words for it. (cuda.core's way costs as much as
TensorRT's own call of a small network.)

Source: Numba's documentation, CUDA Array Interface (version 3).
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any
from weakref import ref

from pipeline.runtime import cuda as _cuda
from pipeline.runtime.arrays import ALIGNMENT, Port, View, device_view

_MOST = 64  # arrays


class Known:
    """Which arrays are on a GPU. CUDA is asked once for an array (cuda-python takes a microsecond
    and more for that), for as long as it lives and names the same address.

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
        with suppress(TypeError):  # of a kind that has no weak references: asked again
            arrays[id(value)] = ref(value), pointer
        return True


def plain(
    port: Port, value: Any, known: Known, stream: int
) -> tuple[int, tuple[int, ...], bool] | None:
    """Address, shape, and whether it is read-only, of a plain array; None for anything else."""
    if hasattr(value, "__dlpack__"):  # has the better protocol, and goes by it
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
    except Exception:  # of no array, or what its producer does; `device_view` says it
        pass
    return None


def view_of(port: Port, value: Any, known: Known, stream: int) -> View:
    """`pipeline.runtime.arrays.device_view`, quicker for plain arrays."""
    found = plain(port, value, known, stream)
    return device_view(port, value, known.device, stream) if found is None else View(*found, value)
