"""Sizes at which a model divides by zero, or has a number beyond 64 bits, are excluded."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from pipeline.errors import ConstraintError
from pipeline.export.export import export
from pipeline.graph.session import run_onnx
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
    with pytest.raises(ConstraintError, match=r"h != 233 must hold .*test_size_arithmetic.py"):
        export(spec_of(function), None, tmp_path / "m.onnx")


def test_a_divisor_of_two_dims_is_refused_with_its_line(tmp_path) -> None:
    spec = spec_of(lambda x: x * (1 / (x.shape[1] - 100 * x.shape[0])))
    with pytest.raises(ConstraintError, match=r"must hold.*test_size_arithmetic.py"):
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


@pytest.mark.parametrize(
    ("function", "last"),
    [
        (lambda x: x + x.shape[1] ** 10 % 7, 78),
        (lambda x: x + 3 ** x.shape[1] % 7, 33),  # ONNX Runtime's Pow has 53 bits
        (lambda x: x + (math.floor(x.shape[1] * 1.5) ** 8) % 7, 156),
        (lambda x: x + (4 * x.shape[1] ** 7 + 3 * x.shape[1] ** 7) % 11, 387),
    ],
)
def test_a_number_beyond_64_bits_narrows_its_dim(function: Function, last: int, tmp_path) -> None:
    path = tmp_path / "m.onnx"
    with pytest.raises(ConstraintError, match=rf"h must be in 8\.\.{last}\b") as error:
        export(spec_of(function), None, path)
    assert "another branch" not in str(error.value) and "too large for ONNX" in str(error.value)
    shape = (Dim("b", 1, 2, 4), Dim("h", 8, min(last, 64) // 2, last), 8)
    export(replace(spec_of(function), inputs=(Input("x", shape),)), None, path)
    for h in range(8, last + 1):
        x = torch.ones(1, h, 8)
        (got,) = next(run_onnx(path, [{"x": x.numpy()}])).values()
        assert (got == function(x).numpy()).all(), h


def test_a_product_beyond_64_bits_is_refused_with_its_line(tmp_path) -> None:
    spec = spec_of(lambda x: x + (x.shape[0] * x.shape[1]) ** 6 % 7)
    rule = r"h\*\*6\*b\*\*6 <= 9223372036854775807 must hold.*test_size_arithmetic.py"
    with pytest.raises(ConstraintError, match=rule):
        export(spec, None, tmp_path / "m.onnx")


def test_a_large_product_that_int64_holds_excludes_no_size(tmp_path) -> None:
    path = tmp_path / "m.onnx"
    spec = spec_of(lambda x: x + (x.shape[0] * x.shape[1]) ** 5 % 7)
    done = export(spec, None, path)
    assert not done.refinements and not done.spec.rules
    for b, h in ((1, 8), (4, 512), (3, 509)):
        feed = {"x": np.ones((b, h, 8), np.float32)}
        assert (next(run_onnx(path, [feed]))["y"] == 1 + (b * h) ** 5 % 7).all()
