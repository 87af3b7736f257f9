"""select_additive_mask: the same bits."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import pytest
from pass_harness import PASSES, apply, run

P = PASSES["select_additive_mask"]


def added(kind: str, low: float, high: float = 0.0) -> onnx.ModelProto:
    return onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : 17]> g ({kind}[n,3,t] x, bool[n,1,t] on) => '
        f"({kind}[n,3,t] y, {kind}[n,3,t] s) <{kind} low = {{{low}}}, {kind} high = {{{high}}}> "
        "{ m = Where(on, high, low) s = Add(x, m) y = Softmax<axis=-1>(s) }"
    )


@pytest.mark.parametrize("kind", ["float", "double"])
@pytest.mark.parametrize(
    ("low", "high"),
    [(-10000.0, 0.0), (-65504.0, 0.0), (1.5, 0.0), (0.0, -7.25), (0.1, -0.3)],
)
def test_sums_are_the_same_to_the_bit(kind: str, low: float, high: float) -> None:
    model = added(kind, low, high)
    after, result = apply(P, model)
    assert len(result.rewritten) == 1
    rng = np.random.default_rng(0)
    x = rng.normal(0, 30, (5, 3, 40)).astype("float64" if kind == "double" else "float32")
    on = rng.integers(0, 2, (5, 1, 40)) > 0
    on[1], on[2] = False, True
    before, now = (run(m, {"x": x, "on": on}) for m in (model, after))
    for a, b in zip(before, now, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("low", ["-inf", "-3.4028234663852886e38", "-1e30"])
def test_rows_that_are_masked_altogether_stay_what_they_are(low: str) -> None:
    """Scores may be masked, NaN or infinite before the mask."""
    model = added("float", float(low))
    after, _ = apply(P, model)
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.normal(0, s, (2, 3, 40)) for s in (1e-3, 1, 1e4, 1e30)])
    x[0, 0, :7], x[0, 1, 3], x[1, 0, :5] = -3.4028235e38, np.nan, -np.inf
    on = rng.integers(0, 2, (8, 1, 40)) > 0
    on[3], on[5] = False, True
    feeds = {"x": x.astype(np.float32), "on": on}
    for a, b in zip(run(model, feeds), run(after, feeds), strict=True):
        np.testing.assert_array_equal(a, b)


RANKS = [((3, 5), (3, 5), (1, 1, 1, 1)), ((), (4,), (1,)), ((4,), (), (1,)), ((4, 4), (4,), (1, 1))]


@pytest.mark.parametrize(("x", "on", "constant"), RANKS)
def test_constants_may_widen_the_result(
    x: tuple[int, ...], on: tuple[int, ...], constant: tuple[int, ...]
) -> None:
    def dims(shape: tuple[int, ...]) -> str:
        return ",".join(map(str, shape))

    rank = max(len(x), len(on), len(constant))
    sizes = np.broadcast_shapes(x, on, constant)
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> g '
        f"(float[{dims(x)}] x, bool[{dims(on)}] on) => (float[{dims(sizes)}] y) "
        f"<float[{dims(constant)}] z = {{0}}, float[{dims(constant)}] c = {{-10000}}> "
        "{ m = Where(on, z, c) s = Add(x, m) y = Softmax<axis=-1>(s) }"
    )
    after, _ = apply(P, model)
    rng = np.random.default_rng(0)
    feeds = {
        "x": np.asarray(rng.normal(size=x), np.float32),
        "on": np.asarray(rng.integers(0, 2, on) > 0),
    }
    (a,), (b,) = run(model, feeds), run(after, feeds)
    assert a.ndim == rank
    np.testing.assert_array_equal(a, b)


def test_an_axis_of_the_wider_result_is_none_of_the_mask() -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> g (float[1,4,3] x, bool[4,4] on) => '
        "(float[1,4,3] y) <float[1,1,1] z = {0}, float[1,1,1] c = {-10000}, int64[1] one = {1}, "
        "int64[1] four = {4}, int64[1] two = {2}> "
        "{ m0 = Where(on, z, c) m = Slice(m0, one, four, two) s = Add(x, m) "
        "y = Softmax<axis=-1>(s) }"
    )
    _, result = apply(P, model)
    assert not result.modified
