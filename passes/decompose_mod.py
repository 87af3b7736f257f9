"""``Mod`` of sizes becomes ``Where(Mod(-a, k) == 0, 0, k - Mod(-a, k))``.

TensorRT computes ``Mod(a, k)`` as ``a - k * floor(a / k)``. That is right, also for negative
numbers. But for a range of sizes it bounds each part on its own: for ``h`` in 135..2160,
``h % 8`` seems to go down to ``135 - 8 * 270``. A tensor padded by ``-h % 8`` then seems to have
a negative size. A Resize to that size fails in the builder: ``Resize shape dims should be
non-negative, but shape[2] is negative``. This happens for any ``h % k`` in a size. TensorRT does
not look into the Where that this pass writes, and both of its branches are simple.

Both forms give the same integer for every a and every k except 0, whatever their signs. The
exception is a = -2**63, whose negative does not exist in int64.
"""

from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs

from pipeline.machine.target import FROM_10, RTX
from pipeline.passes.graph_ops import is_op, values_of
from pipeline.passes.infra import Pass, PassResult, each
from pipeline.passes.lib.chain import Chain

_INTEGERS = (np.int32, np.int64)
_MOST = 64  # nodes between a Mod and the Shape that it comes from


def run(graph: gs.Graph) -> PassResult:
    """Rewrites every integer Mod (fmod=0) of rank 0 or 1 that is computed from a Shape or Size.

    Refuses none. Mod of data, and with fmod=1, is left alone. So is the place at which torch.roll
    cuts a tensor in two: with a Where there, TensorRT-RTX 1.7.1 fails at torchvision's Swin3D.
    """

    def rewrite(inner: gs.Graph, node: gs.Node) -> str | None:
        if node.attrs.get("fmod", 0) or not _of_sizes(node) or _is_done(node) or _turns(node):
            return None
        _rewrite(inner, node)
        return "Where(m == 0, 0, k - m) with m = Mod(-a, k)"

    return each(graph, "Mod", rewrite)


def _of_sizes(node: gs.Node) -> bool:
    """True if the node's inputs are integers computed from a Shape or Size, through nodes of rank
    0 or 1."""
    todo, seen = [node], {id(node)}
    while todo and len(seen) < _MOST:
        for tensor in todo.pop().inputs:
            if tensor.shape is not None and len(tensor.shape) > 1:
                continue
            for maker in tensor.inputs:
                if is_op(maker, "Shape") or is_op(maker, "Size"):
                    return True
                if id(maker) not in seen:
                    seen.add(id(maker))
                    todo.append(maker)
    return False


def _turns(node: gs.Node) -> bool:
    """True if the remainder only cuts a tensor in two, as in torch.roll, and is not a size."""
    place, readers = node.outputs[0], node.outputs[0].outputs
    if len(readers) != 2 or not all(is_op(reader, "Slice") for reader in readers):
        return False
    starts, ends = ([slot.inputs[n] is place for slot in readers] for n in (1, 2))
    same = readers[0].inputs[0] is readers[1].inputs[0] is not place
    return same and sum(starts) == 1 and ends == starts[::-1]


def _is_done(node: gs.Node) -> bool:
    """True if only such a Where reads the remainder: the node was rewritten before."""
    readers = node.outputs[0].outputs
    if sorted(reader.op for reader in readers) != ["Equal", "Sub"]:
        return False
    equal, sub = sorted(readers, key=lambda reader: str(reader.op))
    zero = next((values_of(t) for t in equal.inputs if t is not node.outputs[0]), None)
    wheres = [reader for output in (equal.outputs[0], sub.outputs[0]) for reader in output.outputs]
    return (
        zero is not None
        and not np.any(zero)
        and sub.inputs[1] is node.outputs[0]
        and sub.inputs[0] is node.inputs[1]
        and len(wheres) == 2
        and wheres[0] is wheres[1]
        and wheres[0].op == "Where"
    )


def _rewrite(graph: gs.Graph, node: gs.Node) -> None:
    dividend, divisor = node.inputs
    dtype = next((t.dtype for t in (*node.outputs, *node.inputs) if t.dtype in _INTEGERS), np.int64)
    shape = node.outputs[0].shape
    chain = Chain(graph, node)
    if len(dividend.inputs) == 1 and is_op(dividend.inputs[0], "Neg"):
        negative = dividend.inputs[0].inputs[0]
    else:
        negative = chain.op("Neg", dividend, dtype=dtype, shape=dividend.shape)
    rest = chain.op("Mod", negative, divisor, dtype=dtype, shape=shape)
    zero = gs.Constant(f"{chain.name}/zero", np.zeros((), dtype))
    even = chain.op("Equal", rest, zero, dtype=np.bool_, shape=shape)
    other = chain.op("Sub", divisor, rest, dtype=dtype, shape=shape)
    chain.finish(chain.op("Where", even, zero, other, dtype=dtype, shape=shape))


PASS = Pass(
    name="decompose_mod",
    run=run,
    targets=(RTX, FROM_10),
    summary="Mod of sizes -> Where(m == 0, 0, k - m) with m = Mod(-a, k)",
    fault="the builder concludes that a size with h % k can be negative, and fails",
    evidence=(
        "tensorrt-rtx 1.7.1: 'Resize shape dims should be non-negative, but shape[2] is negative' "
        "for each of 8 tried forms of h % k in a Resize's size, over wide ranges of h",
    ),
)
