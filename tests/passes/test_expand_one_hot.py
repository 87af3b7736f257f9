"""expand_one_hot: every index and offset, compared with numpy."""

from __future__ import annotations

import numpy as np
import onnx.parser
import pytest
from pass_harness import PASSES, apply, run

P = PASSES["expand_one_hot"]


def model(text: str):
    return onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 18]> g {text}')


@pytest.mark.parametrize("axis", [-3, -2, -1, 0, 1, 2])
def test_indices_within_beyond_and_below(axis: int) -> None:
    after, result = apply(
        P,
        model(
            "(float[m] x, int64[k,l] i) => (float[p,q,r] y) <float[2] v = {-1, 4}> "
            f"{{ d = Shape(x) y = OneHot<axis={axis}>(i, d, v) }}"
        ),
    )
    assert result.modified
    indices = np.arange(-8, 8).reshape(2, 8)
    (got,) = run(after, {"x": np.zeros(5, np.float32), "i": indices})
    want = np.full((2, 8, 5), -1, np.float32)
    for place, index in np.ndenumerate(indices):
        if -5 <= index < 5:
            want[(*place, index % 5)] = 4
    np.testing.assert_array_equal(got, np.moveaxis(want, -1, axis))


@pytest.mark.parametrize("offset", [-9, -2, 0, 1, 3, 9])
@pytest.mark.parametrize("shape", [(1, 1), (3, 3), (2, 6), (6, 2)])
def test_eye_is_numpy_s(offset: int, shape: tuple[int, int]) -> None:
    after, result = apply(
        P, model(f"(float[n,m] x) => (int32[n,m] y) {{ y = EyeLike<k={offset}, dtype=6>(x) }}")
    )
    assert result.modified
    (got,) = run(after, {"x": np.ones(shape, np.float32)})
    np.testing.assert_array_equal(got, np.eye(*shape, k=offset, dtype=np.int32))


@pytest.mark.parametrize("last", [0, 1])
@pytest.mark.parametrize("op", ["ArgMax", "ArgMin"])
def test_equals_are_told_apart(op: str, last: int) -> None:
    after, _ = apply(
        P,
        model(f"(float[m] x) => (int64 y) {{ y = {op}<keepdims=0, select_last_index={last}>(x) }}"),
    )
    x = np.array([1, 0, 2, 2, 0, 1], np.float32)
    best = np.flatnonzero(x == (x.max() if op == "ArgMax" else x.min()))
    assert run(after, {"x": x})[0] == best[-1 if last else 0]
