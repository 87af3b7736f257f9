"""Sizes and axes inside a replacement: numbers if they are static, nodes otherwise."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from pipeline.passes.infra import Refused
from pipeline.passes.lib.chain import Chain
from pipeline.passes.lib.values import Value

_HALVES = (np.dtype(np.float16), int(onnx.TensorProto.BFLOAT16))


def size_of(chain: Chain, tensor: gs.Tensor, axis: int) -> Value:
    """The size of one axis (not negative), int64 of shape ``(1,)``."""
    size = None if tensor.shape is None else tensor.shape[axis]
    known = isinstance(size, (int, np.integer))
    return Value(chain, np.array([size]) if known else chain.size(tensor, axis))


def floor_div(value: Value, by: int) -> Value:
    """An int64 that is not negative, divided by a positive number."""
    if by == 1:
        return value
    if value.known is not None:
        return Value(value.chain, value.known // by)
    return Value(value.chain, value.chain.op("Div", value.data, np.array(by), dtype=np.int64))


def product(values: list[Value]) -> Value:
    """The product of sizes, each of shape ``(1,)``. It is 1 without sizes. The static sizes are one
    factor."""
    chain = values[0].chain if values else None
    known = math.prod(int(v.known[0]) for v in values if v.known is not None)
    open_ = [v for v in values if v.known is None]
    result = open_[0] if open_ else None
    for value in open_[1:]:
        result = result * value  # type: ignore[operator]
    if result is None:
        return Value(chain, np.array([known]))  # type: ignore[arg-type]
    return result if known == 1 else result * known


def join(chain: Chain, *sizes: int | Value) -> Any:
    """Sizes as one 1-D int64 tensor: a constant, or a Concat. -1 and 0 have Reshape's meaning.

    A Value may hold several sizes.
    """
    parts = [s.data if isinstance(s, Value) else np.array([s]) for s in sizes]
    if all(isinstance(part, np.ndarray) for part in parts):
        return np.concatenate(parts).astype(np.int64)
    return chain.op("Concat", *parts, short="sizes", dtype=np.int64, axis=0)


def unsqueeze(chain: Chain, tensor: gs.Tensor, *axes: int) -> gs.Variable:
    """Inserts axes of size 1. Needs opset 13 or above, where the axes are an input."""
    return chain.op("Unsqueeze", tensor, np.array(axes), dtype=tensor.dtype)


def reduce(chain: Chain, op: str, tensor: gs.Tensor, axis: int) -> gs.Variable:
    """ReduceSum, ReduceMax, ReduceMin or ReduceProd over one axis, which is dropped.

    The axis is an input or an attribute, as the graph's opset needs. ReduceSum has an input from
    opset 13, the others from 18.
    """
    as_input = chain.graph.opset >= (13 if op == "ReduceSum" else 18)
    axes = [np.array([axis])] if as_input else []
    attrs: dict[str, Any] = {} if as_input else {"axes": [axis]}
    return chain.op(op, tensor, *axes, dtype=tensor.dtype, keepdims=0, **attrs)


def work_dtype(tensor: gs.Tensor, allowed: tuple[type, ...]) -> Any:
    """The dtype to compute in: float32 for half precision, else the tensor's dtype.

    Raises:
        Refused: the dtype is not known, or not in `allowed`. If float32 is in `allowed`, half
            precision is too.
    """
    dtype = tensor.dtype
    if dtype is None:
        raise Refused(f"the dtype of {tensor.name} is not known: declare it in value_info")
    if is_half(dtype) and np.float32 in allowed:
        return np.dtype(np.float32)
    if isinstance(dtype, int) or np.dtype(dtype) not in map(np.dtype, allowed):
        name = onnx.TensorProto.DataType.Name(dtype) if isinstance(dtype, int) else str(dtype)
        raise Refused(f"{tensor.name} is {name.lower()}, which the pass does not rewrite")
    return np.dtype(dtype)


def is_half(dtype: Any) -> bool:
    """True for float16 and bfloat16 (graph-surgeon has ONNX's number for bfloat16)."""
    return dtype == _HALVES[1] if isinstance(dtype, int) else np.dtype(dtype) == _HALVES[0]


def widen(chain: Chain, tensor: gs.Tensor, dtype: Any) -> gs.Tensor:
    """The tensor cast to a dtype, or the tensor itself if it has this dtype."""
    return tensor if tensor.dtype == dtype else chain.cast(tensor, dtype)


def rank_of(tensor: gs.Tensor) -> int:
    """The tensor's rank.

    Raises:
        Refused: it is not known.
    """
    if tensor.shape is None:
        raise Refused(f"the rank of {tensor.name} is not known: declare it in value_info")
    return len(tensor.shape)


def static_size(tensor: gs.Tensor, axis: int, what: str) -> int:
    """The size of an axis that must be static.

    Raises:
        Refused: the axis is dynamic. `what` names the axis in the message.
    """
    size = tensor.shape[axis]
    if not isinstance(size, (int, np.integer)):
        raise Refused(f"{what} of {tensor.name} is dynamic: make it static")
    return int(size)
