"""An additive mask in an attention selects instead of adding.

``Softmax(scores + Where(mask, 0, -3.4e38))`` is what torch's exporter writes of a boolean attention
mask. TensorRT 8.6 is silently wrong with it where the scores are of one query (decoding with a
cache): it runs them as one batch of batch * heads products, and reads the mask, which it computes
on the way, at that batch's index, so that every row but the first sees the mask of another one, or
what lies behind it. Selecting comes out right.
"""

from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs

from pipeline.passes._base import (
    BELOW_10,
    Change,
    Pass,
    PassResult,
    drop_unused,
    is_op,
    label,
    values_of,
    walk,
)
from pipeline.passes._chain import Chain

# what this is added to disappears in it, in float32, if it is below 1e22
_ALL = 1e30


def run(graph: gs.Graph) -> PassResult:
    """Rewrites ``Add(x, Where(mask, a, b))`` before a Softmax or a MatMul, a and b constants of one
    element, into ``Where(mask, x + a, x + b)``; what adds 0 is left out, and to a constant beyond
    1e30 nothing is added.

    The same to the bit, but for the sign of zeros, and for an x of more than 1e22 beside such a
    constant. Nothing is refused.
    """
    rewritten = []
    for inner, node in walk(graph):
        if not is_op(node, "Add") or not _is_weight(node):
            continue
        for scores, mask in (node.inputs, node.inputs[::-1]):
            branches = _branches(mask)
            if branches is None:
                continue
            name, where = label(node), mask.inputs[0]
            _write(inner, node, scores, where.inputs[0], branches)
            text = " or ".join(f"{b.item():g}" for b in branches)
            rewritten.append(Change(name, "Add", f"Where {where.inputs[0].name}: {text} added"))
            if not mask.outputs:
                drop_unused(graph, mask)
            break
    return PassResult(tuple(rewritten))


def _is_weight(node: gs.Node) -> bool:
    readers = node.outputs[0].outputs
    return any(is_op(reader, op) for reader in readers for op in ("Softmax", "MatMul"))


def _branches(tensor: gs.Tensor) -> list[np.ndarray] | None:
    """The two constants that a Where selects from, not both beyond `_ALL`."""
    if len(tensor.inputs) != 1 or not is_op(tensor.inputs[0], "Where"):
        return None
    branches = [values_of(branch) for branch in tensor.inputs[0].inputs[1:]]
    found = [b.reshape(()) for b in branches if b is not None and b.size == 1]
    if len(found) != 2 or found[0].dtype.kind != "f":
        return None
    return None if all(abs(b.item()) >= _ALL for b in found) else found


def _write(
    graph: gs.Graph, node: gs.Node, scores: gs.Tensor, mask: gs.Tensor, branches: list[np.ndarray]
) -> None:
    c, shape = Chain(graph, node), node.outputs[0].shape
    made: list[gs.Tensor | np.ndarray] = []
    for number, value in enumerate(branches):
        if value.item() == 0:
            made.append(scores)
        elif abs(value.item()) >= _ALL:
            made.append(value)
        else:
            short = f"added_{number}"
            made.append(
                c.op("Add", scores, value, short=short, dtype=value.dtype, shape=scores.shape)
            )
    c.op("Where", mask, *made, short="where", dtype=branches[0].dtype, shape=shape)
    c.finish()


PASS = Pass(
    name="select_additive_mask",
    run=run,
    targets=(BELOW_10,),
    summary="Softmax(x + Where(mask, 0, c)) -> Softmax(Where(mask, x, x + c)); before MatMul too",
    fault="the rows of a batch get each other's masks, where x is a product of one query",
    evidence=("TensorRT 8.6.0: Llama decoding, all rows but the first wrong; the cases",),
)
