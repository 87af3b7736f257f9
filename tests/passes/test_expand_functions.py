"""Function bodies: compared with torch, with their names and metadata."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import pytest
import torch
from pass_harness import apply, run
from torch.nn import functional

from pipeline.machine.target import TARGETS
from pipeline.passes import expand_functions
from pipeline.passes.case import Case
from pipeline.rewrite.rewrite import rewrite

ATTENTION = (
    "(float[n,4,s,8] q, float[n,2,t,8] k, float[n,2,t,8] v) => (float[n,4,s,8] y)"
    "{ y = Attention<is_causal=1>(q, k, v) }"
)


def model_of(text: str, opset: int) -> onnx.ModelProto:
    return Case("expand_functions_19", "x", "positive", text, (), opset=opset).model()


@pytest.mark.parametrize("p", [expand_functions.TO_17, expand_functions.TO_19])
@pytest.mark.parametrize("tokens", [1, 6])
def test_attention_is_torchs(p: expand_functions.Pass, tokens: int) -> None:
    after, result = apply(p, model_of(ATTENTION, 23))
    assert result.modified
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, tokens, 8) for heads in (4, 2, 2))
    expected = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    (got,) = run(after, {"q": q.numpy(), "k": k.numpy(), "v": v.numpy()})
    np.testing.assert_allclose(got, expected.numpy(), rtol=1e-5, atol=1e-5)


def test_the_numbers_of_heads_are_constants_in_the_body() -> None:
    """Values of static sizes are not left to TensorRT's shape arithmetic."""
    after, _ = apply(expand_functions.TO_19, model_of(ATTENTION, 23))
    ops = [node.op_type for node in after.graph.node]
    # one Equal is left: it finds fully masked rows
    assert not {"Mod", "CastLike", "Constant", "If"} & set(ops)
    assert ops.count("Equal") == 1


def test_the_nodes_tell_where_they_came_from(tmp_path: Path) -> None:
    model = model_of(ATTENTION, 23)
    model.graph.node[0].metadata_props.add(key="pkg.torch.onnx.stack_trace", value="model.py:7")
    onnx.save_model(model, tmp_path / "model.onnx")
    rewrite(tmp_path / "model.onnx", tmp_path / "out.onnx", TARGETS["rtx-1.7"])
    after = onnx.load(tmp_path / "out.onnx")
    assert [o.version for o in after.opset_import] == [19]
    assert len(after.graph.node) > 10
    for node in after.graph.node:
        assert node.name.startswith("Attention_0")
        assert [prop.value for prop in node.metadata_props] == ["model.py:7"]


def test_a_node_without_types_is_refused() -> None:
    graph = gs.import_onnx(model_of(ATTENTION, 23))
    graph.nodes[0].inputs[1] = gs.Variable("untyped")
    (refused,) = expand_functions.TO_19.run(graph).refused
    assert "untyped is not known" in refused.detail


def test_the_body_of_affine_grid_is_wrong_for_a_batch_of_one() -> None:
    """The reason why it is not expanded. If this test fails, the standard was fixed."""
    text = (
        "(float[1,2,3] t) => (float[1,4,5,2] y) <int64[4] s = {1, 3, 4, 5}>"
        "{ y = AffineGrid<align_corners=0>(t, s) }"
    )
    model = model_of(text, 20)
    feeds = {"t": np.ones((1, 2, 3), np.float32)}
    assert run(model, feeds)[0].shape == (1, 4, 5, 2)
    body = onnx.inliner.inline_selected_functions(model, [("", "AffineGrid")], False, True)
    with pytest.raises(Exception, match="Split"):
        run(body, feeds)
    assert not apply(expand_functions.TO_19, model)[1].modified
