"""median, a stable sort and cumprod, which torch's exporter can't translate (torch 2.13).

And ``any`` of an axis that may be empty: torch's exporter casts the maximum of integers to bool,
and the maximum of none is the lowest integer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from onnx import TensorProto
from onnxscript.function_libs.torch_lib.ops import core  # the exporter's own; torch 2.13

from pipeline.errors import ExportError
from pipeline.export.ops.axes import FLOATS
from pipeline.export.ops.sizes import (
    INT64,
    Size,
    Value,
    bounds,
    ints,
    known,
    largest,
    op,
    rank,
    size,
    tensor,
)

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

    NaN counts as larger than infinity. TensorRT does not say how TopK orders equal values. So a
    second TopK sorts by a key in which no two are equal: the number of different values before it,
    then the place.

    Raises:
        ExportError: the axis is longer than TensorRT can sort.
    """
    if rank(x) == 0:
        return op.Identity(x), op.Constant(value_int=0)
    length, axis = _sortable("sort", x, dim)
    count, shown = tensor(length), x
    if x.dtype == TensorProto.BOOL:
        shown = op.Cast(x, to=TensorProto.INT32)
    odd = op.IsNaN(x) if x.dtype in (*FLOATS, TensorProto.DOUBLE) else None
    if odd is not None:  # first it counts as infinity
        shown = op.Where(odd, op.CastLike(op.Constant(value_float=math.inf), x), x)
    values, places = op.TopK(shown, count, axis=axis, largest=int(descending), sorted=1)
    if stable or odd is not None:
        places = _in_order(values, places, odd, axis, count, descending=descending)
    if odd is not None:
        values = op.GatherElements(x, places, axis=axis)
    elif x.dtype == TensorProto.BOOL:
        values = op.Cast(values, to=TensorProto.BOOL)
    return values, places


def _in_order(
    values: Value, places: Value, odd: Value | None, axis: int, length: Value, *, descending: bool
) -> Value:
    """The places of sorted values, with equal ones in their order, and NaN behind infinity.

    Args:
        values, places: what TopK gave, with infinity in place of NaN.
        odd: True for each NaN; None if there are none.
        axis, length: the sorted axis and its length [1].
        descending: whether the largest values come first, and NaN before infinity.
    """
    zero, one = op.Constant(value_int=0), op.Constant(value_int=1)
    before = op.Sub(op.Range(zero, op.Squeeze(length), one), one)
    previous = op.Gather(values, op.Max(before, zero), axis=axis)
    differs = op.Cast(op.Not(op.Equal(values, previous)), to=INT64)
    number = op.CumSum(differs, op.Constant(value_int=axis))
    if odd is not None:  # the group of infinity is the last one, or the first
        later = op.GatherElements(odd, places, axis=axis)
        later = op.Not(later) if descending else later
        number = op.Add(number, op.Cast(later, to=INT64))
    key = op.Add(op.Mul(number, length), places)
    keys, _ = op.TopK(key, length, axis=axis, largest=0, sorted=1)
    return op.Sub(keys, op.Mul(op.Div(keys, length), length))


def _sortable(name: str, x: Value, dim: int) -> tuple[Size, int]:
    """The length and the number of an axis that TensorRT can sort at every size."""
    length = size(x, dim)
    most = length if isinstance(length, int) else largest(x, dim)
    if math.isfinite(most) and most > _LONGEST:
        up_to = "" if isinstance(length, int) else "up to "
        raise ExportError(f"{name} of {up_to}{int(most)} values: TensorRT sorts {_LONGEST} at most")
    return length, dim % rank(x)


def cumprod(x: Value, dim: int, dtype: int = -1) -> Value:
    """``cumprod``: products over the lower triangle; needs memory for the squared axis."""
    axes = rank(x)
    axis = dim % axes
    length = tensor(size(x, axis))
    if dtype != -1 and dtype is not None:
        x = op.Cast(x, to=dtype)
    square = op.Concat(length, length, axis=0)
    ones = op.Expand(op.Cast(ints(1), to=TensorProto.FLOAT), square)
    kept = op.Cast(op.Trilu(ones, upper=0), to=TensorProto.BOOL)  # [n, n]: row i keeps 0 ... i
    after = axes - axis - 1
    if after:
        kept = op.Unsqueeze(kept, ints(*range(2, 2 + after)))
    wide = op.Unsqueeze(x, ints(axis))  # [..., 1, n, ...]
    one = op.CastLike(op.Constant(value_float=1.0), x)
    return op.ReduceProd(op.Where(kept, wide, one), ints(axis + 1), keepdims=0)


def any_dim(x: Value, dim: int, keepdim: bool = False) -> Value:
    """``any.dim``, False for an empty axis."""
    if rank(x) == 0 or not _maybe_empty(x, [dim]):
        return core.aten_any_dim(x, dim, keepdim)
    return _any(x, [dim], keepdim)


def any_dims(x: Value, dim: Sequence[int] | None = None, keepdim: bool = False) -> Value:
    """``any.dims``, False for empty axes."""
    axes = list(dim or range(rank(x)))
    if not _maybe_empty(x, axes):
        return core.aten_any_dims(x, dim or (), keepdim)
    return _any(x, axes, keepdim)


def any_default(x: Value) -> Value:
    """``any.default``, False for an empty tensor."""
    axes = list(range(rank(x)))
    return _any(x, axes, False) if _maybe_empty(x, axes) else core.aten_any(x)


def _maybe_empty(x: Value, axes: Sequence[int]) -> bool:
    fake = known(x)
    return isinstance(fake, torch.Tensor) and any(bounds(fake.shape[n])[0] <= 0 for n in axes)


def _any(x: Value, axes: Sequence[int], keepdim: bool) -> Value:
    found = op.Cast(op.Cast(x, to=TensorProto.BOOL), to=INT64)
    most = op.ReduceMax(found, ints(*axes), keepdims=int(keepdim))
    return op.Greater(most, op.Constant(value_int=0))


TRANSLATIONS: dict[Any, Callable[..., Any]] = {
    aten.median.dim: median,
    aten.sort.stable: stable_sort,
    aten.cumprod.default: cumprod,
    aten.any.dim: any_dim,
    aten.any.dims: any_dims,
    aten.any.default: any_default,
}
