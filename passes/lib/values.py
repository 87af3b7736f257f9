"""Arithmetic that becomes numbers if its operands are known, and nodes otherwise.

A pass writes a formula once, as Python arithmetic on `Value`s. For static sizes the result is a
constant, for dynamic sizes it is nodes. Both compute in the same dtype (float32 or int64), so
that they round alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from pipeline.passes.lib.chain import Chain

Number = int | float


class Value:
    """A tensor whose elements are known (a numpy array) or computed in the graph.

    Args:
        chain: receives the nodes.
        data: the elements, or the tensor that holds them.
    """

    def __init__(self, chain: Chain, data: np.ndarray | gs.Tensor) -> None:
        self.chain, self.data = chain, data

    @property
    def known(self) -> np.ndarray | None:
        return self.data if isinstance(self.data, np.ndarray) else None

    def __add__(self, other: Value | Number) -> Value:
        return self._apply("Add", np.add, other)

    def __sub__(self, other: Value | Number) -> Value:
        return self._apply("Sub", np.subtract, other)

    def __mul__(self, other: Value | Number) -> Value:
        return self._apply("Mul", np.multiply, other)

    def __truediv__(self, other: Value | Number) -> Value:
        return self._apply("Div", np.divide, other)

    def __matmul__(self, other: Value) -> Value:
        return self._apply("MatMul", np.matmul, other)

    def __lt__(self, other: Value | Number) -> Value:
        return self._apply("Less", np.less, other, result=np.bool_)

    def __gt__(self, other: Value | Number) -> Value:
        return self._apply("Greater", np.greater, other, result=np.bool_)

    def at_least(self, other: Value | Number) -> Value:
        return self._apply("Max", np.maximum, other)

    def at_most(self, other: Value | Number) -> Value:
        return self._apply("Min", np.minimum, other)

    def floor(self) -> Value:
        return self._apply("Floor", np.floor)

    def ceil(self) -> Value:
        return self._apply("Ceil", np.ceil)

    def abs(self) -> Value:
        return self._apply("Abs", np.abs)

    def where(self, true: Value | Number, false: Value | Number, dtype: Any = np.float32) -> Value:
        """Elements of `true` where this is True, else of `false`; all in `dtype`."""
        one, other = self._value(true, dtype), self._value(false, dtype)
        mask, yes, no = self.known, one.known, other.known
        if mask is not None and yes is not None and no is not None:
            return Value(self.chain, np.where(mask, yes, no))
        made = self.chain.op("Where", self.data, one.data, other.data, dtype=dtype)
        return Value(self.chain, made)

    def cast(self, dtype: Any) -> Value:
        """Casts to float32 or int64. A float is truncated towards zero."""
        if self.known is not None:
            return Value(self.chain, self.known.astype(dtype))
        return Value(self.chain, self.chain.cast(self.data, dtype))

    def reshape(self, *shape: int) -> Value:
        """Reshapes to constant sizes, one of which may be -1."""
        if self.known is not None:
            return Value(self.chain, self.known.reshape(shape))
        made = self.chain.op("Reshape", self.data, np.array(shape), dtype=self.data.dtype)
        return Value(self.chain, made)

    def upto(self) -> Value:
        """0, 1, ..., value - 1 as 1-D int64. This value has the shape ``(1,)``."""
        if self.known is not None:
            return Value(self.chain, np.arange(int(self.known[0])))
        scalar = squeeze(self.chain, self.data)
        made = self.chain.op("Range", np.array(0), scalar, np.array(1), dtype=np.int64)
        return Value(self.chain, made)

    def _value(self, other: Value | Number, dtype: Any) -> Value:
        return other if isinstance(other, Value) else Value(self.chain, np.array(other, dtype))

    def _apply(
        self,
        op: str,
        function: Callable[..., np.ndarray],
        *others: Value | Number,
        result: Any = None,
    ) -> Value:
        dtype = self.data.dtype
        operands = [self, *(self._value(other, dtype) for other in others)]
        arrays = [value.known for value in operands]
        if all(array is not None for array in arrays):
            return Value(self.chain, np.asarray(function(*arrays)))
        made = self.chain.op(op, *(v.data for v in operands), dtype=result or dtype)
        return Value(self.chain, made)


def squeeze(chain: Chain, tensor: gs.Tensor) -> gs.Variable:
    """A tensor of shape ``(1,)`` as a scalar."""
    if chain.graph.opset >= 13:
        made = chain.op("Squeeze", tensor, np.array([0]), dtype=tensor.dtype, shape=[])
    else:
        made = chain.op("Squeeze", tensor, dtype=tensor.dtype, shape=[], axes=[0])
    return made
