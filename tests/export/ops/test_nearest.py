"""Row indices and sizes of resizes, compared with torch over many sizes."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch.nn import functional

from pipeline.errors import ExportError
from pipeline.export.ops.resize import _plain
from pipeline.export.ops.sizes import exact_fraction, products


def rows(before: int, options: dict) -> np.ndarray:
    """The input rows that torch uses."""
    line = torch.arange(before, dtype=torch.float32).view(1, 1, before)
    return functional.interpolate(line, **options)[0, 0].numpy().astype(int)


def test_nearest_takes_the_rows_that_torch_takes() -> None:
    """8,427 pairs of sizes: the graph's computed indices, and ONNX's indices."""
    wrong = {"ours": 0, "ONNX": 0, "ours, exact": 0}
    for before in range(1, 160):
        for after in range(1, 160, 3):
            i = np.arange(after, dtype=np.float32)
            want = rows(before, {"size": after})
            step = np.float32(before) / np.float32(after)
            mine = np.minimum(np.floor(i * step).astype(int), before - 1)
            scale = np.float32(after) / np.float32(before)
            theirs = np.minimum(np.floor(i / scale).astype(int), before - 1)
            middle = np.minimum(np.floor((i + np.float32(0.5)) * step).astype(int), before - 1)
            exact = rows(before, {"size": after, "mode": "nearest-exact"})
            wrong["ours"] += bool((mine != want).any())
            wrong["ONNX"] += bool((theirs != want).any())
            wrong["ours, exact"] += bool((middle != exact).any())
    # exact: where the position is 1, rounded; torch's CUDA kernel takes ours (resize.py)
    assert wrong == {"ours": 0, "ONNX": 274, "ours, exact": 6}


def test_whole_scale_factors_that_stay_a_resize() -> None:
    """All factors up to 64, except those whose float32 reciprocal is below the exact value."""
    assert [k for k in range(1, 65) if not _plain(k)] == [41, 47, 55, 61]
    for factor in (2, 3, 7, 40):
        for before in (1, 9, 100, 1001):
            want = rows(before, {"scale_factor": factor})
            assert (want == np.arange(before * factor) // factor).all()


def test_sizes_by_a_scale_factor() -> None:
    for factor in (0.3, 0.5, 1 / 3, 1.1, 1.7, 2.0, 0.123456):
        fraction = exact_fraction(factor, math.inf)
        n = np.arange(1 << 15)
        got = n * fraction.numerator // fraction.denominator
        assert (got == [int(k * factor) for k in range(1 << 15)]).all()
    assert exact_fraction(0.7, 200) is None  # 0.7 * 10 is 7, 0.7 * 90 is less than 63
    assert list(products(0.7, 90)[[10, 90]]) == [7, 62]
    assert exact_fraction(0.7, 80) is not None
    with pytest.raises(ExportError, match="declare a smaller max"):
        exact_fraction(0.7, math.inf)


def test_a_fraction_is_right_up_to_the_largest_size() -> None:
    n = np.arange(400001)
    for factor in (0.294, 0.147, 0.411):
        want = np.floor(n * factor).astype(np.int64)
        try:
            found = exact_fraction(factor, 400000)
        except ExportError:
            continue
        assert (n * found.numerator // found.denominator == want).all()
    assert exact_fraction(0.941, 1 << 15) == Fraction(941, 1000)
    with pytest.raises(ExportError, match="declare a smaller max"):
        exact_fraction(0.941, 400000)  # 139000 * 0.941 is 130798.99999999999


def test_a_number_that_float64_holds_needs_no_trial() -> None:
    assert exact_fraction(0.375, 1 << 40) == Fraction(3, 8)
    assert exact_fraction(3, 1 << 40, over=True) == Fraction(1, 3)
    with pytest.raises(ExportError, match="declare a smaller max"):
        exact_fraction(0.41, 1 << 40)
