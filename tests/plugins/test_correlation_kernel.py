"""kernel.cu of the correlation lookup, in tests without a GPU."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from lookup_inputs import Tensors, arguments

from pipeline.errors import PipelineError
from pipeline.plugins.correlation_lookup import cuda
from pipeline.plugins.correlation_lookup.function import LEVELS
from pipeline.plugins.correlation_lookup.torch_op import correlation_lookup


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., torch.Tensor]:
    """The op in kernel.cu, compiled for the CPU with emulate_cuda.h in place of CUDA."""
    if shutil.which("g++") is None:
        pytest.skip("no g++ here")
    folder = tmp_path_factory.mktemp("kernel")
    code = cuda.SOURCE.read_text(encoding="utf-8")
    dynamic = "extern __shared__ float4 shared[];"
    assert code.count(dynamic) == 1
    code = code.replace(dynamic, "float4* shared = dynamic_shared.data();")
    numbers = ", ".join(f"n[{i}]" for i in range(3 + 2 * LEVELS))
    source = folder / "kernel.cpp"
    source.write_text(
        '#include "emulate_cuda.h"\n'
        + code.replace("__shared__", "static")
        + f"""
extern "C" void run(const unsigned* grid, unsigned threads, size_t shared, float** p,
                    const int* n) {{
  launch({{grid[0], grid[1], grid[2]}}, threads, shared,
         [=] {{ correlation_lookup(p[0], p[1], p[2], p[3], p[4], p[5], p[6], {numbers}); }});
}}
"""
    )
    include = Path(__file__).parents[1] / "support"

    def call(inputs: Tensors, radius: int) -> torch.Tensor:
        library = folder / f"kernel_{radius}.so"
        if not library.exists():
            words = ["g++", "-O1", "-std=c++17", "-shared", "-fPIC", f"-I{include}", "-DHALF=0"]
            subprocess.run([*words, f"-DRADIUS={radius}", source, "-o", library], check=True)
        features, levels, coordinates = inputs
        batch, height, width, channels = features.shape
        shapes = tuple((level.shape[1], level.shape[2]) for level in levels)
        sizes = cuda.KernelSizes(batch, height, width, channels, shapes)
        points = LEVELS * (2 * radius + 1) ** 2
        windows = torch.full((batch, points, height, width), 1e9)
        tensors = (features, *levels, coordinates, windows)
        assert all(t.is_contiguous() for t in tensors)
        ctypes.CDLL(str(library)).run(
            (ctypes.c_uint * 3)(*sizes.grid),
            cuda.THREADS,
            ctypes.c_size_t(sizes.shared_bytes),
            (ctypes.c_void_p * 7)(*(t.data_ptr() for t in tensors)),
            (ctypes.c_int * len(sizes.numbers))(*sizes.numbers),
        )
        return windows

    return call


@pytest.mark.parametrize(
    ("batch", "channels", "radius"), [(2, 32, 4), (1, 20, 3), (1, 7, 3)], ids=str
)
def test_kernel_emulated(
    kernel: Callable[..., torch.Tensor], batch: int, channels: int, radius: int
) -> None:
    _, levels, _ = arguments(batch, channels, 17, 21)
    features, _, coordinates = arguments(batch, channels, 16, 19)
    # a few rows of queries only, in a map of another size: an emulated block takes 10 ms
    features, coordinates = features[:, 2:6].contiguous(), coordinates[:, :, 2:6].contiguous()
    coordinates[0, 0, 0, 0], coordinates[0, 1, 0, 1] = 1e30, -1e9
    coordinates[0, 0, 2, 3] = float("nan")
    inputs = (features, levels, coordinates)
    wanted = correlation_lookup(*inputs, radius)
    got = kernel(inputs, radius)
    np.testing.assert_allclose(got.numpy(), wanted.numpy(), rtol=0, atol=5e-6)


def test_kernel_compiles_or_says_what_is_missing() -> None:
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError):  # the bindings, or the library that they load
        with pytest.raises(PipelineError, match="pip install cuda-bindings nvidia-cuda-nvrtc"):
            cuda.compile_kernel(4, False, (8, 6))
        return
    for half in (False, True):
        assert len(cuda.compile_kernel(4, half, (8, 6))) > 1000
    with pytest.raises(PipelineError, match="NVRTC refuses") as failed:
        cuda.compile_kernel(-1, False, (8, 6))
    assert "error" in (failed.value.detail or "")


def test_kernel_refuses_more_channels_than_fit() -> None:
    with pytest.raises(PipelineError, match="1409 channels; the kernel takes 1408"):
        cuda.KernelSizes(1, 16, 16, 1409, ((16, 16), (8, 8), (4, 4), (2, 2)))
