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
    Unsqueeze) moves the mask instead; a Cast before the Softmax is looked through. Of a sum of
    masks, ``x + (m + n)``, each is selected: ``(x + m) + n``.

    The same to the bit, but for the sign of zeros, for an x of more than 1e22 beside a constant
    beyond 1e30, and for the rounding of such sums. Nothing is refused.
    """
    rewritten = []
    for inner, node in walk(graph):
        if not is_op(node, "Add") or not _is_weight(node):
            continue
        for scores, added in (node.inputs, node.inputs[::-1]):
            terms = [(term, _find(term)) for term in _terms(added)]
            found = [where for _, where in terms if where is not None]
            if not found:
                continue
            name = label(node)
            _write(inner, node, scores, [t for t, where in terms if where is None], found)
            text = "; ".join(
                f"{where.mask.name}: {' or '.join(f'{b.item():g}' for b in where.branches)}"
                for where in found
            )
            rewritten.append(Change(name, "Add", f"Where {text} added"))
            if not added.outputs:
                drop_unused(graph, added)
            break
    return PassResult(tuple(rewritten))


def _terms(tensor: gs.Tensor) -> list[gs.Tensor]:
    """What a tensor is the sum of, in order; itself if it is no sum, or holds no mask."""
    source = _uncast(tensor)
    if len(source.inputs) != 1 or not is_op(source.inputs[0], "Add"):
        return [tensor]
    terms = [term for part in source.inputs[0].inputs for term in _terms(part)]
    return terms if any(_find(term) for term in terms) else [tensor]


def _uncast(tensor: gs.Tensor) -> gs.Tensor:
    """What it is before Casts to the type that it has already."""
    while len(tensor.inputs) == 1 and is_op(tensor.inputs[0], "Cast"):
        source = tensor.inputs[0].inputs[0]
        if tensor.dtype is None or source.dtype != tensor.dtype:
            break
        tensor = source
    return tensor


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
    moves = []
    tensor = _uncast(tensor)
    while len(tensor.inputs) == 1 and any(is_op(tensor.inputs[0], op) for op in _MOVES):
        moves.append(tensor.inputs[0])
        tensor = _uncast(tensor.inputs[0].inputs[0])
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


def _write(
    graph: gs.Graph, node: gs.Node, x: gs.Tensor, others: list[gs.Tensor], found: list[_Added]
) -> None:
    c, dtype = Chain(graph, node), found[0].branches[0].dtype
    for term in others:
        x = c.op("Add", x, term, short="sum", dtype=dtype)
    for where in found:
        mask = where.mask
        for move in reversed(where.moves):
            mask = c.op(
                move.op, mask, *move.inputs[1:], short=f"mask_{move.op.lower()}", dtype=np.bool_,
                shape=move.outputs[0].shape, **move.attrs,
            )  # fmt: skip
        made: list[gs.Tensor | np.ndarray] = []
        for value in where.branches:
            if value.item() == 0:
                made.append(x)
            elif abs(value.item()) >= _ALL and len(found) == 1:
                made.append(value)
            else:  # two of the lowest floats make -inf
                made.append(c.op("Add", x, value, short="added", dtype=dtype, shape=x.shape))
        x = c.op("Where", mask, *made, short="where", dtype=dtype)
    c.finish()


PASS = Pass(
    name="select_additive_mask",
    run=run,
    targets=(BELOW_10,),
    summary="Softmax(x + Where(mask, 0, c)) -> Softmax(Where(mask, x, x + c)); before MatMul too",
    fault="the rows of a batch get each other's masks, where x is a product of one query",
    evidence=("TensorRT 8.6.0: Llama decoding, all rows but the first wrong; the cases",),
)
