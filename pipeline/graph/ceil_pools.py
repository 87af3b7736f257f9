"""True sizes of pools with ``ceil_mode``, for whoever infers shapes.

ONNX's shape inference below opset 22, and ONNX Runtime's, count a last window that starts in the
padding; running such a pool does not (https://github.com/onnx/onnx/pull/5741). `pad_ceil_pools`
writes it as a pool that rounds down, whose sizes everybody infers rightly.
"""

from __future__ import annotations

import onnx

from pipeline.graph.files import nodes_of


def with_true_pools(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model, or a copy whose ceil-mode pools are written so that their sizes are inferred."""
    if not any(a.name == "ceil_mode" and a.i for n in nodes_of(model.graph) for a in n.attribute):
        return model
    import onnx_graphsurgeon as gs

    from pipeline.passes import pad_ceil_pools

    graph = gs.import_onnx(model)
    pad_ceil_pools.run(graph)
    copy: onnx.ModelProto = gs.export_onnx(graph)
    return copy
