"""fuse_layer_norm: half precision that overflows without it, and a check that notices faults."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from pass_harness import apply, assert_same, own, run

from pipeline.passes.case import Case
from pipeline.passes.fuse_layer_norm import PASS

POSITIVE = own("fuse_layer_norm", "positive")
SCALE, BIAS = np.array([0.5, 1.5, -2, 3]), np.array([0.25, -1, 3, 0.5])


def case(name: str) -> Case:
    return next(c for c in POSITIVE if c.name == name)


def reference(x: np.ndarray) -> np.ndarray:
    wide = x.astype(np.float64)
    deviation = np.sqrt(wide.var(-1, keepdims=True) + 0.01)
    return (wide - wide.mean(-1, keepdims=True)) / deviation * SCALE + BIAS


@pytest.mark.parametrize("name", ["half", "half, opset 17"])
def test_half_precision_overflows_as_it_stands(name: str) -> None:
    """Values near 300: their squares exceed 65504.

    ONNX's reference evaluator shows it. ONNX Runtime has no half-precision arithmetic on a CPU, and
    computes the whole chain in float32.
    """
    x = (np.random.default_rng(0).normal(0, 300, (2, 5, 4))).astype(np.float16)
    with np.errstate(all="ignore"):
        (before,) = ReferenceEvaluator(case(name).model()).run(None, {"x": x})
    (after,) = run(apply(PASS, case(name).model())[0], {"x": x})
    right = reference(x)
    assert not np.allclose(before.astype(np.float64), right, 0.1, 0.1)
    np.testing.assert_allclose(after.astype(np.float64), right, 4e-3, 4e-3)


def test_one_node_is_left() -> None:
    for each in POSITIVE:
        if each.name in ("in the body of If", "scale that is used elsewhere"):
            continue
        ops = [node.op_type for node in apply(PASS, each.model())[0].graph.node]
        assert "LayerNormalization" in ops
        assert len(ops) <= 3, (each.name, ops)


@pytest.mark.parametrize(("attribute", "value"), [("epsilon", 0.5), ("axis", 2)])
def test_a_wrong_rewrite_is_caught(attribute: str, value: float) -> None:
    each = case("two axes")
    model, _ = apply(PASS, each.model())
    (norm,) = (n for n in model.graph.node if n.op_type == "LayerNormalization")
    if attribute == "axis":
        # one axis with a fitting scale
        (scale,) = (t for t in model.graph.initializer if t.name == norm.input[1])
        scale.CopyFrom(onnx.numpy_helper.from_array(np.ones(4, np.float32), scale.name))
    kept = [a for a in norm.attribute if a.name != attribute]
    del norm.attribute[:]
    norm.attribute.extend([*kept, onnx.helper.make_attribute(attribute, value)])
    feeds = each.feeds(each.shapes[1])
    with pytest.raises(AssertionError):
        assert_same(run(each.model(), feeds), run(model, feeds))


class Norm(torch.nn.Module):
    """A layer norm as models write it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(SCALE, dtype=torch.float32))
        self.bias = torch.nn.Parameter(torch.tensor(BIAS, dtype=torch.float32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        centred = x - x.mean(-1, keepdim=True)
        variance = (x - x.mean(-1, keepdim=True)).pow(2).mean(-1, keepdim=True)
        return self.weight * (centred * torch.rsqrt(variance + 0.01)) + self.bias


@pytest.mark.filterwarnings("ignore")
def test_a_norm_exported_by_torch_is_found() -> None:
    x = torch.linspace(-3, 9, 40).reshape(2, 5, 4)
    dims = {0: torch.export.Dim("n", min=1), 1: torch.export.Dim("s", min=1)}
    program = torch.onnx.export(
        Norm(), (x,), dynamo=True, opset_version=18, dynamic_shapes=(dims,), verbose=False
    )
    model, result = apply(PASS, program.model_proto)
    assert len(result.rewritten) == 1
    assert [node.op_type for node in model.graph.node] == ["LayerNormalization"]
    (y,) = run(model, {model.graph.input[0].name: x[:, :3].numpy().copy()})
    assert_same([Norm()(x[:, :3]).detach().numpy()], [y])
