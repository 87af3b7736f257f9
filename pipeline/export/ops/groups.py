"""Grouped products of matrices: the experts of a mixture, one matrix for each group of rows.

ONNX has no such op. So all rows are multiplied by each matrix, and each row takes the product of
its group. That is as many times the work as there are groups, but it needs no more memory than one
product, and its sizes do not depend on the data. A product of one group does not reach the rows of
another, not even as a NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from onnx import TensorProto

from pipeline.errors import ExportError
from pipeline.export.ops.sizes import Value, ints, op, rank, size, steps, tensor

aten: Any = torch.ops.aten


def grouped_mm(
    self: Value,
    mat2: Value,
    offs: Value | None = None,
    bias: Value | None = None,
    out_dtype: int | None = None,
) -> Value:
    """``_grouped_mm``: [rows, k] by [groups, k, n], or [groups, rows, k] by [groups, k, n].

    Args:
        self: the rows.
        mat2: the matrices.
        offs: the row after the last one of each group, [groups]; None for rows with three axes. The
            rows after the last group become zero; torch leaves them as they are in memory.
        bias: None.
        out_dtype: None, or the dtype of the rows.

    Raises:
        ExportError: groups along another axis, another dtype, or a number of groups that is a size.
    """
    if bias is not None or out_dtype not in (None, int(self.dtype)):
        raise ExportError(
            "with a bias or an out_dtype it can't be exported: add or cast afterwards"
        )
    if offs is None and rank(self) == rank(mat2) == 3:
        return op.MatMul(self, mat2)
    if (rank(self), rank(mat2)) != (2, 3) or not isinstance(mat2.shape[0], int):
        raise ExportError(
            "only rows [rows, k] with a known number of matrices [groups, k, n] can be exported; "
            "use torch.bmm if all groups have the same number of rows"
        )
    return grouped_rows(self, mat2, offs)


def grouped_rows(input: Value, weight: Value, offs: Value) -> Value:
    """Rows [rows, k] by matrices [groups, k, n]: [rows, n]; zero after the last group."""
    rows = op.Unsqueeze(steps(size(input, 0)), ints(1))
    ends = op.Cast(offs, to=TensorProto.INT64)
    shape = op.Concat(tensor(size(input, 0)), tensor(size(weight, 2)), axis=0)
    zero = op.CastLike(op.Constant(value_float=0.0), input)
    result = op.Expand(zero, shape)
    for group in reversed(range(weight.shape[0])):
        matrix = op.Gather(weight, op.Constant(value_int=group), axis=0)
        before_end = op.Less(rows, op.Gather(ends, ints(group), axis=0))
        result = op.Where(before_end, op.MatMul(input, matrix), result)
    return result


TRANSLATIONS: dict[Any, Callable[..., Any]] = {aten._grouped_mm.default: grouped_mm}


def of_libraries() -> dict[Any, Callable[..., Any]]:
    """The translations of the same op as transformers 5 registers it, if it was imported."""
    fallback = getattr(torch.ops.transformers, "grouped_mm_fallback", None)
    return {} if fallback is None else {fallback.default: grouped_rows}
