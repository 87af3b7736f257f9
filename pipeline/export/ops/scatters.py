"""scatter_reduce by the mean, which torch's exporter writes as a scatter with no reduction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from onnxscript.function_libs.torch_lib.ops import core  # the exporter's own; torch 2.13

from pipeline.errors import ExportError
from pipeline.export.ops.axes import FLOATS
from pipeline.export.ops.sizes import Value, op

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


TRANSLATIONS: dict[Any, Callable[..., Any]] = {
    aten.scatter_reduce.two: scatter_reduce,
}
