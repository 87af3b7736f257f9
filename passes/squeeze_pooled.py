"""A ``Reshape`` that drops the sizes of 1 behind the channels becomes a ``Squeeze``.

A classifier pools its image to ``[n, c, 1, 1]`` and flattens it to ``[n, c]`` for its last layer.
torch's exporter writes a Reshape to ``[-1, c]``. With it, TensorRT 8.6 fuses some residual
additions far before it with another of their two convolutions, and gets slower kernels. Why this
node decides is not known.
"""

from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs

from pipeline.machine.target import BELOW_10
from pipeline.passes.graph_ops import constant, label, values_of
from pipeline.passes.infra import Pass, PassResult, each


def run(graph: gs.Graph) -> PassResult:
    """Rewrites every Reshape from ``[n, c, 1, ...]`` to ``[n, c]``, from opset 13 on.

    The constant shape must say that it keeps n and c, by the same number or by ``0``. n may be
    ``-1`` beside such a c, and c may be ``-1`` beside a ``0``. Values do not change. Other forms
    are left alone, and nothing is refused.
    """
    if graph.opset < 13:  # the axes of Squeeze are an attribute
        return PassResult(())
    return each(graph, "Reshape", _rewrite)


def _rewrite(_: gs.Graph, node: gs.Node) -> str | None:
    data, target = node.inputs[0], values_of(node.inputs[1])
    if data.shape is None or len(data.shape) < 3 or target is None or target.shape != (2,):
        return None
    copied = None if node.attrs.get("allowzero", 0) else 0
    rows, columns = target.tolist()
    if any(one != 1 for one in data.shape[2:]):
        return None
    counted = rows in (data.shape[0], copied, -1) and columns in (data.shape[1], copied)
    # Not [1, -1]: if the file states a batch of 1 that is not true, this would hide it.
    if not counted and (rows, columns) != (copied, -1):
        return None
    axes = list(range(2, len(data.shape)))
    node.op = "Squeeze"
    node.attrs.clear()
    node.inputs[1] = constant(f"{label(node)}/axes", np.array(axes, np.int64))
    return f"Squeeze of axes {axes}"


PASS = Pass(
    name="squeeze_pooled",
    run=run,
    targets=(BELOW_10,),
    clean_up=True,
    summary="Reshape from [n, c, 1, 1] to [n, c] -> Squeeze",
    fault="residual additions are fused with another convolution, and large ones get slow kernels",
    evidence=(
        "TensorRT 8.6.0 on an H200, ResNet-18 in tf32, two builds each: batch 1 takes 0.28 ms, "
        "against 0.31 with the Reshape (docs/results/engines.md)",
    ),
)
