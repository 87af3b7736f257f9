"""``InstanceNormalization`` becomes mean, variance, division, scale and bias in float32.

TensorRT 8.6's parser gives InstanceNormalization to a cuDNN plugin. The plugin is often missing,
and its fp16 form overflows (NVIDIA/TensorRT#2691, #2869, #2338).

Both means are written as ``GlobalAveragePool``, not as ReduceMean. From opset 18 ReduceMean has
its axes as an input, which TensorRT 8.6 silently ignores: it reduces over all axes.
GlobalAveragePool is the same in every opset. onnx-tensorrt reduces it over all axes except N and
C, for 1-D to 3-D images (``globalPoolingHelper`` in onnx2trt_utils.cpp).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from pipeline.machine.target import Versions
from pipeline.passes.graph_ops import values_of
from pipeline.passes.infra import Pass, PassResult, Refused, each
from pipeline.passes.lib.chain import Chain


def run(graph: gs.Graph) -> PassResult:
    """Rewrites every InstanceNormalization over 1-D to 3-D images ``(N, C, spatial...)``.

    Half-precision inputs are computed in float32 and cast back. Scale and bias have the shape
    ``(C,)`` and may be constants or computed. Refused: an unknown rank or dtype, no spatial axis,
    more than three, and a spatial size that is always 1.
    """
    return each(graph, "InstanceNormalization", _rewrite)


def _rewrite(graph: gs.Graph, node: gs.Node) -> str:
    data, scale, bias = node.inputs
    output = node.outputs[0]
    shape = data.shape if data.shape is not None else output.shape
    if shape is None:
        raise Refused(f"the rank of {data.name} is not known: declare it in value_info")
    spatial = len(shape) - 2
    if not 1 <= spatial <= 3:
        raise Refused(f"{data.name} has {spatial} spatial axes: reshape it to 1 to 3")
    if all(size == 1 for size in shape[2:]):
        raise Refused(
            f"{data.name} has one value per channel, so its variance is 0 and the output is "
            "the bias: use a larger input, or remove the norm"
        )
    dtype = next((t.dtype for t in (data, output, scale, bias) if t.dtype is not None), None)
    if dtype is None:
        raise Refused(f"the dtype of {data.name} is not known: declare it in value_info")
    work = np.float64 if dtype == np.float64 else np.float32
    cast = dtype != work
    chain = Chain(graph, node)

    def op(op: str, short: str, *inputs: gs.Tensor, sizes: list[Any] = shape) -> gs.Variable:
        made: gs.Variable = chain.op(op, *inputs, short=short, dtype=work, shape=sizes)
        return made

    x = data
    if cast:
        x = chain.cast(data, work, "widened")
        x.shape = shape
    one = [*shape[:2], *[1] * spatial]
    mean = op("GlobalAveragePool", "mean", x, sizes=one)
    centred = op("Sub", "centred", x, mean)
    squared = op("Mul", "squared", centred, centred)
    variance = op("GlobalAveragePool", "variance", squared, sizes=one)
    epsilon = chain.constant(np.array(node.attrs.get("epsilon", 1e-5), work), "epsilon")
    deviation = op(
        "Sqrt", "deviation", op("Add", "add_epsilon", variance, epsilon, sizes=one), sizes=one
    )
    normal = op("Div", "normal", centred, deviation)
    gain = _column(chain, "scale", scale, spatial, work)
    shift = _column(chain, "bias", bias, spatial, work)
    y = op("Add", "biased", op("Mul", "scaled", normal, gain), shift)
    chain.finish(chain.cast(y, dtype, "narrowed") if cast else y)
    words = f"mean and variance over {spatial} axes in {np.dtype(work).name}"
    return f"{words}, cast back" if cast else words


def _column(chain: Chain, short: str, tensor: gs.Tensor, spatial: int, work: Any) -> gs.Tensor:
    """Scale or bias of shape (C,) as (C, 1, ...), in the dtype of the computation."""
    values = values_of(tensor)
    if values is not None:
        return chain.constant(values.astype(work).reshape(-1, *[1] * spatial), short)
    axes = list(range(1, spatial + 1))
    # from opset 13 the axes are an input; TensorRT 8.6 needs them as an initializer
    attrs: dict[str, Any] = {"axes": axes} if chain.graph.opset < 13 else {}
    extra = [] if attrs else [chain.constant(np.array(axes, np.int64), f"{short}_axes")]
    own = tensor.dtype if tensor.dtype is not None else work
    column = [None if tensor.shape is None else tensor.shape[0], *[1] * spatial]
    wide: gs.Variable = chain.op(
        "Unsqueeze", tensor, *extra, short=f"{short}_column", dtype=own, shape=column, **attrs
    )
    return wide if own == work else chain.cast(wide, work, f"{short}_wide")


PASS = Pass(
    name="decompose_instance_norm",
    run=run,
    targets=(Versions("tensorrt", below=(10,)),),
    summary="InstanceNormalization -> mean, variance, Div, scale and bias in float32",
    fault="goes to a cuDNN plugin that is often missing and overflows in half precision",
    evidence=(
        "https://github.com/NVIDIA/TensorRT/issues/2691",
        "https://github.com/NVIDIA/TensorRT/issues/2869",
        "https://github.com/NVIDIA/TensorRT/issues/2338",
        "TensorRT 8.6.0's OnnxParser has no flag for native InstanceNormalization",
    ),
)
