"""Masks of attention that half precision can hold."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from pass_harness import run

from pipeline.rewrite.half import in_half, rounded

LOW = "{-3.4028234663852886e38}"
FORMS = {
    "selected": "s = Where(on, a, low) p = Softmax(s)",
    "selected, a number that float16 makes -inf": "s = Where(on, a, far) p = Softmax(s)",
    "selected from a sum": "b = Add(a, low) s = Where(on, a, b) p = Softmax(s)",
    "the other way round": "off = Not(on) b = Add(low, a) s = Where(off, b, a) p = Softmax(s)",
    "added": "m = Where(on, z, low) s = Add(a, m) p = Softmax(s)",
    "added first": "off = Not(on) m = Where(off, low, z) s = Add(m, a) p = Softmax(s)",
    "a guard against NaN": "m = Where(on, z, low) s = Add(a, m) p0 = Softmax(s) n = IsNaN(p0) "
    "p = Where(n, z, p0)",
}
LEFT = {
    "read elsewhere": "m = Where(on, z, low) s = Add(a, m) e = Exp(s) p0 = Softmax(s) "
    "p = Mul(p0, e)",
    "an output": "m = Where(on, z, low) y2 = Add(a, m) p = Softmax(y2)",
    "of two values": "b = Add(a, lows) s = Where(on, a, b) p = Softmax(s)",
    "added to a mask": "m = Add(a, low) s0 = Where(on, a, m) b = Add(m, low) s = Where(on, s0, b) "
    "e = Exp(b) p0 = Softmax(s) p = Mul(p0, e)",
}


def model_of(body: str, outputs: str = "float[n,4,4] y") -> onnx.ModelProto:
    return onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> '
        f"g (float[n,4,4] x, bool[n,4,4] on) => ({outputs}) "
        f"<float low = {LOW}, float far = {{-1e9}}, float z = {{0}}, "
        "float[4] lows = {-1e38, -2e38, -1e38, -1e38}> "
        f"{{ a = MatMul(x, x) {body} y = MatMul(p, x) }}"
    )


def feeds() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    on = rng.integers(0, 2, (3, 4, 4)).astype(bool)
    on[0, 1], on[1, 2] = False, True  # a row without a key, and one with all
    return {"x": rng.standard_normal((3, 4, 4)).astype(np.float32) * 3, "on": on}


def halves(model: onnx.ModelProto) -> list[str]:
    return [n.op_type for n in model.graph.node if n.output[0].endswith("/half")]


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("form", FORMS)
def test_the_whole_attention_is_half_and_right(form: str, precision: str) -> None:
    model = model_of(FORMS[form])
    (expected,) = run(model, feeds())
    in_half(model, precision)
    onnx.checker.check_model(model, full_check=True)
    assert halves(model).count("MatMul") == 2
    assert "Softmax" in halves(model)
    assert "Add" not in [node.op_type for node in model.graph.node]
    (found,) = run(rounded(model), feeds())
    far = 2e-2 if precision == "fp16" else 1.6e-1
    np.testing.assert_allclose(found, expected, rtol=far, atol=far)


@pytest.mark.parametrize("form", LEFT)
def test_other_masks_stay_float32(form: str) -> None:
    outputs = "float[n,4,4] y, float[n,4,4] y2" if form == "an output" else "float[n,4,4] y"
    model = model_of(LEFT[form], outputs)
    in_half(model)
    assert not [t.name for t in model.graph.initializer if t.name.endswith("/lowest")]
    assert "Softmax" not in halves(model)
