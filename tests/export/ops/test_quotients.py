"""``//`` and ``%`` of floats are torch's numbers, at multiples of the divisor too."""

from __future__ import annotations

import itertools
import math

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from op_exports import compare_op, export_op

from pipeline.export.ops import exporter

VALUES = [1.0, -1.0, 0.1, -0.1, 0.0, -0.0, 0.3, 0.05, -2.0, 3.0, 0.7, 1e30]
VALUES += [math.inf, -math.inf, math.nan]
PAIRS = torch.tensor(list(itertools.product(VALUES, VALUES)))
HALF = torch.float16


def whole(x):
    return x.nan_to_num(1, 9, -9).clamp(-9, 9).long()


FUNCTIONS = {
    "x // 0.1": lambda x, _: x // 0.1,
    "x // 2": lambda x, _: x // 2,
    "x // y": lambda x, y: x // y,
    "1.5 // x": lambda x, _: 1.5 // x,
    "2 // x": lambda x, _: 2 // x,
    "x % 0.1": lambda x, _: x % 0.1,
    "x % -0.3": lambda x, _: x % -0.3,
    "x % 2": lambda x, _: x % 2,
    "x % y": lambda x, y: x % y,
    "1.5 % x": lambda x, _: 1.5 % x,
    "2 % x": lambda x, _: 2 % x,
    "floor by a number": lambda x, _: torch.div(x, 0.1, rounding_mode="floor"),
    "floor by a tensor": lambda x, y: torch.div(x, y, rounding_mode="floor"),
    "of integers by floats": lambda x, y: torch.div(whole(x), y, rounding_mode="floor"),
    "integers % 0.3": lambda x, _: whole(x) % 0.3,
    "integers // 3": lambda x, _: whole(x) // 3,
    "integers % integers": lambda x, y: whole(x) % whole(y).abs().clamp(min=1),
}


class Of(torch.nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x, y):
        return self.function(x, y)


def both(path, function, x, y):
    """The graph, its result, and torch's."""
    model = Of(function)
    program = torch.export.export(model, (x, y))
    exporter.to_onnx(
        program, path, opset=18, input_names=["x", "y"], output_names=["z"],
        shapes=[tuple(x.shape)] * 2,
    )  # fmt: skip
    onnx.checker.check_model(onnx.load(path), full_check=True)
    session = onnxruntime.InferenceSession(str(path))
    feed = {"x": x.numpy(), "y": y.numpy()}
    (got,) = session.run(None, {i.name: feed[i.name] for i in session.get_inputs()})
    return onnx.load(path), got, model(x, y).numpy()


@pytest.mark.parametrize("dtype", [torch.float32, HALF, torch.float64])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_like_torch(tmp_path, name, dtype) -> None:
    x, y = PAIRS.to(dtype).unbind(1)
    _, got, want = both(tmp_path / "m.onnx", FUNCTIONS[name], x, y)
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(got, want)  # to the bit, except for the sign of zeros


def test_one_less_than_the_rounded_quotient(tmp_path) -> None:
    x, y = torch.tensor([1.0, -1.0]), torch.tensor([0.1, 0.1])
    _, got, _ = both(tmp_path / "m.onnx", FUNCTIONS["x // y"], x, y)
    assert got.tolist() == [9, -10]


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_by_a_size(tmp_path, dtype) -> None:
    def function(x):
        n = x.shape[0]
        return x % n, x // n, n % x, n // x, torch.div(x, n, rounding_mode="floor")

    path = tmp_path / "m.onnx"
    export_op(function, [torch.randn(4).to(dtype)], path)
    session = onnxruntime.InferenceSession(str(path))
    for n in range(1, 30):
        x = (torch.randn(n) * n).round(decimals=1).to(dtype)
        x[0] = n
        for got, want in zip(session.run(None, {"x0": x.numpy()}), function(x), strict=True):
            np.testing.assert_array_equal(got, want.numpy())


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_number_by_integers(tmp_path, dtype) -> None:
    y = torch.tensor([1, 2, 7, 999, -1, -2, -7, -999], dtype=dtype)
    path = tmp_path / "m.onnx"

    def function(y):
        quotients = [torch.div(1000, y, rounding_mode=mode) for mode in ("floor", "trunc")]
        return 1000 // y, -1000 // y, torch.floor_divide(y, 3), *quotients

    export_op(function, [y], path)
    compare_op(function, path, [y])
