"""expand_dft: compared with numpy and torch at long, odd, cut and padded lengths."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from pass_harness import apply, run

from pipeline.passes.case import Case
from pipeline.passes.expand_dft import PASS


def transformed(text: str, x: np.ndarray, opset: int = 17) -> np.ndarray:
    after, result = apply(PASS, Case("expand_dft", "x", "positive", text, (), opset=opset).model())
    assert result.modified
    (y,) = run(after, {"x": x})
    return y


def joined(y: np.ndarray) -> np.ndarray:
    return y[..., 0] + 1j * y[..., 1]


@pytest.mark.parametrize("length", [1, 2, 7, 1000, 4099])
@pytest.mark.parametrize("size", ["t", "static"])
def test_a_long_transform_is_as_numpy_has_it(length: int, size: str) -> None:
    """Angles of unreduced products, up to 2 pi 4099, would be wrong by 1e-3 in float32."""
    dim = length if size == "static" else "t"
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, length, 1)).astype(np.float32)
    text = f"(float[n,{dim},1] x) => (float[n,{dim},2] y) {{ y = DFT<axis=1>(x) }}"
    right = np.fft.fft(x[..., 0].astype(np.float64), axis=1)
    error = np.abs(joined(transformed(text, x)) - right).max()
    assert error < 2e-6 * np.abs(right).max()


@pytest.mark.parametrize(("length", "given"), [(9, 8), (9, 4), (8, 3), (8, 9), (14, 8), (1, 3)])
def test_a_real_inverse_is_as_torch_has_it(length: int, given: int) -> None:
    """ONNX Runtime 1.31 does not cut or pad a half spectrum; torch and numpy do."""
    x = np.random.default_rng(1).normal(size=(2, given, 2)).astype(np.float32)
    text = (
        f"(float[n,t,2] x) => (float[n,k,1] y) <int64 l = {{{length}}}> "
        "{ y = DFT<axis=1, inverse=1, onesided=1>(x, l) }"
    )
    right = torch.fft.irfft(torch.view_as_complex(torch.from_numpy(x)), n=length)
    np.testing.assert_allclose(transformed(text, x)[..., 0], right.numpy(), atol=1e-6)


def test_forward_and_inverse_give_the_signal_back() -> None:
    x = np.random.default_rng(2).normal(size=(2, 5, 37, 2)).astype(np.float32)
    there = "(float[n,h,w,2] x) => (float[n,h,w,2] y) { y = DFT<axis=2>(x) }"
    back = there.replace("axis=2", "axis=2, inverse=1")
    np.testing.assert_allclose(transformed(back, transformed(there, x)), x, atol=1e-5)


def test_half_precision_is_computed_in_float32() -> None:
    """The sum of 3000 ones is 3000; in float16 alone it would stop at 2048."""
    text = "(float16[n,t,1] x) => (float16[n,t,2] y) { y = DFT<axis=1>(x) }"
    y = transformed(text, np.ones((1, 3000, 1), np.float16))
    assert y.dtype == np.float16
    assert y[0, 0, 0] == 3000


def test_float64_keeps_its_digits() -> None:
    x = np.random.default_rng(3).normal(size=(1, 50, 1))
    text = "(double[n,t,1] x) => (double[n,t,2] y) { y = DFT<axis=1>(x) }"
    right = np.fft.fft(x[..., 0], axis=1)
    np.testing.assert_allclose(joined(transformed(text, x)), right, atol=1e-12)
