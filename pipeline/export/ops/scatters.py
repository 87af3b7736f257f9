"""scatter_reduce by the mean, and diagonal_scatter (torch 2.13).

torch's exporter writes the first as a scatter with no reduction, and has no translation of the
second. torch's decomposition of diagonal_scatter writes in place, which the exporter refuses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from onnx import TensorProto
from onnxscript.function_libs.torch_lib.ops import core  # the exporter's own; torch 2.13

from pipeline.errors import ExportError
from pipeline.export.ops.axes import FLOATS
from pipeline.export.ops.sizes import Value, ints, op, rank, size, steps, tensor

aten: Any = torch.ops.aten


def scatter_reduce(
    x: Value, dim: int, index: Value, src: Value, reduce: str, include_self: bool = True
) -> Value:
    """``scatter_reduce.two``: the mean as a sum over a count; the exporter translates the others.

    Raises:
        ExportError: the mean of integers.
    """
    if reduce != "mean":
        return core.aten_scatter_reduce(x, dim, index, src, reduce, include_self)
    if x.dtype not in FLOATS:
        raise ExportError(f"scatter_reduce mean of {x.dtype.name} can't be exported; cast to float")
    one, none = (op.CastLike(op.Constant(value_float=v), x) for v in (1.0, 0.0))
    before = op.Expand(one if include_self else none, op.Shape(x))
    each = op.Expand(one, op.Shape(index))
    counts = op.ScatterElements(before, index, each, axis=dim, reduction="add")
    if not include_self:
        x = op.Where(op.Greater(counts, none), none, x)
    total = op.ScatterElements(x, index, src, axis=dim, reduction="add")
    return op.Div(total, op.Max(counts, one))


def diagonal_scatter(x: Value, src: Value, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Value:
    """``diagonal_scatter``: a tensor whose diagonal is `src`.

    Args:
        x: the tensor.
        src: the diagonal, along its last axis. It has 1 element or more.
        offset: how far the diagonal is to the right of the main one.
        dim1: the axis of the rows.
        dim2: the axis of the columns.
    """
    axes = rank(x)
    last = (dim1 % axes, dim2 % axes)
    order = [*(n for n in range(axes) if n not in last), *last]
    rows, columns = (steps(size(x, n)) for n in last)
    upright = op.Unsqueeze(rows, ints(1))
    # the k-th element is in row k, or in column k below the main diagonal
    end = op.Sub(tensor(size(src, -1)), ints(1))
    places = op.Min(rows if offset >= 0 else columns, end)
    values = op.Gather(op.CastLike(src, x), places, axis=axes - 2)
    values = op.Unsqueeze(values, ints(-1 if offset >= 0 else -2))
    on = op.Equal(op.Add(upright, ints(offset)), columns)
    others = op.Transpose(x, perm=order)
    if x.dtype == TensorProto.BOOL:  # ONNX Runtime has no Where of booleans
        found = op.Or(op.And(on, values), op.And(op.Not(on), others))
    else:
        found = op.Where(on, values, others)
    return op.Transpose(found, perm=[order.index(n) for n in range(axes)])


TRANSLATIONS: dict[Any, Callable[..., Any]] = {
    aten.scatter_reduce.two: scatter_reduce,
    aten.diagonal_scatter.default: diagonal_scatter,
}
