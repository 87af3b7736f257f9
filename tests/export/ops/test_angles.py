"""atan2 at zeros of both signs, infinities and NaN is torch's."""

from __future__ import annotations

import itertools
import math

import numpy as np
import onnxruntime
import pytest
import torch

from pipeline.export.ops import exporter

VALUES = [0.0, -0.0, 1.0, -1.0, 0.5, -3.0, 1e-30, -1e30, math.inf, -math.inf, math.nan]


class Angle(torch.nn.Module):
    def forward(self, y, x):
        return torch.atan2(y, x)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16]
)  # ONNX Runtime has no float64 Atan
def test_like_torch(tmp_path, dtype) -> None:
    y, x = torch.tensor(list(itertools.product(VALUES, VALUES))).to(dtype).unbind(1)
    program = torch.export.export(Angle(), (y, x))
    path, shape = tmp_path / "m.onnx", tuple(x.shape)
    exporter.to_onnx(
        program, path, opset=18, input_names=["y", "x"], output_names=["a"], shapes=[shape, shape]
    )
    session = onnxruntime.InferenceSession(str(path))
    (got,) = session.run(None, {"y": y.numpy(), "x": x.numpy()})
    want = torch.atan2(y, x).numpy()
    assert got.dtype == want.dtype
    np.testing.assert_allclose(got, want, rtol=2e-3 if dtype == torch.float16 else 3e-7)
    kept = ~np.isnan(want)
    np.testing.assert_array_equal(np.signbit(got)[kept], np.signbit(want)[kept])
