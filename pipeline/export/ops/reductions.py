"""median, a stable sort and cumprod, which torch's exporter can't translate (torch 2.13)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from onnx import TensorProto

from pipeline.errors import ExportError
from pipeline.export.ops.sizes import Size, Value, ints, op, rank, size, tensor

aten: Any = torch.ops.aten
_LONGEST = 3840  # the longest axis that TensorRT's TopK accepts


def median(x: Value, dim: int, keepdim: bool = False) -> tuple[Value, Value]:
    """``median.dim``: the lower of the two middle values, by sorting, and its index.

    For equal values the index is arbitrary, as in torch. NaNs are sorted like numbers.

    Raises:
        ExportError: the axis is longer than TensorRT can sort.
    """
    length, axis = _sortable("median", x, dim)
    values, places = op.TopK(x, tensor(length), axis=axis, largest=0, sorted=1)
    middle = op.Div(op.Sub(tensor(length), ints(1)), ints(2))
    found = [op.Gather(t, middle, axis=axis) for t in (values, places)]
    if keepdim:
        return found[0], found[1]
    return op.Squeeze(found[0], ints(axis)), op.Squeeze(found[1], ints(axis))


def stable_sort(
    x: Value, *, stable: bool | None = None, dim: int = -1, descending: bool = False
) -> tuple[Value, Value]:
    """``sort.stable``: the sorted values, and their places as int64; equal values keep their order.

    TensorRT does not say how TopK orders equal values. So a second TopK sorts by a key in which no
    two are equal: the number of different values before it, then the place. NaNs are sorted like
    numbers.

    Raises:
        ExportError: the axis is longer than TensorRT can sort.
    """
    if rank(x) == 0:
        return op.Identity(x), op.Constant(value_int=0)
    length, axis = _sortable("sort", x, dim)
    dtype, count = x.dtype, tensor(length)
    if dtype == TensorProto.BOOL:
        x = op.Cast(x, to=TensorProto.INT32)
    values, places = op.TopK(x, count, axis=axis, largest=int(descending), sorted=1)
    if stable:
        places = _in_order(values, places, count, axis)
    if dtype == TensorProto.BOOL:
        values = op.Cast(values, to=TensorProto.BOOL)
    return values, places


def _in_order(values: Value, places: Value, count: Value, axis: int) -> Value:
    """The places of sorted values, with those of equal values in ascending order."""
    steps = op.Range(op.Constant(value_int=0), op.Squeeze(count), op.Constant(value_int=1))
    before = op.Gather(values, op.Max(op.Sub(steps, ints(1)), ints(0)), axis=axis)
    differs = op.Cast(op.Not(op.Equal(values, before)), to=TensorProto.INT64)
    first_key = op.Mul(op.CumSum(differs, op.Constant(value_int=axis)), count)
    keys, _ = op.TopK(op.Add(first_key, places), count, axis=axis, largest=0, sorted=1)
    return op.Sub(keys, first_key)


def _sortable(name: str, x: Value, dim: int) -> tuple[Size, int]:
    """The length and the number of an axis that TensorRT can sort."""
    length = size(x, dim)
    if isinstance(length, int) and length > _LONGEST:
        raise ExportError(f"{name} of {length} values: TensorRT sorts {_LONGEST} at most")
    return length, dim % rank(x)


def cumprod(x: Value, dim: int, dtype: int = -1) -> Value:
    """``cumprod``: products over the lower triangle; needs memory for the squared axis."""
    if dtype != -1 and dtype is not None:
        x = op.Cast(x, to=dtype)
    axis = dim % rank(x)
    length = tensor(size(x, axis))
    square = op.Concat(length, length, axis=0)
    ones = op.Expand(op.Cast(ints(1), to=TensorProto.FLOAT), square)
    kept = op.Cast(op.Trilu(ones, upper=0), to=TensorProto.BOOL)  # [n, n]: row i keeps 0 ... i
    after = rank(x) - axis - 1
    if after:
        kept = op.Unsqueeze(kept, ints(*range(2, 2 + after)))
    wide = op.Unsqueeze(x, ints(axis))  # [..., 1, n, ...]
    one = op.CastLike(op.Constant(value_float=1.0), x)
    return op.ReduceProd(op.Where(kept, wide, one), ints(axis + 1), keepdims=0)


TRANSLATIONS: dict[Any, Callable[..., Any]] = {
    aten.median.dim: median,
    aten.sort.stable: stable_sort,
    aten.cumprod.default: cumprod,
}
