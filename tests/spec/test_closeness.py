"""The one measure of closeness, compared with the numbers of six earlier measures."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pipeline.build.try_graph import differs
from pipeline.compare.divergence.engine import distance
from pipeline.compare.divergence.fingerprints import PLACES, Print
from pipeline.compare.verdict import judge
from pipeline.spec.closeness import Difference, apart
from pipeline.spec.tensors import Tolerance

INF, NAN = math.inf, math.nan
TOLERANCE = Tolerance(1e-3, 1e-3, "of this test", differing=0.05)
TINY = 2.2250738585072014e-308


def pair(kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Two arrays, the reference first."""
    rng = np.random.default_rng(7)
    want = rng.normal(size=(4, 5))
    got = want + rng.normal(size=(4, 5)) * 1e-3
    a, b = want.astype(np.float32), got.astype(np.float32)
    integers, flags = rng.integers(-9, 9, 20), rng.random(20) < 0.5
    at_3 = np.arange(20) == 3
    if kind == "equal NaN and infinities":
        for each in (a, b):
            each[0, 0], each[1, 1], each[2, 2] = NAN, INF, -INF
    elif kind == "NaN in one":
        b[3, 3] = NAN
    elif kind == "another infinity":
        a[0, 1], b[0, 1] = INF, -INF
    others = {
        "float16": (want.astype(np.float16), got.astype(np.float16)),
        "zeros": (np.zeros((4, 5), np.float32), (got - want).astype(np.float32)),
        "zeros of another sign": (np.zeros(3, np.float32), -np.zeros(3, np.float32)),
        "empty": (np.zeros((0, 3), np.float32), np.zeros((0, 3), np.float32)),
        "int64": (integers, integers + 4 * at_3),
        "huge int64": (np.full(20, 2**62), 2**62 + at_3.astype(np.int64)),
        "bool": (flags, flags ^ (abs(np.arange(20) - 1.5) < 1)),
    }
    return others.get(kind, (a, b))


@pytest.mark.parametrize(
    ("kind", "largest", "within", "norm", "wrong"),
    [
        ("float32", 0.002516757696866989, False, 0.0011796538777884085, "differs by 0.00252; "),
        ("float16", 0.002532958984375, False, 0.0012031519243761567, ""),
        ("equal NaN and infinities", 0.0015301406383514404, False, 0.0007787908772516861,
         "differs by 0.00153; the largest value is 1.9"),
        ("NaN in one", INF, False, INF, "has NaN or infinity at other places"),
        ("another infinity", INF, False, INF, "differs by 0.00252; "),
        ("zeros", 0.002516759792342782, False, 4349.874134907188,
         "differs by 0.00252; the largest value is 0.001"),
        ("zeros of another sign", TINY, True, 0.0, ""),
        ("empty", 0.0, True, 0.0, ""),
        ("int64", 4.0, True, 0.1797866299901979, "differs in 1 of 20 values"),
        ("huge int64", 1.0, True, 0.0, "differs in 1 of 20 values"),
        ("bool", 1.0, False, 0.4264014327112209, "differs in 2 of 20 values"),
    ],
)  # fmt: skip
def test_the_numbers_of_all_measures(
    kind: str, largest: float, within: bool, norm: float, wrong: str
) -> None:
    want, got = pair(kind)
    assert apart(want, got, TOLERANCE) == (pytest.approx(largest, rel=1e-12, abs=0), within)
    assert distance(got, want) == pytest.approx(norm, rel=1e-12, abs=0)
    assert differs(got, want).startswith(wrong)
    assert bool(differs(got, want)) is bool(wrong)


def test_the_same_bits_do_not_differ_at_all() -> None:
    for kind in ("float32", "float16", "equal NaN and infinities", "empty", "int64", "bool"):
        want, _ = pair(kind)
        assert apart(want, want.copy(), TOLERANCE) == (0.0, True)
        assert distance(want.copy(), want) == 0
        assert differs(want.copy(), want) == ""


def test_another_shape_or_dtype_is_infinitely_far() -> None:
    want = np.ones((2, 3), np.float32)
    assert apart(want, np.ones((3, 2), np.float32), TOLERANCE) == (INF, False)
    assert apart(want, np.ones((2, 3)), TOLERANCE) == (INF, False)
    assert apart(want, None, TOLERANCE) == (INF, False)
    assert distance(np.ones((3, 2), np.float32), want) == INF
    assert differs(np.ones((3, 2), np.float32), want) == "has the shape (3, 2), not (2, 3)"


def printed(values: np.ndarray) -> Print:
    """The fingerprint of a float32 value."""
    flat = np.append(values.reshape(-1), np.float32(0))
    facts = np.array([flat.min(), flat.max(), np.linalg.norm(flat)], np.float32)
    return Print(values.shape, np.concatenate([flat[PLACES % flat.size], facts]))


@pytest.mark.parametrize(
    ("kind", "far"),
    [
        ("float32", 0.0013237574373243263),
        ("equal NaN and infinities", 0.0008048192532365825),
        ("NaN in one", INF),
        ("another infinity", INF),
        ("zeros", INF),
        ("zeros of another sign", 0.0),
        ("empty", 0.0),
    ],
)
def test_fingerprints(kind: str, far: float) -> None:
    want, got = pair(kind)
    assert printed(want).apart(printed(got)) == pytest.approx(far, rel=1e-12, abs=0)


@pytest.mark.parametrize(
    ("kind", "passed", "largest"),
    [
        ("float32", False, 0.0025167577),
        ("float16", False, 0.002532959),
        ("equal NaN and infinities", False, None),
        ("NaN in one", False, None),
        ("zeros", False, 0.0025167577),
        ("empty", True, None),
        ("int64", True, 4.0),
        ("huge int64", True, 1.0),
        ("bool", False, 1.0),
    ],
)
def test_the_verdict_of_a_comparison(kind: str, passed: bool, largest: float | None) -> None:
    want, got = pair(kind)
    (result,) = judge("a", "b", {"y": want}, {"y": got}, TOLERANCE)
    assert result.passed is passed
    assert result.max_abs == (None if largest is None else pytest.approx(largest, rel=1e-6))


def test_where_values_are_not_finite() -> None:
    same, one, other = (
        Difference(*pair(kind))
        for kind in ("equal NaN and infinities", "NaN in one", "another infinity")
    )
    assert (same.finite_alike, same.odd_alike, same.unequal) == (True, True, 17)
    assert (one.finite_alike, one.odd_alike, one.largest_finite) == (
        False, False, pytest.approx(0.002516757696866989, rel=1e-12),
    )  # fmt: skip
    assert (other.finite_alike, other.odd_alike) == (True, False)
    assert other.largest == INF and other.largest_finite < 0.01
    assert same.scale == pytest.approx(1.9012227058410645, rel=1e-12)
    assert Difference(*pair("empty")).scale == 0


def test_floats_are_measured_in_their_own_dtype_where_memory_counts() -> None:
    want, got = pair("float32")
    narrow = Difference(want, got, wide=False)
    assert narrow.off.dtype == np.float32
    assert narrow.allowed(TOLERANCE).dtype == np.float32
    assert Difference(*pair("float16"), wide=False).off.dtype == np.float32
    assert Difference(want, got).off.dtype == np.float64
    assert Difference(np.float32(1) * np.ones(()), np.ones(())).largest == 0
