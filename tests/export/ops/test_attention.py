"""Rows of a float mask that are -inf as a whole give 0, as in torch, and other masks no guard."""

from __future__ import annotations

import math

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import onnxruntime
import pytest
import torch
from torch.nn import functional

from pipeline.export.ops import exporter
from pipeline.passes import shape_attention

INF, LOWEST = math.inf, torch.finfo(torch.float32).min
attend = functional.scaled_dot_product_attention
MASK = torch.tensor([[-INF] * 3, [0, -INF, 1], [math.nan, -INF, -INF]])
KEPT = torch.tensor([[0, 0, 0], [1, 0, 1], [0, 1, 0]], dtype=torch.bool)
CAUSAL = torch.zeros(5, 5).masked_fill(~torch.ones(5, 5, dtype=torch.bool).tril(), -INF)


class Masked(torch.nn.Module):
    def __init__(self, function, mask) -> None:
        super().__init__()
        self.function = function
        self.register_buffer("mask", mask)

    def forward(self, q, m):
        return self.function(q, m, self.mask)


def both(path, function, mask=MASK, kept=MASK, dtype=torch.float32):
    """The graph, its result, and torch's."""
    q = torch.randn(2, 4, 3, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
    model = Masked(function, kept).eval()
    args = q, mask
    program = torch.export.export(model, args)
    shapes = [tuple(a.shape) for a in args]
    exporter.to_onnx(
        program, path, opset=18, input_names=["q", "m"], output_names=["y"], shapes=shapes
    )
    session = onnxruntime.InferenceSession(str(path))
    feed = {"q": q.numpy(), "m": mask.numpy()}
    names = [i.name for i in session.get_inputs()]
    (got,) = session.run(None, {name: feed[name] for name in names})
    return onnx.load(path), got, model(*args).numpy()


GUARDED = {
    "an input": (lambda q, m, _: attend(q, q, q, m), MASK),
    "computed": (lambda q, m, _: attend(q, q, q, torch.where(m, 0.0, -INF)), KEPT),
    "filled": (lambda q, m, _: attend(q, q, q, torch.zeros(3, 3).masked_fill(~m, -INF)), KEPT),
    "two of the lowest": (
        lambda q, m, _: attend(q, q, q, torch.where(m, 0.0, LOWEST) + torch.where(m, 0.0, LOWEST)),
        KEPT,
    ),
    "a constant": (lambda q, _, kept: attend(q, q, q, kept), MASK),
    "a part of a constant": (lambda q, _, kept: attend(q, q, q, kept[:3, 2:]), MASK),
    "fewer heads of keys": (
        lambda q, m, _: attend(q, q[:, :2], q[:, :2], m, enable_gqa=True),
        MASK,
    ),
    "five axes": (lambda q, m, _: attend(q[None], q[None], q[None], m), MASK),
    "a mask with five axes": (
        lambda q, m, _: attend(q[:, None], q[:, None], q[:, None], m.expand(2, 1, 4, 3, 3)),
        MASK,
    ),
    "a mask with five axes, of which some are 1": (
        lambda q, m, _: attend(q[:, None], q[:, None], q[:, None], m[None, None, None]),
        MASK,
    ),
    "without a batch": (lambda q, m, _: attend(q[0], q[0], q[0], m), MASK),
}


@pytest.mark.parametrize("name", GUARDED)
def test_rows_of_minus_infinity(tmp_path, name) -> None:
    function, mask = GUARDED[name]
    kept = CAUSAL if "part" in name else MASK
    _, got, want = both(tmp_path / "m.onnx", function, mask, kept)
    np.testing.assert_allclose(got, want, atol=1e-5)
    assert not want[..., 0, :].any(), "torch gives 0 for a row without a key"


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_dtypes(tmp_path, dtype) -> None:
    function, mask = GUARDED["an input"]
    _, got, want = both(tmp_path / "m.onnx", function, mask.to(dtype), dtype=dtype)
    np.testing.assert_allclose(
        got, want, atol=5e-3 if dtype == torch.float16 else 1e-6
    )  # a scale in float32


PLAIN = {
    "finite": lambda q, m, _: attend(q, q, q, torch.where(m, 0.0, LOWEST)[None]),
    "multiplied": lambda q, m, _: attend(q, q, q, (1 - m.float()) * LOWEST),
    "a constant with a key in each row": lambda q, _, kept: attend(q, q, q, kept),
    "a bias from a table": lambda q, m, _: attend(q, q, q, torch.tensor([0.5, 2])[m.long()]),
}


@pytest.mark.parametrize("name", PLAIN)
def test_masks_that_need_no_guard(tmp_path, name) -> None:
    model, got, want = both(tmp_path / "m.onnx", PLAIN[name], KEPT, CAUSAL[:3, :3].clone())
    np.testing.assert_allclose(got, want, atol=1e-5)
    assert [node.op_type for node in model.graph.node][-3:] == ["Add", "Softmax", "MatMul"]


def test_a_guarded_attention_still_gets_the_form_that_tensorrt_fuses(tmp_path) -> None:
    model, *_ = both(tmp_path / "m.onnx", GUARDED["an input"][0])
    graph = gs.import_onnx(model)
    assert shape_attention.run(graph).rewritten
    ops = {node.op: node for node in graph.nodes}
    (softmax,) = (node for node in graph.nodes if node.op == "Softmax")
    (weighted,) = softmax.outputs[0].outputs
    (added,) = softmax.inputs[0].inputs
    assert (added.op, weighted.op, ops["Where"].inputs[1].inputs[0]) == ("Add", "MatMul", weighted)
    scores = next(t.inputs[0] for t in added.inputs if t.inputs)
    assert [t.inputs[0].op for t in scores.inputs] == ["Mul", "Transpose"]
