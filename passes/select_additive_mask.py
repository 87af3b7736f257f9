"""An additive mask in an attention selects instead of adding.

``Softmax(scores + Where(mask, 0, -3.4e38))`` is what torch's exporter writes of a boolean attention
mask. TensorRT 8.6 is silently wrong with it where the scores are of one query (decoding with a
cache): it runs them as one batch of batch * heads products, and reads the mask, which it computes
on the way, at that batch's index, so that every row but the first sees the mask of another one, or
what lies behind it. Selecting comes out right.
"""

from __future__ import annotations

from dataclasses import dataclass

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
# move values, whatever their type
_MOVES = ("Identity", "Unsqueeze", "Squeeze", "Slice", "Reshape", "Transpose", "Expand")


def run(graph: gs.Graph) -> PassResult:
    """Rewrites ``Add(x, Where(mask, a, b))`` before a Softmax or a MatMul, a and b constants of one
    element, into ``Where(mask, x + a, x + b)``; what adds 0 is left out, and to a constant beyond
    1e30 nothing is added. What moves the Where's result on its way to the Add (a Slice, an
    Unsqueeze) moves the mask instead; a Cast before the Softmax is looked through.

    The same to the bit, but for the sign of zeros, and for an x of more than 1e22 beside such a
    constant. Nothing is refused.
    """
    rewritten = []
    for inner, node in walk(graph):
        if not is_op(node, "Add") or not _is_weight(node):
            continue
        for scores, added in (node.inputs, node.inputs[::-1]):
            found = _find(added)
            if found is None:
                continue
            name = label(node)
            _write(inner, node, scores, found)
            text = " or ".join(f"{b.item():g}" for b in found.branches)
            rewritten.append(Change(name, "Add", f"Where {found.mask.name}: {text} added"))
            if not added.outputs:
                drop_unused(graph, added)
            break
    return PassResult(tuple(rewritten))


def _is_weight(node: gs.Node) -> bool:
    readers = list(node.outputs[0].outputs)
    for reader in list(readers):
        if is_op(reader, "Cast"):
            readers += reader.outputs[0].outputs
    return any(is_op(reader, op) for reader in readers for op in ("Softmax", "MatMul"))


@dataclass(frozen=True)
class _Added:
    """A Where of two constants, and the nodes that move its result, the last first."""

    mask: gs.Tensor
    branches: list[np.ndarray]
    moves: list[gs.Node]


def _find(tensor: gs.Tensor) -> _Added | None:
    """The Where that makes a tensor; not one with both constants beyond `_ALL`."""
    dtype, moves = tensor.dtype, []
    while len(tensor.inputs) == 1 and (node := tensor.inputs[0]).op in (*_MOVES, "Cast"):
        if not is_op(node, node.op):
            return None
        if node.op in _MOVES:
            moves.append(node)
        elif dtype is None or node.inputs[0].dtype != dtype:  # one that rounds
            return None
        tensor = node.inputs[0]
    if len(tensor.inputs) != 1 or not is_op(tensor.inputs[0], "Where"):
        return None
    where = tensor.inputs[0]
    branches = [values_of(branch) for branch in where.inputs[1:]]
    found = [b.reshape(()) for b in branches if b is not None and b.size == 1]
    if len(found) != 2 or found[0].dtype.kind != "f":
        return None
    if all(abs(b.item()) >= _ALL for b in found):
        return None
    return _Added(where.inputs[0], found, moves)


def _write(graph: gs.Graph, node: gs.Node, scores: gs.Tensor, found: _Added) -> None:
    c, shape, mask = Chain(graph, node), node.outputs[0].shape, found.mask
    for move in reversed(found.moves):
        mask = c.op(
            move.op, mask, *move.inputs[1:], short=f"mask_{move.op.lower()}", dtype=np.bool_,
            shape=move.outputs[0].shape, **move.attrs,
        )  # fmt: skip
    made: list[gs.Tensor | np.ndarray] = []
    for value in found.branches:
        if value.item() == 0:
            made.append(scores)
        elif abs(value.item()) >= _ALL:
            made.append(value)
        else:
            made.append(
                c.op("Add", scores, value, short="added", dtype=value.dtype, shape=scores.shape)
            )
    c.op("Where", mask, *made, short="where", dtype=found.branches[0].dtype, shape=shape)
    c.finish()


PASS = Pass(
    name="select_additive_mask",
    run=run,
    targets=(BELOW_10,),
    summary="Softmax(x + Where(mask, 0, c)) -> Softmax(Where(mask, x, x + c)); before MatMul too",
    fault="the rows of a batch get each other's masks, where x is a product of one query",
    evidence=("TensorRT 8.6.0: Llama decoding, all rows but the first wrong; the cases",),
)
