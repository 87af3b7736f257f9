"""Views of a tensor: nodes that move its values, or multiply them by a number or a weight."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_graphsurgeon as gs
import sympy

from pipeline.passes.graph_ops import is_op, maker, values_of
from pipeline.passes.lib.sizes import dims_of, elements_of

_MOVES = ("Reshape", "Transpose", "Squeeze", "Unsqueeze", "Slice", "Split", "Gather", "Identity")
_LONGEST = 40  # nodes of a chain
_DTYPES = (np.float16, np.float32, np.float64)


def chain_to(tensor: gs.Tensor) -> list[tuple[gs.Node, gs.Tensor]]:
    """The nodes that a `layout.Layout` may follow to a tensor, with their outputs, in order."""
    found: list[tuple[gs.Node, gs.Tensor]] = []
    while len(found) < _LONGEST:
        node = maker(tensor)
        if node is None or not can_follow(node):
            break
        found.insert(0, (node, tensor))
        tensor = data_of(node)
    return found


def can_follow(node: gs.Node) -> bool:
    """True for a node that a `layout.Layout` may follow. Whether it can depends on the sizes."""
    if any(is_op(node, op) for op in _MOVES) or is_linear(node) or factor_of(node) is not None:
        return True
    if is_op(node, "Cast"):
        return node.inputs[0].dtype is not None and node.inputs[0].dtype == node.outputs[0].dtype
    if not is_op(node, "Add") or 1 not in map(rank_of_constant, node.inputs):
        return False
    before = maker(data_of(node))
    return before is not None and is_op(before, "MatMul") and is_linear(before)


def data_of(node: gs.Node) -> gs.Tensor:
    """The input that a `layout.Layout` follows."""
    first = node.inputs[0]
    if node.op == "Mul" and number_of(first) is not None:
        return node.inputs[1]
    return node.inputs[1] if node.op == "Add" and rank_of_constant(first) is not None else first


def is_weighted(nodes: Sequence[gs.Node]) -> bool:
    """True if a chain holds a product with a weight, or its bias."""
    return any(is_linear(node) or is_op(node, "Add") for node in nodes)


def is_linear(node: gs.Node) -> bool:
    """True for a product with a constant weight: a MatMul, or a Gemm with nothing else in it."""
    if not (is_op(node, "MatMul") or is_op(node, "Gemm")):
        return False
    ranks, attrs = [rank_of_constant(tensor) for tensor in node.inputs], node.attrs
    weight = node.inputs[1]
    if ranks[:2] != [None, 2] or weight.shape is None or weight.dtype not in _DTYPES:
        return False
    if node.op == "MatMul":
        return True
    wide = weight.shape[0 if attrs.get("transB", 0) else 1]
    plain = attrs.get("alpha", 1.0) == attrs.get("beta", 1.0) == 1.0 and not attrs.get("transA", 0)
    return plain and (len(ranks) < 3 or (ranks[2] == 1 and list(node.inputs[2].shape) == [wide]))


def rank_of_constant(tensor: gs.Tensor) -> int | None:
    """The rank of a constant, without reading its values; None for other tensors."""
    if isinstance(tensor, gs.Constant):
        return len(tensor.shape)
    values = values_of(tensor)
    return None if values is None else values.ndim


def factor_of(node: gs.Node) -> float | None:
    """The number that a Mul or Div multiplies data by, which is not 0; None for other nodes."""
    if not (is_op(node, "Mul") or is_op(node, "Div")) or len(node.inputs) != 2:
        return None
    one, other = (number_of(tensor) for tensor in node.inputs)
    if (one is None) == (other is None) or (one is not None and node.op == "Div"):
        return None
    number = one if one is not None else other
    data = node.inputs[0] if one is None else node.inputs[1]
    scalar = node.inputs[1] if one is None else node.inputs[0]
    rank = len(scalar.shape) if scalar.shape is not None else 0
    if rank and (data.shape is None or rank > len(data.shape)):
        return None  # it would raise the rank
    if number is None or not np.isfinite(number) or number == 0:
        return None
    return 1 / number if node.op == "Div" else number


def number_of(tensor: gs.Tensor, depth: int = 0) -> float | None:
    """The value of a float tensor of one element that is the same for all sizes."""
    if isinstance(tensor, gs.Constant) and any(size != 1 for size in tensor.shape):
        return None
    values, node = values_of(tensor), maker(tensor)
    if values is not None:
        return float(values.item()) if values.size == 1 and values.dtype.kind == "f" else None
    if node is None or depth > _LONGEST or tensor.dtype not in _DTYPES:
        return None
    if is_op(node, "Cast"):
        elements = elements_of(node.inputs[0])
        if elements is not None and len(elements.values) == 1:
            size = _reshaped(node.inputs[0], elements.values[0])
            return float(size) if size.is_number else None
    if not any(is_op(node, op) for op in ("Cast", "Sqrt", "Reciprocal", "Identity", "Mul", "Div")):
        return None
    numbers = [number_of(given, depth + 1) for given in node.inputs]
    known = [number for number in numbers if number is not None]
    return _computed(node.op, known) if len(known) == len(numbers) else None


def _reshaped(tensor: gs.Tensor, size: sympy.Expr) -> sympy.Expr:
    """A size of the result of a Reshape to computed sizes, which shape inference does not know."""
    while (node := maker(tensor)) is not None and not size.is_number:
        tensor = node.inputs[0]
        if is_op(node, "Shape"):
            before = maker(tensor)
            made = elements_of(before.inputs[1]) if before and is_op(before, "Reshape") else None
            names = dims_of(tensor) or []
            if made is not None and size in names and made.values[names.index(size)].is_positive:
                return made.values[names.index(size)]
    return size


def _computed(op: str, numbers: Sequence[float]) -> float | None:
    first, last = numbers[0], numbers[-1]
    if op == "Sqrt":
        return first**0.5 if first > 0 else None
    if op in ("Reciprocal", "Div"):
        return (1.0 if op == "Reciprocal" else first) / last if last else None
    return first * last if op == "Mul" else first
