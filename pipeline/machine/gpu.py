"""Finds out from the driver whether a GPU here can run a target's engines.

It asks the driver library directly, so it needs neither torch nor a working TensorRT runtime.
Source: CUDA Driver API (cuInit, cuDeviceGetCount, cuDeviceGetAttribute).
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from pipeline.machine.target import Target

_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
# Where the portable engine of TensorRT-RTX 1.7 loads (NVIDIA's support matrix; an H200, 9.0,
# was refused). For 7.5, TensorRT-RTX needs a build made for it, which refuses float32 products.
_RTX_CAPABILITIES = {(8, 0), (8, 6), (8, 9), (12, 0), (12, 1)}
_TURING = (7, 5)


@dataclass(frozen=True)
class Gpu:
    """The first GPU: its name and compute capability."""

    name: str
    capability: tuple[int, int]


def find_gpu() -> Gpu | str:
    """Returns the first GPU, or a text that says why there is none."""
    for library in ("libcuda.so.1", "nvcuda.dll"):
        try:
            cuda = ctypes.CDLL(library)
            break
        except OSError:
            continue
    else:
        return "no NVIDIA driver is installed here"
    code = cuda.cuInit(0)
    if code:
        return f"the NVIDIA driver does not start here (cuInit returns {code})"
    device, count = ctypes.c_int(), ctypes.c_int()
    if cuda.cuDeviceGetCount(ctypes.byref(count)) or count.value == 0:
        return "the NVIDIA driver sees no GPU here"
    cuda.cuDeviceGet(ctypes.byref(device), 0)
    name = ctypes.create_string_buffer(100)
    cuda.cuDeviceGetName(name, len(name), device)
    numbers = []
    for attribute in (_MAJOR, _MINOR):
        number = ctypes.c_int()
        cuda.cuDeviceGetAttribute(ctypes.byref(number), attribute, device)
        numbers.append(number.value)
    return Gpu(name.value.decode(errors="replace"), (numbers[0], numbers[1]))


def why_not(target: Target, gpu: Gpu | None = None) -> str:
    """Returns why a GPU can't run the target's engines; empty if it can.

    Args:
        target: the TensorRT that builds the engines.
        gpu: the GPU; by default the first one here.
    """
    found = gpu or find_gpu()
    if isinstance(found, str):
        return found
    if target.flavour == "tensorrt_rtx" and found.capability not in _RTX_CAPABILITIES:
        major, minor = found.capability
        gpu_here = f"{found.name} (compute capability {major}.{minor})"
        if found.capability == _TURING:
            return (
                f"the portable TensorRT-RTX engine does not run on {gpu_here}: 7.5 needs a build "
                "made for it, which this pipeline does not make"
            )
        return f"TensorRT-RTX does not run on {gpu_here}"
    return ""
