"""Finds attention in a graph: a product, a softmax, and the product with the values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import onnx_graphsurgeon as gs

from pipeline.passes.graph_ops import is_op, maker, values_of
from pipeline.passes.lib.layout import Axis, Layout, Step
from pipeline.passes.lib.sizes import dims_of
from pipeline.passes.lib.views import chain_to, data_of, factor_of, is_weighted

# ops between the scores and the softmax, and between the softmax and the second product
BETWEEN = (
    "Add", "Sub", "Mul", "Div", "Where", "IsNaN", "Cast", "Identity", "Reshape", "Min", "Max",
    "Clip", "Tanh", "Softmax",
)  # fmt: skip
Target: TypeAlias = Callable[[Layout], Sequence[Axis] | None]
_MOST = 24  # tensors on the way from the softmax to a product
_DTYPES = (np.dtype(np.float32), np.dtype(np.float16))


@dataclass(frozen=True)
class Attention:
    """The product of Q and K^T, the softmax, and the product with V."""

    scores: gs.Node
    softmax: gs.Node
    weighted: gs.Node


def find(softmax: gs.Node) -> Attention | None:
    """The attention that a Softmax over the last axis belongs to, in float32 or float16.

    None if its scores are not the result of one product of computed tensors, or if not exactly one
    product reads its result.
    """
    rank = len(softmax.inputs[0].shape or ())
    if not rank or softmax.attrs.get("axis", -1) not in (-1, rank - 1):
        return None
    above = _products(softmax, lambda node: [m for t in node.inputs for m in t.inputs])
    below = _products(softmax, lambda node: [r for t in node.outputs for r in t.outputs])
    first = [n for n in above if all(values_of(tensor) is None for tensor in n.inputs)]
    second = [n for n in below if all(values_of(tensor) is None for tensor in n.inputs)]
    if len(first) != 1 or len(second) != 1 or first[0] is second[0]:
        return None
    given = (*first[0].inputs, second[0].inputs[1])
    if any(t.dtype not in _DTYPES or t.shape is None or len(t.shape) < 3 for t in given):
        return None
    return Attention(first[0], softmax, second[0])


def _products(start: gs.Node, next_to: Callable[[gs.Node], list[gs.Node]]) -> list[gs.Node]:
    """The MatMuls that are reached through ops of `BETWEEN`."""
    found: list[gs.Node] = []
    todo, seen = [start], {id(start)}
    while todo and len(seen) < 2 * _MOST:
        for node in next_to(todo.pop()):
            if id(node) in seen:
                continue
            seen.add(id(node))
            if is_op(node, "MatMul"):
                found.append(node)
            elif any(is_op(node, op) for op in BETWEEN) and node.op != "Softmax":
                todo.append(node)
    return found


@dataclass(frozen=True)
class Plan:
    """How an operand is written anew: its base, the layout, and the nodes that make it."""

    start: int
    base: gs.Tensor
    layout: Layout
    steps: Sequence[Step]

    @property
    def nodes(self) -> int:
        return sum(step.nodes for step in self.steps)


@dataclass
class Operand:
    """Q, K^T or V: the views that lead to it.

    Args:
        tensor: what the product reads.
        source: the same without the numbers that it is multiplied by last.
        scale: the product of these numbers.
        peeled: the nodes that multiply by them.
        chain: the nodes before the source, with their outputs.
        plan: how to write it anew, if anything is gained.
    """

    tensor: gs.Tensor
    source: gs.Tensor
    scale: float
    peeled: list[gs.Node]
    chain: list[tuple[gs.Node, gs.Tensor]]
    plan: Plan | None = None

    @property
    def inner_scale(self) -> float:
        """The numbers inside of the chain that the plan leaves out."""
        return 1.0 if self.plan is None else self.plan.layout.scale

    def plans(self, target: Target, scales: bool = True) -> Iterator[Plan]:
        """Ways to write the operand, from the longest to the shortest.

        A product with a weight is written anew only if a Transpose is before it.

        Args:
            target: the axes to make; None if they are not proven.
            scales: whether the plan may leave out numbers that the chain multiplies by.
        """
        for start in range(len(self.chain) + 1):
            nodes = [node for node, _ in self.chain[start:]]
            if is_weighted(nodes) and not is_op(nodes[0], "Transpose"):
                continue
            base = data_of(nodes[0]) if nodes else self.source
            dims = dims_of(base)
            if dims is None:
                continue
            layout = Layout(dims)
            if not all(layout.follow(*pair) for pair in self.chain[start:]):
                continue
            if layout.scale != 1.0 and not scales:
                continue
            axes = target(layout)
            steps = None if axes is None else layout.steps(axes)
            if steps is not None:
                yield Plan(start, base, layout, steps)


def operand(tensor: gs.Tensor, peel: bool = True) -> Operand:
    """The operand that a product reads. Its last numbers are split off if `peel` is set."""
    source, scale, peeled = tensor, 1.0, []
    while peel and (node := maker(source)) is not None and (number := factor_of(node)) is not None:
        scale *= number
        peeled.append(node)
        source = data_of(node)
    return Operand(tensor, source, scale, peeled, chain_to(source))


def saved(
    parts: Sequence[tuple[Operand, Plan]], readers: Sequence[gs.Node], outputs: set[int]
) -> int:
    """How many nodes of the chains plans save.

    Args:
        parts: operands, each with a plan.
        readers: the products that read the operands.
        outputs: ids of tensors that stay.
    """
    nodes = [node for part, plan in parts for node, _ in part.chain[plan.start :]]
    todo = [*nodes, *(node for part, _ in parts for node in part.peeled)]
    gone = {id(node) for node in readers}
    before = -1
    while len(gone) != before:
        before = len(gone)
        for node in todo:
            used = [r for t in node.outputs for r in t.outputs if not is_op(r, "Shape")]
            kept = any(id(tensor) in outputs for tensor in node.outputs)
            if not kept and all(id(reader) in gone for reader in used):
                gone.add(id(node))
    return len({id(node) for node in nodes} & gone) - sum(plan.nodes for _, plan in parts)
