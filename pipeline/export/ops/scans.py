"""cummax and cummin, which torch's exporter can't translate (torch 2.13).

Step k compares each value with the one 2**k places before it, so log2(n) steps reach the whole
axis. torch returns the last index of equal values. A NaN counts as the largest and as the smallest
value: from the first NaN on every value is NaN, with the index of the last NaN so far
(aten/src/ATen/native/ReduceOps.cpp, ``cummax_cummin_helper``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from onnx import TensorProto

from pipeline.errors import ExportError
from pipeline.export.ops.axes import FLOATS
from pipeline.export.ops.sizes import Value, ints, largest, op, rank, size, steps

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
    axis = dim % rank(x)
    length = size(x, axis)
    reach = length if isinstance(length, int) else min(largest(x, axis), _LONGEST)
    places = steps(length)
    column = op.Reshape(places, ints(-1, *[1] * (rank(x) - axis - 1)))
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


TRANSLATIONS: dict[Any, Callable[..., Any]] = {
    aten.cummax.default: cummax,
    aten.cummin.default: cummin,
}
