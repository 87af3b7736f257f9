"""expand_elu: what is no number, and a type that numpy lacks."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
from pass_harness import PASSES, apply, run

P = PASSES["expand_elu"]


def after_recurrent(kind: int) -> onnx.ModelProto:
    """Elu of a cast of an RNN's output; ``kind`` is ONNX's number of the type."""
    return onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> g (float[t,b,2] x) => (float[t,1,b,2] y) '
        "<float[1,2,2] w = {0.5, -0.2, 0.3, 0.4}, float[1,2,2] r = {0.1, 0.2, -0.3, 0.1}> "
        f"{{ a = RNN<hidden_size=2>(x, w, r) c = Cast<to={kind}>(a) e = Elu<alpha=0.5>(c) "
        "y = Cast<to=1>(e) }"
    )


def test_nan_and_infinity_stay() -> None:
    model = after_recurrent(onnx.TensorProto.FLOAT)
    after, result = apply(P, model)
    assert len(result.rewritten) == 1
    x = np.linspace(-3, 3, 24, dtype=np.float32).reshape(4, 3, 2)
    x[1, 0], x[2, 1], x[0, 2] = np.nan, np.inf, -np.inf
    before, now = run(model, {"x": x})[0], run(after, {"x": x})[0]
    assert np.isnan(before).any() and (before < 0).any() and (before > 0).any()
    np.testing.assert_allclose(now, before, 1e-6, 1e-7)


def test_bfloat16_is_refused_with_a_reason() -> None:
    _, result = apply(P, after_recurrent(onnx.TensorProto.BFLOAT16))
    assert not result.rewritten
    assert ["dtype of c" in change.detail for change in result.refused] == [True]
