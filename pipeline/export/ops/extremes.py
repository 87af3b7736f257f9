"""clamp, fmax, fmin and sign with torch's results for NaN and infinity (torch 2.13).

torch's exporter writes ``clamp(min=...)`` as a Clip without an upper end. ONNX's end is then the
largest finite number, so infinity is not kept. It rounds bounds to float32, drops a bound that is
NaN, and fails if one bound is an integer and the other a float. It has no fmax and fmin.
`pipeline.export.torch_2_13.decompose` leaves the bounds of `WITH_BOUNDS` as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from onnx import TensorProto

from pipeline.export.ops.axes import FLOATS
from pipeline.export.ops.sizes import Value, number, op

aten: Any = torch.ops.aten
Bound = Any  # a number, a Value that is a scalar, or None
_FLOATS = (*FLOATS, TensorProto.DOUBLE)


def clamp(x: Value, min: Bound = None, max: Bound = None) -> Value:
    """``clamp`` by numbers or sizes. NaN stays NaN; if min is above max, the result is max.

    Args:
        x: the tensor. Integers become float32 if a bound is a float, as in torch.
        min: the smallest value of the result.
        max: the largest value of the result.
    """
    dtype = _dtype(x, (min, max))
    low, high = _bound(min, dtype), _bound(max, dtype)
    if x.dtype != dtype:
        x = op.Cast(x, to=dtype)
    for bound, value in ((min, low), (max, high)):
        if isinstance(bound, float) and math.isnan(bound):
            return op.Add(x, value)  # all is NaN
    whole = dtype not in _FLOATS  # a Clip of integers has no end of its own
    if whole or (low is not None and high is not None):
        return op.Clip(x, low, high)
    x = x if low is None else op.Max(x, low)
    return x if high is None else op.Min(x, high)


def clamp_min(x: Value, min: Bound) -> Value:
    """``clamp_min`` by a number or a size."""
    return clamp(x, min)


def clamp_max(x: Value, max: Bound) -> Value:
    """``clamp_max`` by a number or a size."""
    return clamp(x, None, max)


def clamp_min_tensor(x: Value, min: Value) -> Value:
    """``clamp_min`` by a tensor."""
    return op.Max(x, op.CastLike(min, x))


def clamp_max_tensor(x: Value, max: Value) -> Value:
    """``clamp_max`` by a tensor."""
    return op.Min(x, op.CastLike(max, x))


def fmax(x: Value, other: Value) -> Value:
    """``fmax``: the larger value; the other one, if one is NaN."""
    return _but_numbers(x, other, op.Max(x, other))


def fmin(x: Value, other: Value) -> Value:
    """``fmin``: the smaller value; the other one, if one is NaN."""
    return _but_numbers(x, other, op.Min(x, other))


def sign(x: Value) -> Value:
    """``sign``; of NaN it is 0, as in torch. ONNX does not say what it is."""
    if x.dtype not in _FLOATS:
        return op.Sign(x)
    zero = op.CastLike(op.Constant(value_float=0.0), x)
    above, below = op.Greater(x, zero), op.Less(x, zero)
    return op.Sub(op.CastLike(above, x), op.CastLike(below, x))


def _but_numbers(x: Value, other: Value, both: Value) -> Value:
    """The result of two numbers; of a number and NaN, the number."""
    if x.dtype not in _FLOATS:
        return both
    return op.Where(op.IsNaN(x), other, op.Where(op.IsNaN(other), x, both))


def _dtype(x: Value, bounds: tuple[Bound, Bound]) -> int:
    """The dtype of ``clamp``, by torch's type promotion."""
    if x.dtype in _FLOATS:
        return int(x.dtype)
    given = [b for b in bounds if b is not None]
    if any(isinstance(b, float) or getattr(b, "dtype", None) in _FLOATS for b in given):
        return int(TensorProto.FLOAT)
    return int(TensorProto.INT64 if x.dtype == TensorProto.BOOL else x.dtype)


def _bound(bound: Bound, dtype: int) -> Value | None:
    """A bound as a scalar of a dtype."""
    if bound is None:
        return None
    given = isinstance(bound, int | float)
    return number(bound, dtype) if given else op.Cast(bound, to=dtype)


# their numbers are not made tensors
WITH_BOUNDS = (aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default)
TRANSLATIONS: dict[Any, Callable[..., Any]] = {
    aten.clamp.default: clamp,
    aten.clamp_min.default: clamp_min,
    aten.clamp_max.default: clamp_max,
    aten.clamp_min.Tensor: clamp_min_tensor,
    aten.clamp_max.Tensor: clamp_max_tensor,
    aten.fmax.default: fmax,
    aten.fmin.default: fmin,
    aten.sign.default: sign,
}
