"""dequantize_constants: the values are ONNX Runtime's, and int8 weights stay quantised."""

from __future__ import annotations

import numpy as np
import pytest
from pass_harness import PASSES, apply, own, run

P = PASSES["dequantize_constants"]


@pytest.mark.parametrize("case", own("dequantize_constants", "positive"), ids=str)
def test_no_rounding_differs(case) -> None:
    """int32 to float32, and the product with the scale, round as in ONNX Runtime."""
    model, result = apply(P, case.model())
    assert result.rewritten
    assert "DequantizeLinear" not in {node.op_type for node in model.graph.node}
    for shapes in case.shapes:
        feeds = case.feeds(shapes)
        for got, want in zip(run(model, feeds), run(case.model(), feeds), strict=True):
            np.testing.assert_array_equal(got, want)


def test_an_output_of_the_graph_is_refused() -> None:
    case = own("dequantize_constants", "positive")[0]
    source = case.model()
    source.graph.output[0].name = "b"
    del source.graph.node[1:]
    source.graph.output[0].type.tensor_type.shape.dim[0].dim_value = 3
    del source.graph.output[0].type.tensor_type.shape.dim[1:]
    model, result = apply(P, source)
    assert "an output of the graph" in result.refused[0].detail
    assert [node.op_type for node in model.graph.node] == ["DequantizeLinear"]
