"""expand_integer_ops: the same integers, without the nodes that TensorRT 8.6 refuses."""

from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs
import pytest
from pass_harness import PASSES, apply, own, run

P = PASSES["expand_integer_ops"]


@pytest.mark.parametrize("case", own("expand_integer_ops", "positive"), ids=str)
def test_no_such_node_is_left(case) -> None:
    model, result = apply(P, case.model())
    assert result.rewritten and not result.refused
    ops = {node.op for node in gs.import_onnx(model).nodes} | {
        n.op_type for node in model.graph.node for a in node.attribute for n in a.g.node
    }
    assert not ops & {"Sign", "Pow"}


@pytest.mark.parametrize(("number", "function"), [(0, np.sign), (4, lambda x: x**5)])
def test_the_numbers_of_numpy(number, function) -> None:
    case = own("expand_integer_ops", "positive")[number]
    model, _ = apply(P, case.model())
    x = case.feeds(case.shapes[-1])["x"]
    x[0, :3] = 0, np.iinfo(np.int32).min, np.iinfo(np.int32).max
    (y,) = run(model, {"x": x})
    np.testing.assert_array_equal(y, function(x))
