"""Sizes at which a model divides by zero are excluded, also one among many."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from pipeline.errors import ConstraintError
from pipeline.export.export import export
from pipeline.spec.dims import Dim
from pipeline.spec.model import ModelSpec
from pipeline.spec.tensors import Input, Output

Function = Callable[[torch.Tensor], torch.Tensor]


class Net(torch.nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


def spec_of(function: Function) -> ModelSpec:
    shape = (Dim("b", 1, 2, 4), Dim("h", 8, 64, 512), 8)
    return ModelSpec("m", lambda _: Net(function), (Input("x", shape),), (Output("y"),))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * (1 / (x.shape[1] - 233)),
        lambda x: x * ((x.shape[0] + 2) / (x.shape[1] * x.shape[1] - 233 * x.shape[1])),
        lambda x: x + 7 // abs(x.shape[1] - 233),
    ],
)
def test_a_size_at_which_the_model_divides_by_zero(function: Function, tmp_path) -> None:
    with pytest.raises(ConstraintError, match=r"h != 233 must hold .*test_divisors.py"):
        export(spec_of(function), None, tmp_path / "m.onnx")


def test_a_divisor_of_two_dims_is_refused_with_its_line(tmp_path) -> None:
    spec = spec_of(lambda x: x * (1 / (x.shape[1] - 100 * x.shape[0])))
    with pytest.raises(ConstraintError, match=r"must hold.*test_divisors.py"):
        export(spec, None, tmp_path / "m.onnx")


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * (1 / (x.shape[1] - 7)),
        lambda x: x * (x.shape[1] % x.shape[0] + x.shape[1] // (x.shape[0] + 1)),
        lambda x: x * (1 / max(x.shape[1] - 233, 1)),
    ],
)
def test_a_divisor_that_is_never_zero_excludes_no_size(function: Function, tmp_path) -> None:
    done = export(spec_of(function), None, tmp_path / "m.onnx")
    assert not done.refinements and not done.spec.rules
