"""select_additive_mask: the same numbers to the bit."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import pytest
from harness import PASSES, apply, run

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
def test_what_disappears_in_a_huge_constant_is_not_added(low: str) -> None:
    model = added("float", float(low))
    after, _ = apply(P, model)
    assert [node.op_type for node in after.graph.node] == ["Where", "Softmax"]
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.normal(0, s, (2, 3, 40)) for s in (1e-3, 1, 1e4, 1e21)])
    on = rng.integers(0, 2, (8, 1, 40)) > 0
    on[:, :, 0] = True
    feeds = {"x": x.astype(np.float32), "on": on}
    for a, b in zip(run(model, feeds), run(after, feeds), strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_sum_of_two_huge_constants_keeps_its_shape() -> None:
    """Were both taken for the sums, nothing would be left of x."""
    model = added("float", -2e30, 2e30)
    _, result = apply(P, model)
    assert not result.modified
