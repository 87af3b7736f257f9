"""Nodes that compute the same from the same inputs become one.

onnx-ir's CommonSubexpressionEliminationPass does it, on the top-level graph. torch's exporter runs
the same pass. The bodies of If and Loop are left alone. If random ops would be merged, the whole
graph is left alone. Equal sizes that are computed in two ways stay separate.
"""

from __future__ import annotations

import onnx

from pipeline.graph.files import lightened, with_weights
from pipeline.machine.target import EVERY
from pipeline.passes.infra import Change, Pass, PassResult

_RANDOM = (
    "Bernoulli", "Dropout", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform",
    "RandomUniformLike",
)  # fmt: skip


def run(model: onnx.ModelProto) -> PassResult:
    """Merges duplicates; refuses nothing."""
    import onnx_ir
    from onnx_ir.passes.common import CommonSubexpressionEliminationPass

    light = lightened(model)
    result = CommonSubexpressionEliminationPass()(onnx_ir.serde.deserialize_model(light))
    if not result.modified:
        return PassResult(())
    merged = with_weights(onnx_ir.serde.serialize_model(result.model), model)
    left = {node.name for node in merged.graph.node}
    gone = [node for node in model.graph.node if node.name not in left]
    if any(node.op_type in _RANDOM for node in gone):  # onnx-ir 1.1 merges Bernoulli too
        return PassResult(())
    model.CopyFrom(merged)
    return PassResult(
        tuple(Change(n.name, n.op_type, "another node computes the same") for n in gone)
    )


PASS = Pass(
    name="merge_duplicates",
    run=run,
    level="model",
    targets=EVERY,
    clean_up=True,
    summary="nodes that compute the same from the same inputs -> one (onnx-ir's own pass)",
    fault="more layers to build",
    evidence=("exporters that read a size again for every use",),
)
