"""A mask times an infinite constant becomes ``Where``.

Example: ``scores + (1 - mask) * -1e9`` in half precision. Half precision cannot hold -1e9, and
torch's exporters write -inf. torch multiplies by -1e9, and gets 0 for elements that are not
masked. ONNX multiplies 0 by infinity, which is NaN for each of these elements.

Other infinite constants are left alone. ``Where(mask, scores, -inf)`` is right: with a finite
constant, a fully masked row would have numbers where torch has NaN (or 0, after its NaN guard).
``Where(mask, 0, -3.4e38)`` before a guarded softmax is torch's export of a boolean attention mask.
The graph does not show whether a model means exactly that, so the export fixes it.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import onnx_graphsurgeon as gs

from pipeline.machine.target import EVERY_READ
from pipeline.passes.graph_ops import drop_unused, is_op, values_of
from pipeline.passes.infra import Pass, PassResult, each
from pipeline.passes.lib.chain import Chain

# ops that keep the values of their first input
_MOVES = ("Identity", "Reshape", "Unsqueeze", "Squeeze", "Expand", "Transpose", "Slice", "Gather")


def run(graph: gs.Graph) -> PassResult:
    """Rewrites Mul of an infinite number and a mask.

    A mask is a boolean or integer tensor as float, of any layout; or 1 minus a mask, or a mask
    minus 1. The result equals the product wherever the product is not NaN: the sign chooses the
    infinity, and 0 stays 0. Nothing is refused.
    """

    def rewrite(inner: gs.Graph, node: gs.Node) -> str | None:
        for mask, factor in (node.inputs, node.inputs[::-1]):
            infinite, kind = _infinite(factor), _kind(mask)
            if infinite is None or kind is None:
                continue
            old = list(node.inputs)
            _write(inner, node, mask, infinite, kind)
            for tensor in old:
                if tensor.inputs and not tensor.outputs:
                    drop_unused(graph, tensor)
            return f"{infinite.item():g} where {mask.name} is not 0"
        return None

    return each(graph, "Mul", rewrite)


def _write(
    graph: gs.Graph, node: gs.Node, mask: gs.Tensor, infinite: np.ndarray, kind: str
) -> None:
    c, output = Chain(graph, node), node.outputs[0]
    dtype, shape = infinite.dtype, output.shape
    zero = np.zeros(1, dtype)
    rest: gs.Tensor | np.ndarray = zero
    if kind == "signed":
        below = c.op("Less", mask, zero, short="below", dtype=np.bool_, shape=mask.shape)
        rest = c.op("Where", below, -infinite, zero, short="below_0", dtype=dtype, shape=shape)
    above = c.op("Greater", mask, zero, short="above", dtype=np.bool_, shape=mask.shape)
    c.op("Where", above, infinite, rest, short="where", dtype=dtype, shape=shape)
    c.finish()


def _infinite(tensor: gs.Tensor) -> np.ndarray | None:
    """The constant, if it has one element, has rank 0 or 1, and is infinite."""
    values = values_of(tensor)
    if values is None or values.shape not in ((), (1,)) or values.dtype.kind != "f":
        return None
    return values.reshape(1) if np.isinf(values).all() else None


def _kind(tensor: gs.Tensor) -> Literal["boolean", "signed"] | None:
    """``boolean`` if the tensor holds only 0 and 1, ``signed`` for an integer mask, else None."""
    node = tensor.inputs[0] if len(tensor.inputs) == 1 else None
    if node is None or not node.inputs or not is_op(node, node.op):
        return None
    source = node.inputs[0]
    if node.op == "Cast":
        return _kind_cast(source)
    if node.op == "Sub" and _is_one(source):
        return _kind(node.inputs[1])
    if node.op == "Sub" and _is_one(node.inputs[1]):
        return "signed" if _kind(source) else None
    return _kind(source) if node.op in _MOVES else None


def _kind_cast(source: gs.Tensor) -> Literal["boolean", "signed"] | None:
    if source.dtype is None or isinstance(source.dtype, int):
        return None
    if source.dtype == np.bool_:
        return "boolean"
    return "signed" if np.dtype(source.dtype).kind in "iu" else _kind(source)


def _is_one(tensor: gs.Tensor) -> bool:
    values = values_of(tensor)
    return values is not None and values.size == 1 and bool((values == 1).all())


PASS = Pass(
    name="replace_mask_product",
    run=run,
    targets=EVERY_READ,
    summary="a mask times -inf -> Where",
    fault="0 times infinity is NaN: every element that is not masked becomes NaN",
    evidence=(
        "torch 2.13 writes -inf for -1e9 in a half-precision module: both of its exporters, "
        "tests/passes/test_replace_mask_product.py",
    ),
)
