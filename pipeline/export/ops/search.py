"""searchsorted and bucketize, step by step as torch does (torch 2.13's exporter has neither).

A binary search gives torch's result for every input, sorted or not, NaN included. It needs no
memory for [values, boundaries] (aten/src/ATen/native/Bucketization.cpp, ``cus_lower_bound``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from onnx import TensorProto

from pipeline.errors import ExportError
from pipeline.export.ops.axes import FLOATS
from pipeline.export.ops.sizes import Value, ints, largest, op, rank, size, tensor

aten: Any = torch.ops.aten
_LONGEST = 1 << 31


def searchsorted(
    sorted_sequence: Value,
    self: Value,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Value | None = None,
) -> Value:
    """``searchsorted``: int64, or int32, of the shape of the values.

    Args:
        sorted_sequence: the boundaries, [n], or [..., n] with the leading axes of the values.
        self: the values; a number too.
        out_int32: True for int32 indices.
        right: True for the place after equal boundaries.
        side: "right" is the same as `right`.
        sorter: the order of the boundaries, of their shape.

    Raises:
        ExportError: a float number among integer boundaries.
    """
    if isinstance(self, (int, float)):
        self = _number(self, sorted_sequence)
    # torch's condition for the upper half; both are false for a NaN
    stops = op.Greater if right or side == "right" else op.GreaterOrEqual
    length = size(sorted_sequence, -1)
    reach = int(length if isinstance(length, int) else min(largest(sorted_sequence, -1), _LONGEST))
    one_row = rank(sorted_sequence) == 1
    if sorter is not None:
        sorted_sequence = op.GatherElements(sorted_sequence, sorter, axis=-1)
    shape = op.Shape(self)
    low, high = op.Expand(ints(0), shape), op.Expand(tensor(length), shape)
    last = op.Sub(tensor(length), ints(1))
    if rank(self) == 0:
        low, high, last = (op.Squeeze(t, ints(0)) for t in (ints(0), tensor(length), last))
    for _ in range(reach.bit_length()):
        middle = op.Div(op.Add(low, high), op.Constant(value_int=2))
        at = op.Min(middle, last)  # a search that has ended may be behind the last boundary
        if one_row:
            there = op.Gather(sorted_sequence, at, axis=0)
        else:
            there = op.GatherElements(sorted_sequence, at, axis=-1)
        further = op.And(op.Not(stops(there, self)), op.Less(low, high))
        after = op.Add(middle, op.Constant(value_int=1))
        low, high = op.Where(further, after, low), op.Where(further, high, middle)
    return op.Cast(low, to=TensorProto.INT32) if out_int32 else low


def bucketize(
    self: Value, boundaries: Value, out_int32: bool = False, right: bool = False
) -> Value:
    """``bucketize``: `searchsorted` in boundaries [n]."""
    return searchsorted(boundaries, self, out_int32, right)


def _number(value: float, like: Value) -> Value:
    if isinstance(value, float) and like.dtype not in FLOATS:
        raise ExportError(f"a search for {value} among {like.dtype.name}: cast the boundaries")
    number = op.CastLike(op.Constant(value_float=float(value)), like)
    if like.dtype not in FLOATS:
        number = op.CastLike(op.Constant(value_int=int(value)), like)
    number.shape = type(like.shape)([])
    number.dtype = like.dtype
    return number


TRANSLATIONS: dict[Any, Callable[..., Any]] = {
    aten.searchsorted.Tensor: searchsorted,
    aten.searchsorted.Scalar: searchsorted,
    aten.bucketize.Tensor: bucketize,
}
