"""atan2 with torch's signs and NaNs.

torch's exporter writes ``atan(y / x)`` and adds or subtracts pi by the sign of y. It gives -pi for
(0, -1), where torch has pi. It makes 0 of every NaN: of an input that is NaN, and of two zeros or
two infinities. Here the angle is taken between 0 and pi/2, and turned by both signs.

TensorRT may have the other sign of a zero that it computes. Then the angle differs by 2 pi, as it
would in torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import torch

from pipeline.export.ops.sizes import FLOAT, Value, op

aten: Any = torch.ops.aten
DOUBLE = ir.DataType.DOUBLE


def atan2(y: Value, x: Value) -> Value:
    """``atan2(y, x)`` between -pi and pi; NaN if y or x is NaN."""
    if y.dtype in (FLOAT, DOUBLE):
        return _atan2(y, x)
    return op.CastLike(_atan2(op.Cast(y, to=FLOAT), op.Cast(x, to=FLOAT)), y)


def _atan2(y: Value, x: Value) -> Value:
    def number(value: float) -> Value:
        dtype = DOUBLE if y.dtype == DOUBLE else ir.DataType.FLOAT
        return op.Constant(value=ir.tensor(value, dtype=dtype))

    zero, one = number(0.0), number(1.0)

    def negative(a: Value) -> Value:  # 1 / -0 is minus infinity
        return op.Or(op.Less(a, zero), op.Less(op.Div(one, a), zero))

    high, wide = op.Abs(y), op.Abs(x)
    diagonal = op.Where(op.Equal(high, zero), zero, number(math.pi / 4))
    angle = op.Where(op.Equal(high, wide), diagonal, op.Atan(op.Div(high, wide)))
    angle = op.Where(negative(x), op.Sub(number(math.pi), angle), angle)
    # ONNX Runtime's Where would lose the sign of a zero
    return op.Mul(angle, op.Where(negative(y), number(-1.0), one))


TRANSLATIONS: dict[Any, Callable[..., Any]] = {aten.atan2.default: atan2}
