"""scatter, scatter_add, scatter_reduce and index_reduce (torch 2.13).

torch's exporter writes the mean as a scatter with no reduction. It has no index_reduce and no
``scatter(reduce=...)``. A source that is larger than its indices fails in ONNX Runtime, and so do
the sums of float16 and the maximum of booleans. ONNX Runtime's maximum ignores NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from onnx import TensorProto, helper
from onnxscript.function_libs.torch_lib.ops import core  # the exporter's own; torch 2.13
from torch.fx.experimental.symbolic_shapes import statically_known_true

from pipeline.errors import ExportError
from pipeline.export.ops.axes import FLOATS
from pipeline.export.ops.sizes import (
    FLOAT,
    INT64,
    Value,
    as_shape,
    ints,
    known,
    number,
    op,
    rank,
    size,
    tensor,
)

aten: Any = torch.ops.aten
_REDUCTIONS = {"sum": "add", "prod": "mul", "amax": "max", "amin": "min"}  # ONNX's names
_SHORT = {"add": "sum", "multiply": "prod"}  # the names of ``scatter``
_NARROW = (TensorProto.FLOAT16, TensorProto.BFLOAT16)
_WITH_NAN = (*FLOATS, TensorProto.DOUBLE)


def scatter_reduce(
    x: Value,
    dim: int,
    index: Value,
    src: Value,
    reduce: str,
    include_self: bool = True,
    *,
    fits: bool = False,
) -> Value:
    """``scatter_reduce.two``; half precision is computed in float32.

    Raises:
        ExportError: the mean of integers, or the sum, product or mean of booleans.
    """
    dtype = int(x.dtype)
    wide, order = dtype, reduce in ("amax", "amin")
    if dtype in _NARROW:
        wide = int(FLOAT)
    elif dtype == TensorProto.BOOL and order:
        wide = int(TensorProto.INT32)
    elif dtype == TensorProto.BOOL or (reduce == "mean" and dtype not in _WITH_NAN):
        name = x.dtype.name
        raise ExportError(f"scatter_reduce {reduce} of {name} can't be exported; cast to float")
    if rank(x) == 0:
        return core.aten_scatter_reduce(x, dim, index, src, reduce, include_self)
    axis, source = dim % rank(x), src if fits else _cut(src, index)
    shape = [size(x, n) for n in range(rank(x))]
    if wide != dtype:
        x, source = (op.Cast(value, to=wide) for value in (x, source))
    if reduce == "mean":
        found = _mean(x, axis, index, source, wide, include_self=include_self)
    else:
        if not include_self:
            neutral = op.Expand(number(_neutral(reduce, wide), wide), op.Shape(index))
            x = op.ScatterElements(x, index, neutral, axis=axis)
        found = op.ScatterElements(x, index, source, axis=axis, reduction=_REDUCTIONS[reduce])
        if order and wide in _WITH_NAN:
            odd = op.Or(op.IsNaN(x), _reached(axis, index, op.IsNaN(source), shape))
            found = op.Where(odd, number(math.nan, wide), found)
    return found if wide == dtype else op.Cast(found, to=dtype)


def scatter_add(x: Value, dim: int, index: Value, src: Value) -> Value:
    """``scatter_add``"""
    return scatter_reduce(x, dim, index, src, "sum")


def scatter(x: Value, dim: int, index: Value, src: Value) -> Value:
    """``scatter.src``"""
    if rank(x) == 0:
        return core.aten_scatter_src(x, dim, index, src)
    return op.ScatterElements(x, index, _cut(src, index), axis=dim)


def scatter_with(x: Value, dim: int, index: Value, src: Value, reduce: str) -> Value:
    """``scatter.reduce``: the sum or the product."""
    return scatter_reduce(x, dim, index, src, _SHORT[reduce])


def scatter_number(x: Value, dim: int, index: Value, value: float, reduce: str) -> Value:
    """``scatter.value_reduce``: the sum or the product with one number."""
    src = op.Expand(number(value, int(x.dtype)), op.Shape(index))
    return scatter_reduce(x, dim, index, src, _SHORT[reduce], fits=True)


def index_reduce(
    x: Value, dim: int, index: Value, source: Value, reduce: str, include_self: bool = True
) -> Value:
    """``index_reduce``: `index` has one place for each slice of `source`."""
    axis = dim % rank(x)
    places = op.Reshape(index, ints(*(-1 if n == axis else 1 for n in range(rank(x)))))
    places = op.Expand(places, op.Shape(source))
    return scatter_reduce(x, dim, places, source, reduce, include_self, fits=True)


def _mean(
    x: Value, axis: int, index: Value, src: Value, dtype: int, *, include_self: bool
) -> Value:
    """The mean, as a sum over a count."""
    one, none = number(1, dtype), number(0, dtype)
    before = op.Expand(one if include_self else none, op.Shape(x))
    each = op.Expand(one, op.Shape(index))
    counts = op.ScatterElements(before, index, each, axis=axis, reduction="add")
    if not include_self:
        x = op.Where(op.Greater(counts, none), none, x)
    total = op.ScatterElements(x, index, src, axis=axis, reduction="add")
    return op.Div(total, op.Max(counts, one))


def _reached(axis: int, index: Value, marked: Value, shape: list[Any]) -> Value:
    """Which elements of a tensor of this shape a marked source reaches.

    The others go to a place behind the end. So no reduction is needed, which TensorRT lacks.
    """
    length = tensor(shape[axis])
    longer = [op.Add(length, ints(1)) if n == axis else s for n, s in enumerate(shape)]
    place = op.Where(marked, op.Cast(index, to=INT64), length)
    none, one = number(0, FLOAT), number(1, FLOAT)
    start, each = op.Expand(none, as_shape(*longer)), op.Expand(one, op.Shape(index))
    reached = op.Slice(
        op.ScatterElements(start, place, each, axis=axis), ints(0), length, ints(axis)
    )
    return op.Greater(reached, none)


def _cut(src: Value, index: Value) -> Value:
    """The part of the source that has an index."""
    one, other = known(src), known(index)
    tensors = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
    if tensors and all(
        statically_known_true(a == b) for a, b in zip(one.shape, other.shape, strict=True)
    ):
        return src
    axes = range(rank(src))
    return op.Slice(src, ints(*(0 for _ in axes)), op.Shape(index), ints(*axes))


def _neutral(reduce: str, dtype: int) -> float:
    """The value that does not change a reduction."""
    if reduce in ("sum", "prod"):
        return int(reduce == "prod")
    least = reduce == "amax"
    if dtype in _WITH_NAN:
        return -math.inf if least else math.inf
    ends = np.iinfo(helper.tensor_dtype_to_np_dtype(dtype))
    return int(ends.min if least else ends.max)


TRANSLATIONS: dict[Any, Callable[..., Any]] = {
    aten.scatter_reduce.two: scatter_reduce,
    aten.scatter_add.default: scatter_add,
    aten.scatter.src: scatter,
    aten.scatter.reduce: scatter_with,
    aten.scatter.value_reduce: scatter_number,
    aten.index_reduce.default: index_reduce,
}
