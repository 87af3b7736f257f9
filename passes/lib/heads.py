"""Plans how a 3-D attention, with batch times heads as its first axis, becomes 4-D."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import onnx_graphsurgeon as gs
import sympy

from pipeline.passes.graph_ops import is_op
from pipeline.passes.lib.attention import BETWEEN, Operand, Plan, Target, operand
from pipeline.passes.lib.layout import Axis, Layout, product
from pipeline.passes.lib.sizes import ChainSizes, Dims, dims_of


@dataclass(frozen=True)
class Rise:
    """How a 3-D attention becomes 4-D.

    Args:
        dims: batch, heads, length and channels of the result.
        nodes: the nodes between the products, each with its inputs (by id) that have batch times
            heads as their first axis. A plan says how to write such an input; None is for one
            whose views are not known.
        views: ids of the nodes that only change the rank.
    """

    dims: Dims
    nodes: list[tuple[gs.Node, dict[int, Plan | None]]]
    views: set[int]


def plan_rise(
    graph: gs.Graph,
    products: tuple[gs.Node, gs.Node],
    parts: tuple[Operand, Operand, Operand],
    outputs: set[int],
) -> Rise | None:
    """Plans Q, K^T and V in 4-D. None if that is not proven, or if they are not 3-D.

    Args:
        products: the product of Q and K^T, and the one with V.
        parts: Q, K^T and V. Their plans are set.
        outputs: ids of the tensors that are outputs of a graph.
    """
    q, k, v = parts
    q.plan = next(q.plans(lambda layout: _with_heads(layout, None, None)), None)
    if q.plan is not None:
        q_axes = q.plan.layout.axes
        heads, total = q_axes[0][-1].size, product(q_axes[0])
        target = functools.partial(_with_heads, heads=heads, total=total)
        k.plan = next(k.plans(target), None)
        v.plan = next(v.plans(target, scales=False), None)
        if k.plan is not None and v.plan is not None:
            dims = [product(q_axes[0][:-1]), heads, product(q_axes[1])]
            scores = [*dims, product(k.plan.layout.axes[2])]
            rise = Rise([*dims, product(v.plan.layout.axes[2])], [], set())
            if _collect(graph, products, rise, scores, target, outputs):
                return rise
    q.plan = k.plan = v.plan = None
    return None


def _with_heads(
    layout: Layout, heads: sympy.Expr | None, total: sympy.Expr | None
) -> Sequence[Axis] | None:
    """The axes in 4-D: the first one is split into batch and heads."""
    if len(layout.axes) != 3 or len(layout.axes[0]) < (2 if heads is None else 1):
        return None
    if heads is None:
        heads, total = layout.axes[0][-1].size, product(layout.axes[0])
    if not heads.is_Integer or product(layout.axes[0]) != total:
        return None
    if not layout.split_last(0, heads):
        return None
    return [layout.axes[0][:-1], layout.axes[0][-1:], *layout.axes[1:]]


def _collect(
    graph: gs.Graph,
    products: tuple[gs.Node, gs.Node],
    rise: Rise,
    dims: Dims,
    target: Target,
    outputs: set[int],
) -> bool:
    """Collects the nodes between the products. False if one of them cannot become 4-D.

    Args:
        dims: batch, heads, length of the queries and of the keys.
    """
    first, second = products
    scores = first.outputs[0]
    forms = {3: [dims[0] * dims[1], *dims[2:]], 4: list(dims)}
    sizes, ranks = ChainSizes(), {id(scores): 3}
    todo = {id(reader) for reader in scores.outputs}
    sizes.learn(scores, forms[3])
    for node in graph.nodes:
        if id(node) not in todo or node is second:
            continue
        todo.discard(id(node))
        found = {ranks[id(tensor)] for tensor in node.inputs if id(tensor) in ranks}
        if not any(is_op(node, op) for op in BETWEEN) or len(node.outputs) != 1 or len(found) != 1:
            return False
        rank, output = found.pop(), node.outputs[0]
        masks: dict[int, Plan | None] = {}
        if node.op == "Reshape":
            made = sizes.reshaped(node, forms[rank])
            rank = next((n for n, form in forms.items() if made and _equal(made, form)), 0)
            rise.views.add(id(node))
        elif not all(
            id(tensor) in ranks or tensor.is_empty() or _fits(tensor, rank, forms, target, masks)
            for tensor in node.inputs
        ):
            return False
        if not rank or id(output) in outputs:
            return False
        sizes.learn(output, forms[rank])
        ranks[id(output)] = rank
        todo |= {id(reader) for reader in output.outputs}
        rise.nodes.append((node, masks))
    whole = todo == {id(second)} and id(scores) not in outputs
    return whole and ranks.get(id(second.inputs[0])) == 3


def _fits(
    tensor: gs.Tensor,
    rank: int,
    forms: dict[int, Dims],
    target: Target,
    masks: dict[int, Plan | None],
) -> bool:
    """True if a tensor can stay as it is, or can become 4-D, which is then put into `masks`."""
    dims = dims_of(tensor)
    if dims is None or len(dims) > rank:
        return False
    if rank == 4 or len(dims) < 3 or dims[0] == 1:
        return True
    plan = next(operand(tensor, peel=False).plans(target, scales=False), None)
    masks[id(tensor)] = plan
    return plan is not None or dims[0] == forms[3][0]


def _equal(one: Dims, other: Dims) -> bool:
    return len(one) == len(other) and all(
        sympy.cancel(a - b) == 0 for a, b in zip(one, other, strict=True)
    )
