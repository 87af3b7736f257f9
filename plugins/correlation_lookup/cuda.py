"""Runs kernel.cu on the current GPU: NVRTC compiles it at first use, and it gets raw pointers.

Needs NVIDIA's Python bindings (cuda-bindings) and NVRTC, but not torch.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import PipelineError, first_line
from pipeline.plugins.correlation_lookup.function import LEVELS

SOURCE = Path(__file__).parent / "kernel.cu"
_QUERIES = 8  # as in kernel.cu
THREADS = _QUERIES * 32
_SHARED = (
    44 << 10
)  # bytes of dynamic shared memory; the kernel's static shared memory is below 4 KiB
MAX_CHANNELS = _SHARED // (_QUERIES * 4)
_GET = "pip install cuda-bindings nvidia-cuda-nvrtc"


@dataclass(frozen=True)
class KernelSizes:
    """The sizes of the kernel's tensors.

    Args:
        batch, height, width, channels: sizes of the first feature map.
        levels: height and width of each level of the second feature map.
    """

    batch: int
    height: int
    width: int
    channels: int
    levels: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        if self.channels > MAX_CHANNELS:
            raise PipelineError(
                f"CorrelationLookup: {self.channels} channels; the kernel takes {MAX_CHANNELS}"
            )

    @property
    def grid(self) -> tuple[int, int, int]:
        return -(-self.width // _QUERIES), self.height, self.batch * LEVELS

    @property
    def shared_bytes(self) -> int:
        return _QUERIES * self.channels * 4

    @property
    def numbers(self) -> tuple[int, ...]:
        """The kernel's integer arguments."""
        flat = (size for level in self.levels for size in level)
        return (self.height, self.width, self.channels, *flat)


def compile_kernel(radius: int, half: bool, capability: tuple[int, int]) -> bytes:
    """Compiles kernel.cu to machine code for a compute capability. Needs no GPU.

    Raises:
        PipelineError: the bindings or NVRTC are missing, or NVRTC refuses the source. Its log is
            the detail.
    """
    _, nvrtc = _bindings()
    options = (
        f"--gpu-architecture=sm_{capability[0]}{capability[1]}",
        f"-DRADIUS={radius}",
        f"-DHALF={int(half)}",
    )
    name = SOURCE.name.encode()
    program = _checked(nvrtc, nvrtc.nvrtcCreateProgram(SOURCE.read_bytes(), name, 0, [], []))
    try:
        words = [option.encode() for option in options]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(words), words)
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            log = bytes(_checked(nvrtc, nvrtc.nvrtcGetProgramLogSize(program)))
            _checked(nvrtc, nvrtc.nvrtcGetProgramLog(program, log))
            raise PipelineError(
                f"CorrelationLookup: NVRTC refuses {SOURCE.name} with {' '.join(options)}",
                detail=log.decode(errors="replace").strip("\0\n"),
            )
        code = bytes(_checked(nvrtc, nvrtc.nvrtcGetCUBINSize(program)))
        _checked(nvrtc, nvrtc.nvrtcGetCUBIN(program, code))
        return code
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def launch(
    radius: int, half: bool, sizes: KernelSizes, pointers: Sequence[int], stream: int
) -> None:
    """Starts the kernel on the current CUDA context, and does not wait for it.

    Args:
        radius: radius of the window, in pixels.
        half: the features and windows are float16; otherwise float32.
        sizes: the tensors' sizes.
        pointers: device addresses of features, level 0 to 3, coordinates, windows.
        stream: the CUDA stream's handle.
    """
    if 0 in sizes.grid:
        return
    driver, _ = _bindings()
    context = _checked(driver, driver.cuCtxGetCurrent())
    function = _loaded(radius, half, int(context))
    values = (*pointers, *sizes.numbers)
    types = (ctypes.c_void_p,) * len(pointers) + (ctypes.c_int,) * len(sizes.numbers)
    _checked(
        driver,
        driver.cuLaunchKernel(
            function, *sizes.grid, THREADS, 1, 1, sizes.shared_bytes, stream, (values, types), 0
        ),
    )


@functools.cache
def _loaded(radius: int, half: bool, context: int) -> Any:
    """The kernel's handle in a CUDA context."""
    del context
    driver, _ = _bindings()
    device = _checked(driver, driver.cuCtxGetDevice())
    kind = driver.CUdevice_attribute
    major, minor = (
        _checked(driver, driver.cuDeviceGetAttribute(attribute, device))
        for attribute in (
            kind.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
            kind.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
        )
    )
    module = _checked(driver, driver.cuModuleLoadData(compile_kernel(radius, half, (major, minor))))
    return _checked(driver, driver.cuModuleGetFunction(module, b"correlation_lookup"))


@functools.cache
def _bindings() -> tuple[Any, Any]:
    try:
        driver, nvrtc = (importlib.import_module(f"cuda.bindings.{n}") for n in ("driver", "nvrtc"))
        nvrtc.nvrtcVersion()  # loads the library
    except (ImportError, OSError, RuntimeError) as error:
        first = first_line(error)
        raise PipelineError(
            f"CorrelationLookup: Python cannot use NVRTC ({first}): {_GET}"
        ) from error
    return driver, nvrtc


def _checked(library: Any, answer: tuple[Any, ...]) -> Any:
    """The value that a call returned. Raises an error with the library's name for it."""
    status, *values = answer
    if int(status) != 0:
        name = getattr(status, "name", str(status))
        raise PipelineError(f"CorrelationLookup: {library.__name__.rpartition('.')[2]}: {name}")
    return values[0] if values else None
