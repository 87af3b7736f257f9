"""``where`` and ``masked_fill`` of booleans, for which ONNX Runtime has no Where (1.31).

And indices of int32: GatherND and ScatterND take int64 alone, and the exporter passes them on as
they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from onnx import TensorProto
from onnxscript.function_libs.torch_lib.ops import core  # the exporter's own; torch 2.13

from pipeline.export.ops.sizes import Value, number, op

aten: Any = torch.ops.aten


def where(condition: Value, self: Any, other: Any) -> Value:
    """``where``: elements of `self` where the condition holds, and of `other` elsewhere.

    Args:
        condition: a boolean tensor.
        self, other: tensors of one dtype, or a number in place of a tensor.
    """
    if all(isinstance(x, bool) or _dtype(x) == TensorProto.BOOL for x in (self, other)):
        return of_booleans(condition, self, other)
    return op.Where(condition, self, other)


def masked_fill(self: Value, mask: Value, value: Any) -> Value:
    """``masked_fill`` by a number, or by a tensor that is one."""
    if self.dtype != TensorProto.BOOL:
        return op.Where(mask, op.CastLike(value, self), self)
    value = bool(value) if isinstance(value, int | float) else op.Cast(value, to=self.dtype)
    return of_booleans(mask, value, self)


def of_booleans(condition: Value, self: Any, other: Any) -> Value:
    """``where`` of two boolean tensors, or bools."""
    yes, no = (number(x, TensorProto.BOOL) if isinstance(x, bool) else x for x in (self, other))
    return op.Or(op.And(condition, yes), op.And(op.Not(condition), no))


def index(self: Value, indices: Sequence[Value | None]) -> Value:
    """``x[indices]``, by booleans, int64 or int32."""
    return core.aten_index(self, _long(indices))


def index_put(
    self: Value, indices: Sequence[Value | None], values: Value, accumulate: bool = False
) -> Value:
    """``x[indices] = values``, or a sum, by booleans, int64 or int32."""
    return core.aten_index_put(self, _long(indices), values, accumulate)


def _long(indices: Sequence[Value | None]) -> list[Value | None]:
    return [_int64(each) if _dtype(each) == TensorProto.INT32 else each for each in indices]


def _int64(index: Any) -> Value:
    long = op.Cast(index, to=TensorProto.INT64)
    long.shape, long.dtype = index.shape, type(index.dtype)(TensorProto.INT64)
    return long


def _dtype(value: Any) -> int | None:
    return getattr(value, "dtype", None)


# torch may make tensors of their numbers, and call where.self
WITH_NUMBERS = (aten.where.Scalar, aten.where.ScalarSelf, aten.where.ScalarOther)
TRANSLATIONS: dict[Any, Callable[..., Value]] = {
    aten.where.self: where,
    **dict.fromkeys(WITH_NUMBERS, where),
    aten.masked_fill.Scalar: masked_fill,
    aten.masked_fill.Tensor: masked_fill,
    aten.index.Tensor: index,
    aten._unsafe_index.Tensor: index,
    aten.index_put.default: index_put,
    aten._unsafe_index_put.default: index_put,
}
