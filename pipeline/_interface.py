"""Arrays on the GPU that speak ``__cuda_array_interface__``, the quick way.

Only plain ones: version 3, C-contiguous without strides, of the right dtype, on the right GPU,
aligned, with no stream to wait for. Everything else, and everything that is wrong, is left to
`pipeline._arrays.device_view`, which has the words for it. (cuda.core's way costs as much as
TensorRT's own call of a small network.)

Source: Numba's documentation, CUDA Array Interface (version 3).
"""

from __future__ import annotations

from typing import Any

from pipeline import _cuda
from pipeline._arrays import ALIGNMENT, Port, View, device_view


def plain(
    port: Port, value: Any, device: int, stream: int
) -> tuple[int, tuple[int, ...], bool] | None:
    """Address, shape, and whether it is read-only, of a plain array; None for anything else."""
    if hasattr(value, "__dlpack__"):  # has the better protocol, and goes by it
        return None
    try:
        said = value.__cuda_array_interface__
        pointer, readonly = said["data"]
        shape, producer = said["shape"], said.get("stream")
        if (
            said["typestr"] == port.dtype.str
            and said.get("strides") is None
            and (producer is None or (producer == stream and type(producer) is int))
            and said["version"] >= 3
            and said.get("mask") is None
            and type(shape) is tuple
            and type(pointer) is int
            and pointer > 0
            and not pointer % ALIGNMENT
            and _cuda.gpu_of(pointer) == device
        ):
            return pointer, shape, bool(readonly)
    except Exception:  # of no array, or what its producer does; `device_view` says it
        pass
    return None


def view_of(port: Port, value: Any, device: int, stream: int) -> View:
    """`pipeline._arrays.device_view`, quicker for plain arrays."""
    found = plain(port, value, device, stream)
    return device_view(port, value, device, stream) if found is None else View(*found, value)
