"""``Elu`` after a recurrent layer becomes a choice of ``x`` and ``exp(x) - 1``.

Where TensorRT-RTX takes the sizes of an Elu from an LSTM, GRU or RNN, it gives the Elu two inputs
and stops ("There are 2 inputs. Expected 1.", or "MyelinCheckException: shape.cpp: CHECK(false)").
It builds every other activation there, and the Elu written as arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import onnx_graphsurgeon as gs

from pipeline.machine.target import Versions
from pipeline.passes.graph_ops import is_op
from pipeline.passes.infra import Pass, PassResult, Refused, each
from pipeline.passes.lib.chain import Chain

_RECURRENT = ("LSTM", "GRU", "RNN")


def run(graph: gs.Graph) -> PassResult:
    """Rewrites every Elu that depends on a recurrent layer of its own graph.

    The dtype and the values stay. Refused: an unknown dtype."""
    later = {
        id(node)
        for inner in (graph, *graph.subgraphs(recursive=True))
        for node in _after(inner, _RECURRENT)
    }

    def rewrite(inner: gs.Graph, node: gs.Node) -> str | None:
        return _rewrite(inner, node) if id(node) in later else None

    return each(graph, "Elu", rewrite)


def _after(graph: gs.Graph, ops: Sequence[str]) -> Iterator[gs.Node]:
    """The nodes of a graph that depend on a node of these ops."""
    reached: set[int] = set()  # tensors
    for node in graph.nodes:
        later = any(id(tensor) in reached for tensor in node.inputs)
        if later:
            yield node
        if later or any(is_op(node, op) for op in ops):
            reached.update(map(id, node.outputs))


def _rewrite(graph: gs.Graph, node: gs.Node) -> str:
    x = node.inputs[0]
    if not isinstance(x.dtype, np.dtype):  # bfloat16 is an int, as numpy lacks it
        raise Refused(f"the dtype of {x.name} is not known to numpy: declare it in value_info")
    alpha = float(node.attrs.get("alpha", 1.0))
    chain = Chain(graph, node)
    zero, one, factor = (chain.constant(np.array(n, x.dtype)) for n in (0, 1, alpha))
    positive = chain.op("Greater", x, zero, dtype=np.bool_, shape=x.shape)
    low = chain.op("Where", positive, zero, x, dtype=x.dtype, shape=x.shape)  # keeps NaN
    grown = chain.op("Exp", low, dtype=x.dtype, shape=x.shape)
    less = chain.op("Sub", grown, one, dtype=x.dtype, shape=x.shape)
    negative = chain.op("Mul", less, factor, dtype=x.dtype, shape=x.shape)
    chain.op("Where", positive, x, negative, dtype=x.dtype, shape=x.shape)
    chain.finish()
    return f"Where(x > 0, x, {alpha:g} * (exp(x) - 1))"


PASS = Pass(
    name="expand_elu",
    run=run,
    targets=(Versions("tensorrt_rtx"),),
    summary="Elu after a recurrent layer -> arithmetic",
    fault="it does not build ('There are 2 inputs. Expected 1.')",
    evidence=("cases: rtx-1.7 parses them and does not build",),
)
