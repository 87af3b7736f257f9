"""shape_attention: the form that it leaves, and other passes beside it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from pass_harness import PASSES, apply, assert_same, own, run

from pipeline.machine.target import TARGETS
from pipeline.passes.case import Case
from pipeline.rewrite.rewrite import rewrite

P, MASKS = PASSES["shape_attention"], PASSES["select_additive_mask"]
POSITIVE = own(P.name, "positive")
STAYS_3D = "it stays 3-D"


def named(name: str) -> Case:
    (case,) = (c for c in POSITIVE if c.name == name)
    return case


def nodes_of(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    bodies = [a.g for n in model.graph.node for a in n.attribute if a.HasField("g")]
    return [node for graph in (model.graph, *bodies) for node in graph.node]


def ops(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in nodes_of(model)]


@pytest.mark.parametrize("case", POSITIVE, ids=str)
def test_the_scale_is_on_q_and_one_transpose_makes_k(case: Case) -> None:
    model, _ = apply(P, case.model())
    makers = {name: node for node in nodes_of(model) for name in node.output}
    softmax = next(node for node in nodes_of(model) if node.op_type == "Softmax")
    node = softmax
    while node.op_type != "MatMul":
        assert node.op_type in ("Softmax", "Add", "Where")
        node = next(makers[n] for n in node.input if n in makers and "mask" not in n and n != "on")
    assert makers[node.input[0]].op_type in ("Mul", "Transpose", "Reshape")
    if STAYS_3D not in case.name:
        assert makers[node.input[1]].op_type == "Transpose"


@pytest.mark.parametrize(
    "case", [c for c in POSITIVE if c.name.startswith(("3-D", "nn."))], ids=str
)
def test_products_become_4d(case: Case) -> None:
    model = onnx.shape_inference.infer_shapes(apply(P, case.model())[0])
    ranks = {v.name: len(v.type.tensor_type.shape.dim) for v in model.graph.value_info}
    softmax = next(node for node in model.graph.node if node.op_type == "Softmax")
    assert ranks[softmax.input[0]] == (3 if STAYS_3D in case.name else 4)


def test_multihead_attention_loses_its_transposes() -> None:
    model, _ = apply(P, named("nn.MultiheadAttention").model())
    assert ops(model).count("Transpose") == 4
    assert not {"Gather", "Shape", "Concat", "Squeeze", "Unsqueeze"} & set(ops(model))
    (scale,) = (numpy_helper.to_array(t) for t in model.graph.initializer if not t.dims)
    np.testing.assert_allclose(scale, 0.5, rtol=1e-6)


@pytest.mark.parametrize("fault", [1.001, -1.0])
def test_a_wrong_scale_is_noticed(fault: float) -> None:
    case = named("scale after the product")
    model, _ = apply(P, case.model())
    (scale,) = (t for t in model.graph.initializer if not t.dims)
    wrong = (numpy_helper.to_array(scale) * fault).astype(np.float32)
    scale.CopyFrom(numpy_helper.from_array(wrong, scale.name))
    feeds = case.feeds(case.shapes[-1])
    with pytest.raises(AssertionError):
        assert_same(run(case.model(), feeds), run(model, feeds))


@pytest.mark.parametrize("case", own(MASKS.name, "positive"), ids=str)
def test_selected_masks_stay_selected(case: Case) -> None:
    before, _ = apply(MASKS, case.model())
    after, _ = apply(P, before)
    again, second = apply(MASKS, after)
    assert not second.modified
    assert ops(after).count("Where") == ops(before).count("Where")
    for shapes in case.shapes:
        feeds = case.feeds(shapes)
        assert_same(run(before, feeds), run(again, feeds))


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention = torch.nn.MultiheadAttention(16, 4, batch_first=True)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.attention(x, x, x, attn_mask=mask, need_weights=False)[0] + x


@pytest.mark.parametrize("target", ["tensorrt-8.6", "rtx-1.7"])
def test_what_torch_exports(target: str, tmp_path: Path) -> None:
    b, s = torch.export.Dim("b", min=1, max=64), torch.export.Dim("s", min=2, max=64)
    program = torch.onnx.export(
        Layer().eval(),
        (torch.randn(2, 5, 16), torch.randn(5, 5)),
        dynamic_shapes={"x": {0: b, 1: s}, "mask": {0: s, 1: s}},
        dynamo=True,
        verbose=False,
    )
    assert program is not None
    program.save(tmp_path / "a.onnx")
    made = rewrite(tmp_path / "a.onnx", tmp_path / "b.onnx", TARGETS[target])
    assert next(r for r in made.passes if r.name == P.name).rewritten
    model = onnx.load(tmp_path / "b.onnx")
    assert [op for op in ops(model) if op in ("Gather", "Transpose")] == ["Transpose"] * 4
    for batch, length in ((1, 2), (2, 5), (3, 7)):
        x, mask = np.random.rand(batch, length, 16), np.random.rand(length, length)
        feeds = {"x": x.astype(np.float32), "mask": mask.astype(np.float32)}
        assert_same(run(onnx.load(tmp_path / "a.onnx"), feeds), run(model, feeds))
