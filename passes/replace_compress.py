"""``Compress`` with a constant condition becomes ``Gather``.

No version of onnx-tensorrt supports Compress (its docs/operators.md). With a computed condition,
the size of the result depends on the data: such nodes are refused.
"""

from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs

from pipeline.machine.target import EVERY
from pipeline.passes.graph_ops import drop_unused, values_of
from pipeline.passes.infra import Pass, PassResult, Refused, each
from pipeline.passes.lib.chain import Chain


def run(graph: gs.Graph) -> PassResult:
    """Rewrites Compress with or without an axis. Sizes may be dynamic, and the condition may be
    shorter than its axis, as the standard allows."""

    def rewrite(inner: gs.Graph, node: gs.Node) -> str:
        condition = values_of(node.inputs[1])
        if condition is None:
            raise Refused(
                f"the size of its result depends on the data of {node.inputs[1].name}, and "
                "TensorRT has no Compress. In the model, compute on every element and choose with "
                "torch.where, or take a fixed number of elements with topk"
            )
        data, axis, output = node.inputs[0], node.attrs.get("axis"), node.outputs[0]
        old = list(node.inputs)
        c = Chain(inner, node)
        if axis is None:
            data = c.op("Reshape", data, np.array([-1]), short="flat", dtype=output.dtype)
        places = np.flatnonzero(condition).astype(np.int64)
        c.op("Gather", data, places, dtype=output.dtype, shape=output.shape, axis=axis or 0)
        c.finish()
        for tensor in old:
            if tensor.inputs and not tensor.outputs:
                drop_unused(graph, tensor)
        return f"Gather of {len(places)} along axis {axis or 0}"

    return each(graph, "Compress", rewrite)


PASS = Pass(
    name="replace_compress",
    run=run,
    targets=EVERY,
    summary="Compress with a constant condition -> Gather",
    fault="it does not parse: TensorRT has no Compress",
    evidence=("https://github.com/onnx/onnx-tensorrt/blob/main/docs/operators.md",),
)
