"""``einsum`` of two tensors, as a matrix product between Transposes.

torch's exporter writes ONNX's Einsum. Then the product stays float32 in half precision, and the
passes do not see that two of them with a softmax between are attention. So a product of two tensors
becomes MatMul, and one without a sum becomes Mul. Other equations stay Einsum: more tensors, a
diagonal, a sum over an axis of one tensor, or sizes that are not known to be equal.
"""

from __future__ import annotations

import math
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from onnxscript.function_libs.torch_lib.ops import core  # the exporter's own; torch 2.13

from pipeline.export.ops.axes import FLOATS
from pipeline.export.ops.sizes import Size, Value, ints, op, rank, reshaped, size

aten: Any = torch.ops.aten


@dataclass(frozen=True)
class _Operand:
    """A tensor with a label for each axis."""

    tensor: Value
    labels: str

    def sizes(self, labels: str) -> list[Size]:
        return [size(self.tensor, self.labels.index(label)) for label in labels]

    def ordered(self, labels: str) -> Value:
        """The tensor with its axes in this order."""
        return _ordered(self.tensor, self.labels, labels)


def einsum(equation: str, tensors: Sequence[Value], path: Any = None) -> Value:
    """``einsum``, as MatMul or Mul where that is the same."""
    split = _split(equation, tensors) if len(tensors) == 2 else None
    found = None if split is None else _product(*split)
    return core.aten_einsum(equation, tensors, path) if found is None else found


def _split(equation: str, tensors: Sequence[Value]) -> tuple[_Operand, _Operand, str] | None:
    """Both operands and the labels of the result; None if the equation is of another kind."""
    text = "".join(equation.split())
    inputs, arrow, result = text.partition("->")
    terms = inputs.split(",")
    if not arrow:
        once = (label for label in sorted({*inputs} - {*",."}) if inputs.count(label) == 1)
        result = ("..." if "..." in inputs else "") + "".join(once)
    if "..." in text:
        counts = {
            rank(x) - len(term) + 3 for x, term in zip(tensors, terms, strict=True) if "..." in term
        }
        if len(counts) > 1 or "..." not in result:
            return None
        free = [label for label in string.ascii_letters if label not in text]
        instead = "".join(free[: counts.pop() if counts else 0])
        terms, result = [t.replace("...", instead) for t in terms], result.replace("...", instead)
    a, b = (_Operand(x, term) for x, term in zip(tensors, terms, strict=True))
    plain = (
        all(len({*labels}) == len(labels) for labels in (a.labels, b.labels, result))
        and all(x.dtype in FLOATS and x.dtype == tensors[0].dtype for x in tensors)
        # a label of one tensor alone is summed in no product
        and {*a.labels} ^ {*b.labels} <= {*result} <= {*a.labels, *b.labels}
        and all(_equal(a, b, label) for label in {*a.labels} & {*b.labels})
    )
    return (a, b, result) if plain else None


def _equal(a: _Operand, b: _Operand, label: str) -> bool:
    """Whether the label has one size: torch repeats an axis of size 1."""
    one, other = (x.tensor.shape[x.labels.index(label)] for x in (a, b))
    return one == other and getattr(one, "value", one) is not None


def _product(a: _Operand, b: _Operand, result: str) -> Value | None:
    """The product of two operands; None if sizes of both would have to be multiplied."""
    shared = "".join(label for label in a.labels if label in b.labels and label in result)
    summed = "".join(label for label in a.labels if label in b.labels and label not in result)
    left = "".join(label for label in a.labels if label not in b.labels)
    right = "".join(label for label in b.labels if label not in a.labels)
    if not summed:
        wide = a.ordered(shared + left)
        if right:
            axes = range(len(a.labels), len(a.labels) + len(right))
            wide = op.Unsqueeze(wide, ints(*axes))
        other = b.ordered(shared + right)
        if left:
            other = op.Unsqueeze(other, ints(*range(len(shared), len(shared) + len(left))))
        return _ordered(op.Mul(wide, other), shared + left + right, result)
    if len(right) > 1 and not _whole(b.sizes(right)):
        if len(left) > 1 and not _whole(a.sizes(left)):
            return None
        a, b, left, right = b, a, right, left
    # all but the last axis of the left operand come first, where MatMul repeats the right one
    first, last = left[:-1], left[-1:]
    rows = a.ordered(first + shared + last + summed)
    columns = b.ordered(shared + summed + right)
    if not last:
        rows = op.Unsqueeze(rows, ints(len(shared)))
    if not right:
        columns = op.Unsqueeze(columns, ints(len(b.labels)))
    if len(summed) > 1:
        rows = reshaped(rows, *a.sizes(first + shared), *(a.sizes(last) or [1]), -1)
    if len(summed) > 1 or len(right) > 1:
        depth = -1 if len(summed) > 1 else b.sizes(summed)[0]
        width = b.sizes(right)[0] if len(right) == 1 else math.prod(b.sizes(right))
        columns = reshaped(columns, *b.sizes(shared), depth, width)
    found = op.MatMul(rows, columns)
    if not last:
        found = op.Squeeze(found, ints(-2))
    if not right:
        found = op.Squeeze(found, ints(-1))
    if len(right) > 1:
        found = reshaped(found, *a.sizes(first + shared + last), *b.sizes(right))
    return _ordered(found, first + shared + last + right, result)


def _ordered(x: Value, labels: str, order: str) -> Value:
    """A tensor with its axes in another order."""
    return x if labels == order else op.Transpose(x, perm=[labels.index(one) for one in order])


def _whole(sizes: Sequence[Size]) -> bool:
    return all(isinstance(one, int) for one in sizes)


TRANSLATIONS: Mapping[Any, Callable[..., Any]] = {aten.einsum.default: einsum}
