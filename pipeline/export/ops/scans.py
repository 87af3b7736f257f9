"""cummax and cummin, which torch's exporter can't translate, and logcumsumexp (torch 2.13).

torch's exporter writes logcumsumexp with ``exp(x - max)``, which is 0 for values 104 below it.

Step k compares each value with the one 2**k places before it, so log2(n) steps reach the whole
axis. torch returns the last index of equal values. A NaN counts as the largest and as the smallest
value: from the first NaN on every value is NaN, with the index of the last NaN so far
(aten/src/ATen/native/ReduceOps.cpp, ``cummax_cummin_helper``).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from onnx import TensorProto

from pipeline.errors import ExportError
from pipeline.export.ops.axes import FLOATS, in_float32
from pipeline.export.ops.sizes import Value, floats, ints, largest, op, rank, size, steps

aten: Any = torch.ops.aten
_LONGEST = 1 << 31
_KINDS = (*FLOATS, TensorProto.DOUBLE, TensorProto.INT32, TensorProto.INT64)


def cummax(x: Value, dim: int) -> tuple[Value, Value]:
    """``cummax``: the largest value so far and its last index, int64."""
    return _scan(x, dim, op.Greater, "cummax")


def cummin(x: Value, dim: int) -> tuple[Value, Value]:
    """``cummin``: the smallest value so far and its last index, int64."""
    return _scan(x, dim, op.Less, "cummin")


def _scan(x: Value, dim: int, beats: Callable[..., Value], name: str) -> tuple[Value, Value]:
    """The values and indices along an axis.

    Raises:
        ExportError: the tensor is neither float nor a 32- or 64-bit integer.
    """
    if x.dtype not in _KINDS:
        raise ExportError(f"{name} of {x.dtype.name} can't be exported; cast to float or int64")
    if rank(x) == 0:
        return op.Identity(x), op.Constant(value_int=0)
    axis, reach, places, column = _along(x, dim)
    values, indices = x, op.Expand(column, op.Shape(x))
    step = 1
    while step < reach:
        # places without an earlier one take place 0, which always belongs to them
        earlier = op.Max(op.Sub(places, ints(step)), ints(0))
        before, where = (op.Gather(t, earlier, axis=axis) for t in (values, indices))
        kept = beats(before, values)
        if x.dtype in (*FLOATS, TensorProto.DOUBLE):
            kept = op.Or(kept, op.And(op.IsNaN(before), op.Not(op.IsNaN(values))))
        values, indices = op.Where(kept, before, values), op.Where(kept, where, indices)
        step *= 2
    return values, indices


def _along(x: Value, dim: int) -> tuple[int, float, Value, Value]:
    """The axis, its largest size, its places, and the places along it for a broadcast."""
    axis = dim % rank(x)
    length = size(x, axis)
    reach = length if isinstance(length, int) else min(largest(x, axis), _LONGEST)
    places = steps(length)
    return axis, reach, places, op.Reshape(places, ints(-1, *[1] * (rank(x) - axis - 1)))


def logcumsumexp(x: Value, dim: int) -> Value:
    """``logcumsumexp``: the logarithm of the sum of ``exp(x)`` so far."""
    return op.Identity(x) if rank(x) == 0 else in_float32(x, lambda wide: _sums(wide, dim))


def _sums(x: Value, dim: int) -> Value:
    axis, reach, places, column = _along(x, dim)
    step = 1
    while step < reach:
        before = op.Gather(x, op.Max(op.Sub(places, ints(step)), ints(0)), axis=axis)
        before = op.Where(op.Less(column, ints(step)), floats(-math.inf), before)
        apart = op.Where(op.Equal(before, x), floats(0.0), op.Abs(op.Sub(before, x)))
        x = op.Add(op.Max(before, x), op.Log(op.Add(floats(1.0), op.Exp(op.Neg(apart)))))
        step *= 2
    return x


TRANSLATIONS: dict[Any, Callable[..., Any]] = {
    aten.logcumsumexp.default: logcumsumexp,
    aten.cummax.default: cummax,
    aten.cummin.default: cummin,
}
