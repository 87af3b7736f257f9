"""``CastLike`` becomes ``Cast`` to the dtype that the second input has.

TensorRT 8.6's parser takes it for a plugin that it does not find. Function bodies are written
with it, since a function does not know the types that it is called with.
"""

from __future__ import annotations

import onnx
import onnx_graphsurgeon as gs

from pipeline.machine.target import BELOW_10
from pipeline.passes.infra import Pass, PassResult, Refused, each


def run(graph: gs.Graph) -> PassResult:
    """Rewrites every CastLike (opset 15 and later) whose second input's dtype is known, also in
    half precision and bfloat16; refuses the others. A cast to 8-bit floats keeps ``saturate``."""
    return each(graph, "CastLike", _rewrite)


def _rewrite(_: gs.Graph, node: gs.Node) -> str:
    dtype = node.inputs[1].dtype
    if dtype is None:
        raise Refused(f"the dtype of {node.inputs[1].name} is not known: declare it in value_info")
    to = dtype if isinstance(dtype, int) else onnx.helper.np_dtype_to_tensor_dtype(dtype)
    node.op, node.inputs = "Cast", node.inputs[:1]
    node.attrs["to"] = int(to)
    return f"Cast to {onnx.TensorProto.DataType.Name(int(to))}"


PASS = Pass(
    name="replace_cast_like",
    run=run,
    targets=(BELOW_10,),
    summary="CastLike -> Cast to a dtype",
    fault="it does not parse: the parser looks for a plugin and finds none",
    evidence=("TensorRT 8.6.0 on an H200: RAFT's correlation lookup, inlined, and the cases",),
)
