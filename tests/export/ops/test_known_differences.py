"""The differences for NaN that docs/reference/targets.md lists: if one is gone, change the page."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from op_exports import export_op
from torch.nn import functional

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "targets.md"
# the words on the page, the function, how many results are NaN in torch and in ONNX Runtime
CASES = {
    "adaptive average pools": (lambda x: functional.adaptive_avg_pool2d(x, (3, 4)), 2, 12),
    'interpolate(mode="area")': (
        lambda x: functional.interpolate(x, size=(3, 4), mode="area"), 2, 12,
    ),
    "interpolate(antialias=True)": (
        lambda x: functional.interpolate(x, size=(5, 4), mode="bilinear", antialias=True), 4, 20,
    ),
    "amax": (lambda x: x.amax(3), 1, 0),
    "max pools": (lambda x: functional.max_pool2d(x, 2), 1, 0),
}  # fmt: skip


@pytest.mark.parametrize("words", CASES)
def test_it_still_differs(tmp_path, words) -> None:
    function, in_torch, in_onnx = CASES[words]
    assert words in PAGE.read_text(encoding="utf-8")
    path = tmp_path / "m.onnx"
    export_op(function, [torch.randn(1, 2, 9, 10)], path, [(2, 3)])
    x = torch.randn(1, 2, 8, 8, generator=torch.Generator().manual_seed(1))
    x[0, 0, 2, 3] = torch.nan
    (got,) = onnxruntime.InferenceSession(str(path)).run(None, {"x0": x.numpy()})
    assert int(function(x).isnan().sum()) == in_torch
    assert int(np.isnan(got).sum()) == in_onnx
