"""Floor division and modulo of sizes and integer tensors.

torch's exporter writes ``a // b`` of two sizes as ONNX's integer Div, which truncates: at w = 9
``-(-w // 8) * 8`` gives 8 instead of 16. ONNX's Mod has the sign of the divisor, as in Python. But
TensorRT-RTX's builder assumes that the result may be negative, and fails for a model that
pads itself (``Resize shape dims should be non-negative``). So no operand here is negative. For
b > 0

    floor(a / b) = max(a, 0) div b - (max(-a, 0) + b - 1) div b
    a mod b = (max(a, 0) + b - max(-a, 0) mod b) mod b

Plain Div and Mod are used where a can't be negative at the declared sizes. A divisor that may be 0
becomes at least 1: where it is 0, the model itself fails.

``operator.floordiv``, ``mod`` and ``pow`` are the keys under which torch 2.13 dispatches them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from onnx import TensorProto
from onnxscript.function_libs.torch_lib.ops import core  # the exporter's own; torch 2.13

from pipeline.errors import ExportError
from pipeline.export.ops.quotients import floored, modulo
from pipeline.export.ops.sizes import Value, bounds, known, op

aten: Any = torch.ops.aten


def floordiv(a: Any, b: Any) -> Any:
    """``a // b`` of two sizes, int64 scalars; one of them may be a Python int.

    Raises:
        ExportError: the divisor may be negative, and is not a number.
    """
    if isinstance(b, int) and b < 0:
        a, b = (-a if isinstance(a, int) else op.Neg(a)), -b
    b = _positive(b, "//")
    if _least(a) >= 0:
        return op.Div(_scalar(a), _scalar(b))
    return _floor(_scalar(a), _scalar(b))


def mod(a: Any, b: Any) -> Any:
    """``a % b`` of two sizes, with the divisor's sign.

    Raises:
        ExportError: the divisor may be negative.
    """
    b = _positive(b, "%")
    a, b, low = _scalar(a), _scalar(b), _least(a)
    return op.Mod(a, b) if low >= 0 else _mod(a, b, op.Constant(value_int=0))


def power(a: Any, b: Any) -> Any:
    """``a ** b`` of sizes and numbers.

    Raises:
        ExportError: the exponent is a size that may be negative: ONNX's power is 0 there.
    """
    size = None if isinstance(b, int | float) else known(b)
    if isinstance(size, torch.SymInt) and bounds(size)[0] < 0:
        raise ExportError("** with a negative exponent, as far as is known")
    if isinstance(b, int) and 0 < b < 64 and isinstance(known(a), torch.SymInt):
        return _product(a, b)  # ONNX Runtime computes Pow of int64 in float64
    a, b = (_scalar(value) if isinstance(value, int) else value for value in (a, b))
    return core.aten_pow(a, b)


def _product(a: Value, times: int) -> Value:
    """A size times itself."""
    found = None
    while times:
        if times % 2:
            found = a if found is None else op.Mul(found, a)
        times //= 2
        a = op.Mul(a, a) if times else a
    return found


def remainder(x: Value, other: Any) -> Value:
    """``remainder.Scalar``; of integers other than int32 and int64, the exporter's translation.

    Args:
        x: the tensor.
        other: a number or a size, such as that of ``index % x.shape[2]``.

    Raises:
        ExportError: the tensor has integers, and the size may be negative.
    """
    if x.dtype.is_floating_point():
        return modulo(x, other)
    if x.dtype not in _INTEGERS or (isinstance(other, int | float) and not _is_positive(other)):
        return core.aten_remainder_scalar(x, other)
    zero, divisor = (op.CastLike(_scalar(n), x) for n in (0, _positive(other, "%")))
    return _mod(x, divisor, zero)


def remainders(x: Value, other: Value) -> Value:
    """``remainder.Tensor``; of integers, the exporter's translation."""
    return modulo(x, other) if _real(x, other) else core.aten_remainder(x, other)


def remainder_of_number(x: float, other: Value) -> Value:
    """``remainder.Scalar_Tensor``; of integers, the exporter's translation."""
    return modulo(x, other) if _real(x, other) else core.aten_remainder_scalar_tensor(x, other)


def div(x: Value, other: Value, rounding_mode: str | None = None) -> Value:
    """``div`` with a rounding mode; torch's exporter divides integers in float32."""
    if rounding_mode == "floor" and _real(x, other):
        return floored(x, other)
    if rounding_mode is not None:
        x = _like(x, other)
    if rounding_mode is None or x.dtype not in _INTEGERS:
        return core.aten_div_mode(x, other, rounding_mode=rounding_mode)
    return core.aten_floor_divide(x, other) if rounding_mode == "floor" else op.Div(x, other)


def floor_divide(x: Value | int, other: Value) -> Value:
    """``x // other``; of integers, the exporter's translation, which takes no number."""
    if _real(x, other):
        return floored(x, other)
    return core.aten_floor_divide(_like(x, other), other)


def _like(x: Value | int, other: Value) -> Value:
    """A number as a tensor of the other's dtype."""
    if not isinstance(x, int):
        return x
    made = op.CastLike(op.Constant(value_int=x), other)
    made.dtype = other.dtype
    return made


def _real(*values: Any) -> bool:
    """Whether one of the tensors and numbers is a float."""
    return any(
        isinstance(v, float) or (not isinstance(v, int) and v.dtype.is_floating_point())
        for v in values
    )


def _mod(a: Value, b: Value, zero: Value) -> Value:
    below = op.Mod(op.Max(op.Neg(a), zero), b)
    return op.Mod(op.Add(op.Max(a, zero), op.Sub(b, below)), b)


def _floor(a: Value, b: Value) -> Value:
    zero, one = op.Constant(value_int=0), op.Constant(value_int=1)
    above = op.Div(op.Max(a, zero), b)
    below = op.Div(op.Sub(op.Add(op.Max(op.Neg(a), zero), b), one), b)
    return op.Sub(above, below)


def _is_positive(other: float) -> bool:
    return isinstance(other, int) and other > 0


def _positive(b: Any, sign: str) -> Any:
    least = _least(b)
    if least > 0:
        return b
    if least == 0 and not isinstance(b, int):
        return op.Max(b, op.Constant(value_int=1))
    raise ExportError(
        f"{sign} by a negative number, or by a size that may be negative as far as is known"
    )


def _scalar(value: Any) -> Value:
    return op.Constant(value_int=value) if isinstance(value, int) else value


def _least(value: Any) -> float:
    """The smallest value that a size can have at the declared sizes, as far as that is known."""
    return bounds(value if isinstance(value, int) else known(value))[0]


_INTEGERS = (TensorProto.INT64, TensorProto.INT32)
# torch's exporter makes a tensor of the number, and of the op remainder.Tensor
WITH_NUMBERS = (aten.remainder.Scalar, aten.remainder.Scalar_Tensor)
TRANSLATIONS: dict[Any, Callable[..., Any]] = {
    operator.floordiv: floordiv,
    operator.mod: mod,
    operator.pow: power,
    aten.remainder.Scalar: remainder,
    aten.remainder.Tensor: remainders,
    aten.remainder.Scalar_Tensor: remainder_of_number,
    aten.floor_divide.default: floor_divide,
    aten.div.Tensor_mode: div,
}
