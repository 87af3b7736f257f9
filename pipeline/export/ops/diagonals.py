"""diagonal and diagonal_scatter (torch 2.13).

torch's exporter writes a diagonal as a sum of products with 0 and 1, so that NaN and infinity of
one element reach others. It has no translation of diagonal_scatter, and torch's decomposition
writes in place, which the exporter refuses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from onnx import TensorProto

from pipeline.export.ops.selections import of_booleans
from pipeline.export.ops.sizes import (
    Size,
    Value,
    as_shape,
    bounds,
    ints,
    known,
    op,
    rank,
    size,
    steps,
    tensor,
)

aten: Any = torch.ops.aten


def diagonal(x: Value, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Value:
    """``diagonal``, by index. It may be empty.

    Args:
        x: the tensor.
        offset: how far the diagonal is to the right of the main one.
        dim1: the axis of the rows.
        dim2: the axis of the columns.
    """
    axes = rank(x)
    last = (dim1 % axes, dim2 % axes)
    others = [n for n in range(axes) if n not in last]
    rows, columns = (size(x, n) for n in last)
    flat = op.Reshape(
        op.Transpose(x, perm=[*others, *last]),
        as_shape(*(size(x, n) for n in others), _times(rows, columns)),
        allowzero=1,
    )
    down, right = max(-offset, 0), max(offset, 0)
    lengths = _less(rows, down), _less(columns, right)
    start = right if down == 0 else _times(columns, down)
    places = op.Add(op.Mul(steps(_least(*lengths)), tensor(_plus_one(columns))), tensor(start))
    return op.Gather(flat, places, axis=len(others))


def _times(a: Size, b: Size) -> Size:
    return a * b if isinstance(a, int) and isinstance(b, int) else op.Mul(tensor(a), tensor(b))


def _plus_one(a: Size) -> Size:
    return a + 1 if isinstance(a, int) else op.Add(a, ints(1))


def _less(a: Size, number: int) -> Size:
    """``max(a - number, 0)``"""
    if isinstance(a, int):
        return max(a - number, 0)
    return op.Max(op.Sub(a, ints(number)), ints(0)) if number else a


def _least(a: Size, b: Size) -> Size:
    if isinstance(a, int) and isinstance(b, int):
        return min(a, b)
    return op.Min(tensor(a), tensor(b))


def diagonal_scatter(x: Value, src: Value, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Value:
    """``diagonal_scatter``: a tensor whose diagonal is `src`.

    Args:
        x: the tensor.
        src: the diagonal, along its last axis.
        offset: how far the diagonal is to the right of the main one.
        dim1: the axis of the rows.
        dim2: the axis of the columns.
    """
    axes = rank(x)
    last = (dim1 % axes, dim2 % axes)
    order = [*(n for n in range(axes) if n not in last), *last]
    rows, columns = (steps(size(x, n)) for n in last)
    upright = op.Unsqueeze(rows, ints(1))
    fake, source = known(src), op.CastLike(src, x)
    length = tensor(size(src, -1))
    if not isinstance(fake, torch.Tensor) or bounds(fake.shape[-1])[0] <= 0:
        # Gather needs an element, also if no place of the diagonal is left
        one = as_shape(*(size(src, n) for n in range(axes - 2)), 1)
        spare = op.Expand(op.CastLike(op.Constant(value_int=0), x), one)
        source = op.Concat(source, spare, axis=axes - 2)
        length = op.Add(length, ints(1))
    # the k-th element is in row k, or in column k below the main diagonal
    end = op.Sub(length, ints(1))
    places = op.Min(rows if offset >= 0 else columns, end)
    values = op.Gather(source, places, axis=axes - 2)
    values = op.Unsqueeze(values, ints(-1 if offset >= 0 else -2))
    on = op.Equal(op.Add(upright, ints(offset)), columns)
    others = op.Transpose(x, perm=order)
    if x.dtype == TensorProto.BOOL:  # ONNX Runtime has no Where of booleans
        found = of_booleans(on, values, others)
    else:
        found = op.Where(on, values, others)
    return op.Transpose(found, perm=[order.index(n) for n in range(axes)])


TRANSLATIONS: dict[Any, Callable[..., Any]] = {
    aten.diagonal.default: diagonal,
    aten.diagonal_copy.default: diagonal,
    aten.diagonal_scatter.default: diagonal_scatter,
}
