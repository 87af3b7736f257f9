"""A ``DequantizeLinear`` of an int32 constant becomes the float constant that it gives.

onnxruntime.quantization stores each bias as int32, with the scale of input times weight. TensorRT
dequantises 8-bit values and smaller ones only. Weights stay quantised.
"""

from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs

from pipeline.machine.target import BELOW_10, RTX, Versions
from pipeline.passes.graph_ops import values_of
from pipeline.passes.infra import Pass, PassResult, Refused, each


def run(graph: gs.Graph) -> PassResult:
    """Folds every DequantizeLinear whose input is int32.

    The scale is a float32 constant, one for the tensor or one for each channel. Refused: an input
    or a scale that is computed, other dtypes of the scale, scales by blocks, and a result that is
    an output of the graph."""
    return each(graph, "DequantizeLinear", _fold)


def _fold(graph: gs.Graph, node: gs.Node) -> str | None:
    if node.inputs[0].dtype != np.int32:
        return None
    values, scale = values_of(node.inputs[0]), values_of(node.inputs[1])
    zero = values_of(node.inputs[2]) if len(node.inputs) > 2 else np.zeros((), np.int32)
    if values is None or scale is None or zero is None:
        raise Refused(
            "TensorRT cannot dequantise int32: multiply Cast(x) by the scale instead, or use int8"
        )
    if scale.dtype != np.float32 or scale.ndim > 1 or int(node.attrs.get("block_size", 0)):
        raise Refused("a scale that is not float32, or not one for each channel, cannot be folded")
    if any(output is node.outputs[0] for output in graph.outputs):
        raise Refused("its result is an output of the graph: put the float values there instead")
    if scale.ndim == 1 and scale.size > 1:
        column = [1] * values.ndim
        column[int(node.attrs.get("axis", 1)) if values.ndim > 1 else 0] = -1
        scale, zero = scale.reshape(column), np.reshape(zero, column if zero.size > 1 else ())
    else:
        scale, zero = scale.reshape(()), zero.reshape(())
    folded = (values - zero).astype(np.float32) * scale
    output = node.outputs[0]
    node.outputs.clear()
    node.inputs.clear()
    del graph.nodes[next(i for i, other in enumerate(graph.nodes) if other is node)]
    output.to_constant(np.asarray(folded, np.float32))
    return "folded into float32: TensorRT keeps a bias in float"


PASS = Pass(
    name="dequantize_constants",
    run=run,
    targets=(RTX, BELOW_10, Versions("tensorrt", since=(10,), basis="read")),
    summary="DequantizeLinear of an int32 constant -> a float32 constant",
    fault="the parser refuses the int32 input",
    evidence=(
        "cases: rtx-1.7 and TensorRT 8.6.0 on an H200 do not parse it",
        "onnx-tensorrt docs/operators.md: DequantizeLinear of 8-bit and smaller types only",
    ),
)
