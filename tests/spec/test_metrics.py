"""Metrics against their definitions, at values that are known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pipeline.errors import InputError
from pipeline.spec.metrics import measured, metric_text, worst
from pipeline.spec.tensors import Output


def test_end_point_error_is_the_mean_length_of_the_difference() -> None:
    want = np.zeros((1, 2, 2, 2), np.float32)
    got = want.copy()
    got[0, :, 0, 0] = 3, 4
    assert measured("end-point-error", want, got) == pytest.approx(5 / 4)
    assert measured("end-point-error", want[0, 0, 0], got[0, 0, 0]) is None  # no axis 1


def test_psnr_of_a_known_error() -> None:
    want = np.linspace(0, 1, 11, dtype=np.float32)
    assert measured("psnr", want, want + np.float32(0.1)) == pytest.approx(20, abs=1e-4)
    assert measured("psnr", want, want) is None  # infinite
    assert measured("psnr", np.ones(3, np.float32), np.zeros(3, np.float32)) is None


def test_psnr_is_computed_beyond_half_precision() -> None:
    want = np.array([0, 60000], np.float16)
    got = np.array([0, 59968], np.float16)
    expected = 20 * math.log10(60000 / (32 / math.sqrt(2)))
    assert measured("psnr", want, got) == pytest.approx(expected)


def test_top_1_counts_places_with_the_same_index() -> None:
    want = np.array([[[1, 2], [2, 1]], [[0, 5], [3, 4]]], np.float32)
    got = want.copy()
    got[1, 0] = 6, 5
    assert measured("top-1", want, got) == 0.75
    assert measured("top-1", want, want) == 1.0


def test_nothing_is_measured_of_other_shapes_or_no_elements() -> None:
    a = np.zeros((2, 3), np.float32)
    assert measured("top-1", a, a.T) is None
    assert measured("top-1", a[:0], a[:0]) is None
    assert measured("end-point-error", a, np.full_like(a, np.nan)) is None


def test_the_worst_of_several_sizes() -> None:
    assert worst("end-point-error", [0.1, 0.3]) == 0.3
    assert worst("psnr", [40.0, 31.0]) == 31.0
    assert worst("top-1", [1.0, 0.97]) == 0.97
    assert metric_text("top-1", 0.97) == "the largest value is the same in 97.00%"


def test_an_unknown_metric_is_refused() -> None:
    with pytest.raises(InputError, match="unknown metric 'mse'; known: end-point-error, psnr"):
        Output("y", metric="mse")  # type: ignore[arg-type]
