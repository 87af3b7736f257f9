"""Whole numbers of floats of sizes: every declared size counts, however many there are."""

from __future__ import annotations

import math

import numpy as np
import onnxruntime
import pytest
import torch
from op_exports import spec_of

from pipeline.errors import ExportError
from pipeline.export.export import export
from pipeline.export.ops.sizes import exact_fraction
from pipeline.spec.dims import Dim

T = Dim("t", 2, 1000, 400000)
H, W = Dim("h", 2, 90, 700), Dim("w", 2, 100, 700)
FACTORS = (0.147, 0.823, 0.294, 0.411, 0.941)


def floored(of):
    return lambda x: x.flatten()[:1] * 0 + math.floor(of(x)) % 1000


def ceiled(of):
    return lambda x: x.flatten()[:1] * 0 + math.ceil(of(x)) % 1000


def differing(function, shape, path, sizes) -> list[tuple[int, ...]]:
    """The sizes at which the exported function differs.

    Raises:
        ExportError: the export is refused.
    """
    done = export(spec_of(function, shape), None, path / "m.onnx")
    session, found = onnxruntime.InferenceSession(str(done.path)), []
    for size in sizes:
        x = np.zeros(size, np.float32)
        if session.run(None, {"x": x})[0] != function(torch.from_numpy(x)).numpy():
            found.append(size)
    return found


def wrong_after(of, whole, first: int, last: int) -> list[int]:
    """Sizes at which float32 gives another whole number than float64."""
    n = np.arange(first, last + 1)
    wrong = whole(of(n.astype(np.float32))) != whole(of(n.astype(np.float64)))
    return n[wrong].tolist()


def test_a_size_by_a_number_is_exact_up_to_the_declared_max(tmp_path) -> None:
    sizes = wrong_after(lambda n: n / n.dtype.type(6.688), np.floor, 2, 400000)
    assert 54340 in sizes and min(sizes) > 32768
    by = floored(lambda x: x.shape[0] / 6.688)
    assert differing(by, (T,), tmp_path, [(n,) for n in (2, 7, *sizes[:40], 400000)]) == []
    places = [(95, 572), (110, 494), (130, 418), (2, 2), (700, 700)]
    by = floored(lambda x: x.shape[0] * x.shape[1] / 6.688)
    assert differing(by, (H, W), tmp_path, places) == []


def test_sums_of_floats_are_tried_at_every_set_of_sizes(tmp_path) -> None:
    def of(x):
        return x.shape[0] / 6.688 + 1.0

    with pytest.raises(ExportError, match="float32 rounds that float differently"):
        differing(floored(of), (T,), tmp_path, [])
    short = Dim("t", 2, 1000, 40000)
    assert differing(floored(of), (short,), tmp_path, [(2,), (836,), (40000,)]) == []


def test_an_absolute_value_is_tried_at_every_size(tmp_path) -> None:
    def of(x):
        return abs(x.shape[0] * 0.7 - 9.1)

    short = Dim("t", 2, 1000, 4000)
    sizes = wrong_after(lambda n: abs(n * n.dtype.type(0.7) - n.dtype.type(9.1)), np.floor, 2, 4000)
    assert 23 in sizes
    assert differing(floored(of), (short,), tmp_path, [(n,) for n in sizes]) == []
    with pytest.raises(ExportError, match="float32 rounds that float differently"):
        differing(floored(of), (T,), tmp_path, [])


def test_floor_divisions_that_round_nothing_up_stay(tmp_path) -> None:
    def by(x):
        n = x.shape[0]
        return x.flatten()[:1] * 0 + (n / 2 // 3 + n // 2.5 + n * 0.7 // 3 + n // 0.5)

    short = Dim("t", 2, 100, 300)
    assert differing(by, (short,), tmp_path, [(n,) for n in range(2, 301)]) == []


def test_more_sets_of_sizes_than_can_be_tried_are_refused(tmp_path) -> None:
    shape = (Dim("h", 2, 90, 9000), Dim("w", 2, 100, 9000))
    with pytest.raises(ExportError, match="too many values"):
        differing(floored(lambda x: x.shape[0] / 7 + x.shape[1] / 3), shape, tmp_path, [])


@pytest.mark.parametrize("factor", FACTORS)
def test_a_fraction_is_right_up_to_the_declared_max(tmp_path, factor) -> None:
    n = np.arange(400001)
    want = np.floor(n * factor).astype(np.int64)
    sizes = n[want != np.floor(n.astype(np.float32) * np.float32(factor))]
    try:
        fraction = exact_fraction(factor, 400000)
    except ExportError:
        with pytest.raises(ExportError, match="float32 rounds that float differently"):
            differing(floored(lambda x: x.shape[0] * factor), (T,), tmp_path, [])
        return
    assert (n * fraction.numerator // fraction.denominator == want).all()
    at = [(k,) for k in (*sizes[:20].tolist(), *sizes[-20:].tolist(), 400000)]
    assert differing(floored(lambda x: x.shape[0] * factor), (T,), tmp_path, at) == []


@pytest.mark.parametrize("factor", [0.667, 0.467, 0.801, 0.267])
def test_a_ceiling_is_right_up_to_the_declared_max(tmp_path, factor) -> None:
    n = np.arange(2, 400001)
    want = np.ceil(n * factor)
    at = n[want != np.ceil(n.astype(np.float32) * np.float32(factor))]
    try:
        found = differing(
            ceiled(lambda x: x.shape[0] * factor), (T,), tmp_path, [(k,) for k in at[-40:].tolist()]
        )
    except ExportError as error:
        assert "float32 rounds that float differently" in str(error)
        return
    assert found == []
