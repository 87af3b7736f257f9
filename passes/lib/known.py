"""Integers and truth values that are the same for every size and every input.

A condition is known if it comes from constants, ranks and static dims. It is also known if it
compares sizes whose difference is the same number for all sizes. `_sizes` assumes that named dims
are at least 1. The results here do not depend on that: only differences that cancel count.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from pipeline.passes.graph_ops import is_op, values_of
from pipeline.passes.lib.sizes import elements_of

_DEEPEST = 50
_LARGEST = 256
_ELEMENTWISE: dict[str, Callable[..., Any]] = {
    "Identity": lambda a: a,
    "Not": np.logical_not,
    "Xor": np.logical_xor,
    "Equal": np.equal,
    "Less": np.less,
    "LessOrEqual": np.less_equal,
    "Greater": np.greater,
    "GreaterOrEqual": np.greater_equal,
    "Add": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "Neg": np.negative,
    "Abs": np.abs,
    "Where": np.where,
}
_REDUCTIONS: dict[str, Callable[..., Any]] = {
    "ReduceMin": np.min,
    "ReduceMax": np.max,
    "ReduceSum": np.sum,
    "ReduceProd": np.prod,
}
_RESHAPES = ("Squeeze", "Unsqueeze", "Reshape")


def known(tensor: gs.Tensor, depth: int = 0) -> np.ndarray | None:
    """The elements of a small tensor of integers or booleans. None if they depend on the inputs, or
    cannot be followed.

    If the result has one element, its rank may be lower than the tensor's.
    """
    values = values_of(tensor)
    if values is not None:
        return values if values.size <= _LARGEST else None
    if depth > _DEEPEST or len(tensor.inputs) != 1:
        return None
    node = tensor.inputs[0]
    if (node.domain or "") not in ("", "ai.onnx"):
        return None
    return _static(node) if node.op in ("Shape", "Size") else _computed(node, depth)


def _static(node: gs.Node) -> np.ndarray | None:
    shape = node.inputs[0].shape
    if shape is None or not all(isinstance(size, (int, np.integer)) for size in shape):
        return None
    if node.op == "Size":
        return np.array(np.prod(shape, dtype=np.int64))
    return np.array(shape[node.attrs.get("start", 0) : node.attrs.get("end")], np.int64)


def _computed(node: gs.Node, depth: int) -> np.ndarray | None:
    if node.op in ("And", "Or"):
        return _either(node, depth)
    if node.op in ("Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual"):
        compared = _compared(node)
        if compared is not None:
            return compared
    sizes = _numbers(node.outputs[0])
    if sizes is not None:
        return sizes
    inputs = []
    for tensor in node.inputs:
        values = known(tensor, depth + 1)
        if values is None:
            return None
        inputs.append(values)
    return _evaluated(node, inputs) if inputs else None


def _evaluated(node: gs.Node, inputs: list[np.ndarray]) -> np.ndarray | None:
    first = inputs[0]
    result: Any = None
    if node.op in ("Add", "Sub", "Mul") and first.dtype.kind not in "iu":
        pass  # float arithmetic may round differently in TensorRT; comparing floats is exact
    elif node.op in _ELEMENTWISE:
        result = _ELEMENTWISE[node.op](*inputs)
    elif node.op in ("Min", "Max"):
        pick = np.minimum if node.op == "Min" else np.maximum
        result = functools.reduce(pick, inputs)
    elif node.op == "Cast":
        result = _cast(first, int(node.attrs["to"]))
    elif node.op in _RESHAPES and first.size == 1:
        result = first.reshape(())
    elif node.op in _REDUCTIONS and first.ndim <= 1 and first.dtype.kind in "iub" and first.size:
        # a tensor of rank 0 or 1 has at most one axis; empty axes may mean that none is reduced
        empty = any(axes.size == 0 for axes in inputs[1:])
        result = None if empty else _REDUCTIONS[node.op](first).astype(first.dtype)
    return None if result is None else np.asarray(result)


def _cast(values: np.ndarray, to: int) -> np.ndarray | None:
    whole = (onnx.TensorProto.BOOL, onnx.TensorProto.INT32, onnx.TensorProto.INT64)
    if to not in whole or (values.dtype.kind == "f" and to != onnx.TensorProto.BOOL):
        return None
    return values.astype(onnx.helper.tensor_dtype_to_np_dtype(to))


def _either(node: gs.Node, depth: int) -> np.ndarray | None:
    """And, Or: also known if one side alone decides."""
    decisive = node.op == "Or"
    sides = []
    for tensor in node.inputs:
        side = known(tensor, depth + 1)
        if side is not None:
            if side.size == 1 and bool(side.item()) is decisive:
                return np.array(decisive)
            sides.append(side)
    if len(sides) < len(node.inputs):
        return None
    return np.asarray((np.logical_or if decisive else np.logical_and)(*sides))


def _compared(node: gs.Node) -> np.ndarray | None:
    """A comparison of two sizes whose difference is a number."""
    sides = [elements_of(tensor) for tensor in node.inputs]
    if any(side is None or side.floating or len(side.values) != 1 for side in sides):
        return None
    one, other = sides
    assert one is not None
    assert other is not None
    difference = (one.values[0] - other.values[0]).expand()
    if not difference.is_Integer:
        return None
    return np.asarray(_ELEMENTWISE[node.op](int(difference), 0))


def _numbers(tensor: gs.Tensor) -> np.ndarray | None:
    """Static sizes of shapes that may have other, dynamic sizes."""
    elements = elements_of(tensor)
    if elements is None or elements.floating:
        return None
    if not all(value.is_Integer for value in elements.values):
        return None
    numbers = np.array([int(value) for value in elements.values], np.int64)
    return numbers.reshape(()) if elements.rank == 0 else numbers


def depends_on_data(tensor: gs.Tensor) -> bool:
    """True if the tensor's elements depend on values, not only on sizes and constants.

    A tensor from another domain counts as data. So does a tensor in the body of a Loop that is
    computed from the values that the Loop carries.
    """
    todo, seen = [tensor], {id(tensor)}
    while todo:
        current = todo.pop()
        if isinstance(current, gs.Constant):
            continue
        if not current.inputs:
            return True
        for node in current.inputs:
            if is_op(node, "Shape") or is_op(node, "Size"):
                continue
            if any(isinstance(value, gs.Graph) for value in node.attrs.values()):
                return True
            for source in node.inputs:
                if id(source) not in seen and not source.is_empty():
                    seen.add(id(source))
                    todo.append(source)
    return False
