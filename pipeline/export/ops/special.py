"""erfinv, which torch's exporter can't translate, and functions that it writes badly (torch 2.13).

It writes logsigmoid as ``log(sigmoid(x))``, which is -inf below -88. It writes logaddexp with
exponentials that are infinite above 88. It writes log1p as ``log(1 + x)`` and expm1 as
``exp(x) - 1``, which lose the digits of a small x.

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
from onnx import TensorProto
from onnxscript.function_libs.torch_lib.ops import core  # the exporter's own; torch 2.13

from pipeline.errors import ExportError
from pipeline.export.ops.axes import FLOATS, in_float32
from pipeline.export.ops.sizes import Value, floats, op

aten: Any = torch.ops.aten
_BORDER = 5.0
_ATANH = (2 / 7, 2 / 5, 2 / 3, 2.0)  # the next term is below 2e-8 of the sum for z of -1/7..1/9
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


def log1p(x: Value) -> Value:
    """``log1p``, by the series of ``2 * atanh(x / (2 + x))`` for a small x."""
    return in_float32(x, _log1p) if x.dtype in FLOATS else core.aten_log1p(x)


def _log1p(x: Value) -> Value:
    z = op.Div(x, op.Add(x, floats(2.0)))
    series = op.Mul(_polynomial(_ATANH, op.Mul(z, z)), z)
    return op.Where(op.Less(op.Abs(x), floats(0.25)), series, op.Log(op.Add(x, floats(1.0))))


def expm1(x: Value) -> Value:
    """``expm1``, as ``2 * t / (1 - t)`` with ``t = tanh(x / 2)`` for a small x."""
    if x.dtype not in FLOATS:
        return op.Sub(op.Exp(x), op.CastLike(floats(1.0), x))
    return in_float32(x, _expm1)


def _expm1(x: Value) -> Value:
    t, one = op.Tanh(op.Mul(x, floats(0.5))), floats(1.0)
    near = op.Div(op.Mul(t, floats(2.0)), op.Sub(one, t))
    return op.Where(op.Less(op.Abs(x), floats(0.5)), near, op.Sub(op.Exp(x), one))


def log_sigmoid(x: Value) -> Value:
    """``logsigmoid``, as ``min(x, 0) - log1p(exp(-abs(x)))``."""
    return in_float32(x, _log_sigmoid)


def _log_sigmoid(x: Value) -> Value:
    below = op.Min(x, floats(0.0))
    return op.Sub(below, _log1p(op.Exp(op.Neg(op.Abs(x)))))


def logaddexp(a: Value, b: Value) -> Value:
    """``logaddexp``, as ``max(a, b) + log1p(exp(-abs(a - b)))``."""
    return _added(a, b, 1.0)


def logaddexp2(a: Value, b: Value) -> Value:
    """``logaddexp2``, the same with powers of two."""
    return _added(a, b, math.log(2.0))


def _added(a: Value, b: Value, unit: float) -> Value:
    """The logarithm of a sum, to the base ``exp(unit)``."""
    wide_b = op.Cast(b, to=TensorProto.FLOAT)

    def added(wide: Value) -> Value:
        equal = op.Equal(wide, wide_b)  # infinities too
        apart = op.Where(equal, floats(0.0), op.Abs(op.Sub(wide, wide_b)))
        more = _log1p(op.Exp(op.Mul(floats(-unit), apart)))
        return op.Add(op.Max(wide, wide_b), op.Mul(floats(1.0 / unit), more))

    return in_float32(a, added)


def erfcx(x: Value) -> Value:
    """Refuses ``erfcx``, which is also a part of ``log_ndtr``."""
    raise ExportError(
        "torch's exporter writes erfcx(x) as exp(x * x) * (1 - erf(x)), which has no right digit "
        f"above 4 in {x.dtype.name}; write this step with other ops"
    )


TRANSLATIONS: dict[Any, Callable[..., Any]] = {
    aten.erfinv.default: erfinv,
    aten.expm1.default: expm1,
    aten.log1p.default: log1p,
    aten.logaddexp.default: logaddexp,
    aten.logaddexp2.default: logaddexp2,
    aten.special_erfcx.default: erfcx,
    aten.log_sigmoid.default: log_sigmoid,
}
