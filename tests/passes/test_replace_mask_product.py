"""replace_mask_product: ``(1 - mask) * -1e9`` in half precision, from torch's exporters."""

from __future__ import annotations

import io

import numpy as np
import onnx
import pytest
import torch
from pass_harness import apply, own, run

from pipeline.passes.replace_mask_product import PASS

POSITIVE = own("replace_mask_product", "positive")


class Masked(torch.nn.Module):
    def forward(self, scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return torch.softmax(scores + (1.0 - mask.half()) * -1e9, -1)


def export(mask: torch.Tensor, old: bool) -> onnx.ModelProto:
    scores = torch.linspace(-2, 3, 35).reshape(5, 7).half()
    h, w = torch.export.Dim("h", min=2), torch.export.Dim("w", min=2)
    if not old:
        program = torch.onnx.export(
            Masked(), (scores, mask), dynamo=True, opset_version=18,
            dynamic_shapes=({0: h, 1: w}, {0: h, 1: w}), verbose=False,
        )  # fmt: skip
        return program.model_proto
    buffer, axes = io.BytesIO(), {0: "h", 1: "w"}
    torch.onnx.export(
        Masked(), (scores, mask), buffer, dynamo=False, opset_version=17,
        input_names=["scores", "mask"], dynamic_axes={"scores": axes, "mask": axes},
    )  # fmt: skip
    return onnx.load_from_string(buffer.getvalue())


@pytest.mark.parametrize("old", [False, True], ids=["torch.export", "TorchScript"])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64], ids=str)
@pytest.mark.filterwarnings("ignore")
def test_what_torch_exports_is_nan_without_the_pass(dtype: torch.dtype, old: bool) -> None:
    mask = torch.ones(5, 7, dtype=dtype)
    mask[:, 4:] = 0
    mask[2, 1] = 0
    model = export(mask, old)
    after, result = apply(PASS, model)
    assert len(result.rewritten) == 1
    scores = torch.linspace(-2, 3, 35).reshape(5, 7).half()
    names = [value.name for value in model.graph.input]
    feeds = dict(zip(names, (scores.numpy(), mask.numpy()), strict=True))
    right = Masked()(scores, mask).numpy()
    assert np.isfinite(right).all()
    assert np.isnan(run(model, feeds)[0]).all()
    np.testing.assert_allclose(run(after, feeds)[0], right, 2e-3, 2e-3)


@pytest.mark.parametrize("case", POSITIVE, ids=str)
def test_only_nan_changes(case: object) -> None:
    """At random masks: equal to the product where the product is a number."""
    assert case in POSITIVE
    model = case.model()  # type: ignore[attr-defined]
    product = next(n for n in model.graph.node if n.op_type == "Mul").output[0]
    for each in (model, after := apply(PASS, model)[0]):
        del each.graph.output[:]
        each.graph.output.append(onnx.ValueInfoProto(name=product))
    feeds = {
        name: np.random.default_rng(0).integers(0, 3, (8, 7)).astype(values.dtype)
        for name, values in case.feeds(case.shapes[-1]).items()  # type: ignore[attr-defined]
    }
    (before,), (now,) = run(model, feeds), run(after, feeds)
    numbers = ~np.isnan(before)
    assert numbers.any()
    assert not numbers.all()
    np.testing.assert_array_equal(now[numbers], before[numbers])
    assert (now[~numbers] == 0).all()
