"""``CastLike`` becomes ``Cast`` to the dtype that the second input has.

TensorRT 8.6's parser looks for a plugin and finds none. Function bodies contain CastLike, since a
function does not know the dtypes of its inputs.
"""

from __future__ import annotations

import onnx
import onnx_graphsurgeon as gs

from pipeline.machine.target import BELOW_10
from pipeline.passes.infra import Pass, PassResult, Refused, each


def run(graph: gs.Graph) -> PassResult:
    """Rewrites every CastLike (opset 15 and later) if its second input's dtype is known.

    Half precision and bfloat16 are rewritten too. A cast to 8-bit floats keeps ``saturate``.
    Refused: an unknown dtype."""
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
