"""A network output that is a network input is refused.

ONNX allows one value to be both. TensorRT has one name for a tensor: the parser of RTX 1.7
silently renames the input to ``__x``, and the engine has no input ``x``. No rewrite helps: an
Identity would have to give the output or the input another name.
"""

from __future__ import annotations

import onnx_graphsurgeon as gs

from pipeline.machine.target import FROM_10, RTX
from pipeline.passes.graph_ops import label
from pipeline.passes.infra import Change, Pass, PassResult


def run(graph: gs.Graph) -> PassResult:
    """Rewrites nothing. Refuses each such output under the name of a node that reads it, or else
    under its own name."""
    refused = []
    for tensor in graph.outputs:
        if any(tensor is given for given in graph.inputs):
            reader = next(iter(tensor.outputs), None)
            refused.append(
                Change(
                    label(reader) if reader else tensor.name,
                    reader.op if reader else "output",
                    f"the network's input {tensor.name} is also an output, and TensorRT would "
                    "rename the input: return a copy under another name (x.clone()), or drop the "
                    "output",
                )
            )
    return PassResult((), tuple(refused))


PASS = Pass(
    name="refuse_passed_through",
    run=run,
    targets=(RTX, FROM_10),
    summary="a network output that is a network input is refused, with advice",
    fault="the engine's input gets another name (__x), without a warning",
    evidence=("cases: rtx-1.7's network has no input of that name",),
)
