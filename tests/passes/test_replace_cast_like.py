"""replace_cast_like: the Cast has the second input's dtype."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import pytest
from pass_harness import PASSES, apply, own, run

P = PASSES["replace_cast_like"]


@pytest.mark.parametrize("case", own("replace_cast_like", "positive"), ids=str)
def test_only_casts_are_left(case) -> None:
    model, result = apply(P, case.model())
    assert result.rewritten
    ops = {node.op for node in gs.import_onnx(model).nodes} | {
        n.op_type for node in model.graph.node for a in node.attribute for n in a.g.node
    }
    assert "CastLike" not in ops


def test_a_wrong_dtype_is_noticed() -> None:
    case = own("replace_cast_like", "positive")[0]
    model, _ = apply(P, case.model())
    feeds = case.feeds(case.shapes[0])
    (right,) = run(model, feeds)
    assert right.dtype == np.int64
    np.testing.assert_array_equal(right, feeds["x"].astype(np.int64))


def test_an_unknown_dtype_is_refused() -> None:
    graph = gs.import_onnx(own("replace_cast_like", "positive")[3].model())
    graph.nodes[0].outputs[0].dtype = None
    (refused,) = P.run(graph).refused
    assert "dtype of j is not known" in refused.detail


def test_bfloat16() -> None:
    text = (
        '<ir_version: 8, opset_import: ["" : 18]> g (float[n] x, bfloat16[n] k) => '
        "(bfloat16[n] y) { y = CastLike(x, k) }"
    )
    model, result = apply(P, onnx.parser.parse_model(text))
    assert result.rewritten[0].detail == "Cast to BFLOAT16"
    onnx.checker.check_model(model, full_check=True)
