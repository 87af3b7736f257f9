"""widen_mean_square: half precision that overflows without it, and a check that notices faults."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from pass_harness import apply, assert_same, own, run

from pipeline.passes.case import Case
from pipeline.passes.widen_mean_square import PASS

POSITIVE = own("widen_mean_square", "positive")


def case(name: str) -> Case:
    return next(c for c in POSITIVE if c.name == name)


@pytest.mark.parametrize(
    "name",
    ["RMS norm, opset 13", "RMS norm, opset 17", "RMS norm, opset 18", "one over the root",
     "power of minus a half", "length", "ReduceSumSquare"],
)  # fmt: skip
def test_half_precision_overflows_as_it_stands(name: str) -> None:
    """Values near 300: their squares exceed 65504, but the root of their mean does not.

    ONNX's reference evaluator shows it. ONNX Runtime has no half-precision arithmetic on a CPU, and
    computes the whole chain in float32.
    """
    x = (np.random.default_rng(0).normal(0, 300, (2, 5, 4))).astype(np.float16)
    with np.errstate(all="ignore"):
        (before,) = evaluate(case(name).model(), x)
    after_model, _ = apply(PASS, case(name).model())
    wide = x.astype(np.float64)
    mean = np.sum if name in ("length", "ReduceSumSquare") else np.mean
    right = wide / np.sqrt(mean(wide * wide, -1, keepdims=True) + 1e-2)
    assert not np.allclose(before.astype(np.float64), right, 0.1, 0.1)
    for (after,) in (evaluate(after_model, x), run(after_model, {"x": x})):
        assert after.dtype == np.float16
        np.testing.assert_allclose(after.astype(np.float64), right, 4e-3, 4e-3)


def evaluate(model: onnx.ModelProto, x: np.ndarray) -> list[np.ndarray]:
    return ReferenceEvaluator(model).run(None, {"x": x})


def test_no_half_precision_square_is_left() -> None:
    for each in POSITIVE:
        after, _ = apply(PASS, each.model())
        _, again = apply(PASS, after)
        assert not again.modified
        if each.name not in ("square that is used elsewhere", "in the body of If"):
            names = {node.name.partition("/")[0] for node in after.graph.node}
            assert not {name for name in names if name.startswith("Pow")} - {"Pow_3"}


def test_a_wrong_rewrite_is_caught() -> None:
    """Leaves out the epsilon."""
    each = case("RMS norm, opset 18")
    model, _ = apply(PASS, each.model())
    (node,) = (n for n in model.graph.node if n.name.endswith("/add"))
    node.op_type, kept = "Identity", node.input[0]
    del node.input[:]
    node.input.append(kept)
    feeds = {"x": (each.feeds(each.shapes[1])["x"] * 0.1).astype(np.float16)}
    with pytest.raises(AssertionError):
        assert_same(run(each.model(), feeds), run(model, feeds))


class RootMeanSquare(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)


@pytest.mark.filterwarnings("ignore")
def test_a_norm_exported_by_torch_in_half_precision() -> None:
    x = torch.linspace(-900, 900, 40).reshape(2, 5, 4).half()
    dims = {0: torch.export.Dim("n", min=1), 1: torch.export.Dim("s", min=1)}
    program = torch.onnx.export(
        RootMeanSquare(), (x,), dynamo=True, opset_version=18, dynamic_shapes=(dims,),
        verbose=False,
    )  # fmt: skip
    model, result = apply(PASS, program.model_proto)
    assert len(result.rewritten) == 1
    (y,) = run(model, {model.graph.input[0].name: x.numpy()})
    assert_same([RootMeanSquare()(x.float()).half().numpy()], [y])
