"""``a // b`` and ``a % b`` of float tensors, by the remainder, as torch computes them.

torch's exporter divides and rounds. Where a is a multiple of b, the rounded quotient is one too
large: 1.0 // 0.1 is 9 in torch and Python, because 0.1 is a little more than a tenth. ``Mod`` with
``fmod=1`` is exact in ONNX Runtime.

TensorRT computes that Mod as ``a - b * trunc(a / b)`` (onnx-tensorrt, ``modWithFPInputs``). So an
engine may still differ by one where a is a multiple of b.

The formula of the quotient is that of c10::div_floor_floating, except for the sign of a zero.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import torch
from onnx import TensorProto

from pipeline.export.ops.sizes import FLOAT, Value, op, source

_NARROW = (TensorProto.FLOAT16, TensorProto.BFLOAT16)  # torch computes these in float32


def floored(a: Value | float, b: Value | float) -> Value:
    """``a // b``: infinite or NaN where b is 0."""
    a, b, zero, like = _operands(a, b, rounded=False)
    quotient, rest = op.Div(a, b), op.Mod(a, b, fmod=1)
    exact = op.Div(op.Sub(a, rest), b)
    exact = op.Where(_other_sign(rest, b, zero), op.Sub(exact, _one(zero)), exact)
    whole = op.Floor(exact)
    half = op.CastLike(op.Constant(value_float=0.5), zero)
    whole = op.Where(op.Greater(op.Sub(exact, whole), half), op.Add(whole, _one(zero)), whole)
    whole = op.Where(op.Equal(b, zero), quotient, whole)
    return whole if like is None else op.CastLike(whole, like)


def modulo(a: Value | float, b: Value | float) -> Value:
    """``a % b``, with the sign of b: NaN where b is 0."""
    a, b, zero, like = _operands(a, b, rounded=True)
    rest = op.Mod(a, b, fmod=1)
    rest = op.Where(_other_sign(rest, b, zero), op.Add(rest, b), rest)
    return rest if like is None else op.CastLike(rest, like)


def _operands(a: Any, b: Any, *, rounded: bool) -> tuple[Value, Value, Value, Value | None]:
    """Both as tensors to compute with, a zero, and a tensor of the result's dtype if it differs.

    `rounded` says whether torch rounds a Python number to half precision first.
    """
    like = next(x for x in (a, b) if not isinstance(x, int | float) and x.dtype.is_floating_point())
    narrow = like.dtype in _NARROW
    dtype = ir.DataType.FLOAT if narrow else like.dtype

    def operand(x: Any) -> Value:
        number = _number(x)
        if number is None:
            x = x if x.dtype == like.dtype else op.Cast(x, to=like.dtype)  # a size
            return op.Cast(x, to=FLOAT) if narrow else x
        made = op.Constant(value=ir.tensor(number, dtype=like.dtype if rounded else dtype))
        return op.Cast(made, to=FLOAT) if narrow and rounded else made

    a, b = operand(a), operand(b)
    zero = op.CastLike(op.Constant(value_float=0.0), a)
    return a, b, zero, like if narrow else None


def _number(x: Any) -> float | None:
    """A Python number. The exporter may have made a tensor of it, rounded to float32."""
    if isinstance(x, int | float):
        return float(x)
    node = source(x)
    made = node is not None and node.target is torch.ops.aten.scalar_tensor.default
    return float(node.args[0]) if made and isinstance(node.args[0], int | float) else None


def _one(zero: Value) -> Value:
    return op.CastLike(op.Constant(value_float=1.0), zero)


def _other_sign(rest: Value, b: Value, zero: Value) -> Value:
    """True where there is a rest of the other sign than b."""
    differs = op.Xor(op.Less(rest, zero), op.Less(b, zero))
    return op.And(differs, op.Not(op.Equal(rest, zero)))
