"""Finds out from the driver whether a GPU here can run a target's engines.

It asks the driver library directly, so it needs neither torch nor a working TensorRT runtime.
Source: CUDA Driver API (cuInit, cuDeviceGetCount, cuDeviceGetAttribute).
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.errors import InputError
from pipeline.machine.target import Target

Capability = tuple[int, int]

_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
# Where the portable engine of TensorRT-RTX 1.7 loads (NVIDIA's support matrix; an H200, 9.0,
# was refused). For 7.5, TensorRT-RTX needs a build made for it, which refuses float32 products.
PORTABLE: tuple[Capability, ...] = ((8, 0), (8, 6), (8, 9), (12, 0), (12, 1))
_TURING = (7, 5)
# the lowest for a hardware-compatible plan (NvInfer.h: HardwareCompatibilityLevel::kAMPERE_PLUS)
AMPERE: Capability = (8, 0)
_GPU = re.compile(r"(?:sm_?)?(\d+)\.?(\d)")


@dataclass(frozen=True)
class Gpu:
    """A GPU: its name and compute capability."""

    name: str
    capability: Capability

    @property
    def text(self) -> str:
        """The name with the compute capability."""
        return f"{self.name} (compute capability {capability_text(self.capability)})"


def capability_text(capability: Capability) -> str:
    """``8.6`` for (8, 6)."""
    return f"{capability[0]}.{capability[1]}"


def sm_text(capability: Sequence[int]) -> str:
    """The compute capability as ``--gpu`` takes it: ``sm86``."""
    major, minor = capability
    return f"sm{major}{minor}"


def parse_capabilities(texts: Sequence[str]) -> tuple[Capability, ...]:
    """Reads kinds of GPU: ``sm86`` and ``8.6`` are (8, 6). A text may have several, with commas.

    Raises:
        InputError: A text is no compute capability.
    """
    found = []
    for text in (part.strip() for whole in texts for part in whole.split(",")):
        match = _GPU.fullmatch(text)
        if match is None:
            raise InputError(
                f"gpu {text!r} is no compute capability. Write it as sm86 or 8.6 (`nvidia-smi "
                "--query-gpu=compute_cap --format=csv` prints it)"
            )
        found.append((int(match[1]), int(match[2])))
    return tuple(sorted(set(found)))


def check_capabilities(asked: Sequence[Capability], target: Target) -> None:
    """Raises `InputError` if the target does not build for one of these GPUs on this machine.

    TensorRT-RTX builds for any GPU that it supports. The others build for the GPU that is here.
    """
    if target.flavour == "tensorrt_rtx":
        known = (_TURING, *PORTABLE)
        for one in asked:
            if one not in known:
                raise InputError(
                    f"gpu {capability_text(one)}: {target} builds for "
                    f"{', '.join(map(capability_text, known))} only"
                )
    elif asked:
        gpu = find_gpu()
        here = gpu if isinstance(gpu, str) else f"here is the {gpu.text}"
        if isinstance(gpu, str) or tuple(asked) != (gpu.capability,):
            raise InputError(
                f"gpu {', '.join(map(capability_text, asked))}: {target} builds for the GPU of "
                f"this machine only, and {here}"
            )


def find_gpu(number: int = 0) -> Gpu | str:
    """Returns the GPU with CUDA's number, or a text that says why there is none."""
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
    if not 0 <= number < count.value:
        return f"the NVIDIA driver sees {count.value} GPUs here, and none has the number {number}"
    cuda.cuDeviceGet(ctypes.byref(device), number)
    name = ctypes.create_string_buffer(100)
    cuda.cuDeviceGetName(name, len(name), device)
    numbers = []
    for attribute in (_MAJOR, _MINOR):
        value = ctypes.c_int()
        cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
        numbers.append(value.value)
    return Gpu(name.value.decode(errors="replace"), (numbers[0], numbers[1]))


def why_not(
    target: Target,
    gpu: Gpu | None = None,
    built_for: Sequence[str] = (),
    *,
    compatible: bool = False,
) -> str:
    """Returns why a GPU can't run the target's engines; empty if it can.

    Args:
        target: the TensorRT that builds the engines.
        gpu: the GPU; by default the first one here.
        built_for: the compute capabilities that one engine is for, if it is not portable.
        compatible: whether that engine is hardware-compatible.
    """
    found = gpu or find_gpu()
    if isinstance(found, str):
        return found
    if compatible:
        need = f"the engine needs compute capability {capability_text(AMPERE)} or later"
        here = capability_text(found.capability)
        return "" if found.capability >= AMPERE else f"{need}, {found.name} has {here}"
    if built_for:
        here = capability_text(found.capability)
        wanted = " or ".join(built_for)
        why = f"the engine needs compute capability {wanted}, {found.name} has {here}"
        return "" if here in built_for else why
    if target.flavour == "tensorrt_rtx" and found.capability not in PORTABLE:
        if found.capability == _TURING:
            return (
                f"the portable TensorRT-RTX engine does not run on {found.text}: 7.5 needs an "
                "engine built for it with --gpu sm75"
            )
        return f"TensorRT-RTX does not run on {found.text}"
    return ""
