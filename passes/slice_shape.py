"""``Shape`` with ``start`` or ``end`` (opset 15 and later) becomes ``Shape`` and ``Slice``.

torch's exporter writes ``Shape(start=2, end=3)`` for one size of a tensor. TensorRT 8.6's parser
ignores the two attributes and reads the whole shape. Four such sizes in a Concat then have length
16, not 4. The network fails far from the cause: ``Resize ... requires second input to be 1D shape
tensor with length (12)`` (TensorRT 8.6.0).

The ONNX standard counts negative values from the back, clamps both to 0..rank, and returns an
empty result if start >= end. ``Slice`` of the 1-D shape does the same. So the values are clamped
if the rank is known, and used unchanged otherwise.
"""

from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs

from pipeline.machine.target import BELOW_10
from pipeline.passes.graph_ops import constant, label, replace
from pipeline.passes.infra import Pass, PassResult, each

# "to the end" in Slice, as the ONNX standard writes it
_END = int(np.iinfo(np.int64).max)


def run(graph: gs.Graph) -> PassResult:
    """Rewrites every ``Shape`` that has ``start`` or ``end``; refuses none.

    The result stays int64 and 1-D. If the two attributes select the whole shape, they are dropped.
    """
    return each(graph, "Shape", _rewrite)


def _rewrite(graph: gs.Graph, node: gs.Node) -> str | None:
    if "start" not in node.attrs and "end" not in node.attrs:
        return None
    start = int(node.attrs.pop("start", 0))
    end = int(node.attrs.pop("end", _END))
    data = node.inputs[0]
    rank = None if data.shape is None else len(data.shape)
    if rank is not None:
        start, end = _clamp(start, rank), _clamp(end, rank)
    if start == 0 and end == (_END if rank is None else rank):
        return "start and end dropped, since they select the whole shape"
    name = label(node)
    whole = gs.Variable(f"{name}/whole", np.int64, None if rank is None else [rank])
    bounds = [
        constant(f"{name}/{word}", np.array([value], np.int64))
        for word, value in (("starts", start), ("ends", end), ("axes", 0))
    ]
    replace(
        graph,
        node,
        [
            gs.Node("Shape", f"{name}/whole", dict(node.attrs), [data], [whole]),
            gs.Node("Slice", f"{name}/slice", {}, [whole, *bounds]),
        ],
    )
    return f"Shape, then Slice from {start} to {'the end' if end == _END else end}"


def _clamp(value: int, rank: int) -> int:
    return min(max(value + rank if value < 0 else value, 0), rank)


PASS = Pass(
    name="slice_shape",
    run=run,
    targets=(BELOW_10,),
    summary="Shape with start or end -> Shape, Slice",
    fault="TensorRT reads the whole shape; sizes computed from it are wrong, and most builds fail",
    evidence=(
        "TensorRT 8.6.0 reads the whole shape: 'Resize ... requires second input to be 1D shape "
        "tensor with length (12)' on RAFT-small",
    ),
)
