"""replace_nonzero: graphs of torch's two exporters, and graphs that must not be rewritten."""

from __future__ import annotations

import io
from collections.abc import Callable

import numpy as np
import onnx
import pytest
import torch
from pass_harness import apply, assert_same, own, run

from pipeline.passes.case import Case
from pipeline.passes.replace_nonzero import PASS

POSITIVE = own("replace_nonzero", "positive")
X = torch.linspace(-3, 4, 35).reshape(5, 7)
MASK = X.sin() > 0
ROWS = torch.tensor([True, False, True, True, False])


class Module(torch.nn.Module):
    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.function(x, mask)


def number(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[mask] = 9.0
    return x


def arithmetic(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[mask] = torch.relu(x[mask]) * 2
    return x


def export(function: Callable[..., torch.Tensor], mask: torch.Tensor, old: bool) -> onnx.ModelProto:
    """Exports with dynamic sizes that have the same names in both inputs."""
    h, w = torch.export.Dim("h", min=2), torch.export.Dim("w", min=2)
    axes = {0: h, 1: w}, {0: h, 1: w} if mask.dim() == 2 else {0: h}
    if not old:
        program = torch.onnx.export(
            Module(function), (X, mask), dynamo=True, opset_version=18, dynamic_shapes=axes,
            verbose=False,
        )  # fmt: skip
        return program.model_proto
    buffer = io.BytesIO()
    names = [{axis: dim.__name__ for axis, dim in each.items()} for each in axes]
    torch.onnx.export(
        Module(function), (X, mask), buffer, dynamo=False, opset_version=18,
        input_names=["x", "mask"], dynamic_axes=dict(zip(("x", "mask"), names, strict=True)),
    )  # fmt: skip
    return onnx.load_from_string(buffer.getvalue())


@pytest.mark.parametrize("old", [False, True], ids=["torch.export", "TorchScript"])
@pytest.mark.parametrize(
    ("function", "mask"),
    [
        (number, MASK),
        (number, ROWS),
        (arithmetic, MASK),
        (arithmetic, ROWS),
        (lambda x, m: x[m].sum(), MASK),
        (lambda x, m: x[m].mean(), ROWS),
        (lambda x, m: x + m.nonzero().shape[0], MASK),
    ],
    ids=["number", "number in rows", "arithmetic", "rows", "sum", "mean of rows", "how many"],
)
@pytest.mark.filterwarnings("ignore")
def test_exported_models_equal_torch(
    function: Callable[..., torch.Tensor], mask: torch.Tensor, old: bool
) -> None:
    if old and function is number and mask is ROWS:
        pytest.skip("the TorchScript exporter writes a Where that broadcasts the mask wrongly")
    model, result = apply(PASS, export(function, mask, old))
    assert not result.refused
    assert "NonZero" not in {node.op_type for node in model.graph.node}
    names = [value.name for value in model.graph.input]
    for x, m in ((X, mask), (X[:4, :3], mask[:4, :3] if mask.dim() == 2 else mask[:4])):
        feeds = dict(zip(names, (x.numpy().copy(), m.numpy().copy()), strict=True))
        assert_same([function(x, m).numpy()], run(model, feeds))


@pytest.mark.filterwarnings("ignore")
def test_masked_scatter_is_no_elementwise_selection() -> None:
    """masked_scatter reads from the start of the source. Where would read other values."""
    source = X * 2
    right = X.masked_scatter(MASK, source)
    assert not torch.equal(right, torch.where(MASK, source, X))
    for old in (False, True):
        model = export(lambda x, m: x.masked_scatter(m, x * 2), MASK, old)
        _, result = apply(PASS, model)
        assert not result.rewritten
        assert all(change.op == "NonZero" for change in result.refused)


def case(name: str) -> Case:
    return next(c for c in POSITIVE if c.name == name)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_selected_does_not_leak(value: float) -> None:
    mask = np.array([[True, False], [False, True]])
    x = np.where(mask, 2, value).astype(np.float32)
    for name in ("ReduceSum of the selection", "ReduceMax of the selection"):
        model = case(name).model()
        after, _ = apply(PASS, model)
        assert_same(run(model, {"x": x, "m": mask}), run(after, {"x": x, "m": mask}))


def test_an_empty_selection_sums_to_0_and_has_no_mean() -> None:
    feeds = {"x": np.ones((2, 3), np.float32), "m": np.zeros((2, 3), bool)}
    (total,) = run(apply(PASS, case("ReduceSum of the selection").model())[0], feeds)
    (mean,) = run(apply(PASS, case("ReduceMean of the selection").model())[0], feeds)
    assert total == 0
    assert np.isnan(mean)
    assert torch.ones(2, 3)[torch.zeros(2, 3, dtype=torch.bool)].mean().isnan()


@pytest.mark.parametrize("name", ["number written by a mask, opset 18, float", "rows by a mask of lower rank"])  # noqa: E501  # fmt: skip
def test_a_wrong_rewrite_is_caught(name: str) -> None:
    """Swaps the branches of Where. The numeric check of the contract must fail."""
    model, _ = apply(PASS, case(name).model())
    (where,) = (n for n in model.graph.node if n.op_type == "Where")
    where.input[1], where.input[2] = where.input[2], where.input[1]
    feeds = case(name).feeds(case(name).shapes[1])
    with pytest.raises(AssertionError):
        assert_same(run(case(name).model(), feeds), run(model, feeds))
