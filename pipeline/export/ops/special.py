"""erfinv, which torch's exporter can't translate, and logsigmoid (torch 2.13).

torch's exporter writes logsigmoid as ``log(sigmoid(x))``, which is -inf below -88.

The polynomials of erfinv are those of M. Giles, "Approximating the erfinv function" (GPU Computing
Gems, 2012): the largest relative error in float32 is about 4e-7. torch's CUDA kernel is of the same
kind. torch's CPU kernel refines a rougher start by Newton steps, and loses digits where erf is
close to 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from pipeline.export.ops.axes import in_float32
from pipeline.export.ops.sizes import Value, floats, op

aten: Any = torch.ops.aten
_BORDER = 5.0
_NEAR = (
    2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087,
    -0.00125372503, -0.00417768164, 0.246640727, 1.50140941,
)  # fmt: skip
_FAR = (
    -0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773,
    -0.0076224613, 0.00943887047, 1.00167406, 2.83297682,
)  # fmt: skip


def erfinv(x: Value) -> Value:
    """``erfinv``: infinite at -1 and 1, NaN outside."""
    return in_float32(x, _erfinv)


def _erfinv(x: Value) -> Value:
    one = floats(1.0)
    w = op.Neg(op.Log(op.Mul(op.Sub(one, x), op.Add(one, x))))
    near = _polynomial(_NEAR, op.Sub(w, floats(2.5)))
    # w may be below 0 by rounding, where the other polynomial is taken
    far = _polynomial(_FAR, op.Sub(op.Sqrt(op.Abs(w)), floats(3.0)))
    found = op.Mul(op.Where(op.Less(w, floats(_BORDER)), near, far), x)
    return op.Where(op.Equal(op.Abs(x), one), op.Mul(x, floats(math.inf)), found)


def _polynomial(coefficients: tuple[float, ...], x: Value) -> Value:
    first, *rest = coefficients
    total = floats(first)
    for coefficient in rest:
        total = op.Add(op.Mul(total, x), floats(coefficient))
    return total


def log_sigmoid(x: Value) -> Value:
    """``logsigmoid``, as ``min(x, 0) - log(1 + exp(-abs(x)))``."""
    return in_float32(x, _log_sigmoid)


def _log_sigmoid(x: Value) -> Value:
    below = op.Min(x, floats(0.0))
    return op.Sub(below, op.Log(op.Add(floats(1.0), op.Exp(op.Neg(op.Abs(x))))))


TRANSLATIONS: dict[Any, Callable[..., Any]] = {
    aten.erfinv.default: erfinv,
    aten.log_sigmoid.default: log_sigmoid,
}
