"""``InstanceNormalization`` becomes mean, variance, division, scale and bias in float32.

TensorRT 8.6's parser hands InstanceNormalization to a cuDNN plugin that is often missing, and
whose fp16 form overflows (NVIDIA/TensorRT#2691, #2869, #2338). Both means are written as
``GlobalAveragePool``, on purpose: from opset 18 ReduceMean takes its axes as an input, and
TensorRT 8.6 silently ignores that input and reduces over all axes. GlobalAveragePool is the
same in every opset, and onnx-tensorrt makes it a reduction over all axes but the first two, for
1-D to 3-D alike (``globalPoolingHelper`` in onnx-tensorrt's onnx2trt_utils.cpp: all axes but N
and C, kept with size 1).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from pipeline.machine.target import Versions
from pipeline.passes.graph_ops import constant, label, replace, values_of
from pipeline.passes.infra import Pass, PassResult, Refused, each

Shape = list[Any] | None


def run(graph: gs.Graph) -> PassResult:
    """Rewrites every InstanceNormalization over 1-D to 3-D images ``(N, C, spatial...)``.

    Half-precision inputs are computed in float32 and cast back. Scale and bias, of shape
    ``(C,)``, may be constants or computed. Refused: unknown rank or dtype, no spatial axis, more
    than three, and a spatial size that is always 1.
    """
    return each(
        graph, "InstanceNormalization", lambda inner, node: _rewrite(inner, node, graph.opset)
    )


def _rewrite(graph: gs.Graph, node: gs.Node, opset: int) -> str:
    data, scale, bias = node.inputs
    output = node.outputs[0]
    shape = data.shape if data.shape is not None else output.shape
    if shape is None:
        raise Refused(f"the rank of {data.name} is not known; run shape inference first")
    spatial = len(shape) - 2
    if not 1 <= spatial <= 3:
        raise Refused(f"{data.name} has {spatial} spatial axes; only 1 to 3 are rewritten")
    if all(size == 1 for size in shape[2:]):
        raise Refused(
            f"{data.name} has one value a channel: its variance is 0 and the output would be the "
            "bias alone; use a larger input or leave the norm out"
        )
    dtype = next((t.dtype for t in (data, output, scale, bias) if t.dtype is not None), None)
    if dtype is None:
        raise Refused(f"the dtype of {data.name} is not known; run shape inference first")
    work = np.float64 if dtype == np.float64 else np.float32
    cast = dtype != work
    chain = _Chain(label(node), work)
    x = chain.cast(data, work, shape) if cast else data
    one = [*shape[:2], *[1] * spatial]
    mean = chain.add("GlobalAveragePool", "mean", [x], one)
    centred = chain.add("Sub", "centred", [x, mean], shape)
    squared = chain.add("Mul", "squared", [centred, centred], shape)
    variance = chain.add("GlobalAveragePool", "variance", [squared], one)
    epsilon = np.array(node.attrs.get("epsilon", 1e-5), work)
    sum_ = chain.add("Add", "add_epsilon", [variance, chain.constant("epsilon", epsilon)], one)
    deviation = chain.add("Sqrt", "deviation", [sum_], one)
    normal = chain.add("Div", "normal", [centred, deviation], shape)
    gain = chain.channel("scale", scale, spatial, opset)
    shift = chain.channel("bias", bias, spatial, opset)
    scaled = chain.add("Mul", "scaled", [normal, gain], shape)
    chain.add("Add", "biased", [scaled, shift], shape)
    if cast:
        chain.cast(chain.nodes[-1].outputs[0], dtype, shape)
    replace(graph, node, chain.nodes)
    words = f"mean and variance over {spatial} axes in {np.dtype(work).name}"
    return f"{words}, cast back" if cast else words


class _Chain:
    """The nodes that come in the place of one norm, in order, named after it."""

    def __init__(self, name: str, dtype: type[np.floating]) -> None:
        self.name, self.dtype = name, dtype
        self.nodes: list[gs.Node] = []

    def add(
        self,
        op: str,
        short: str,
        inputs: list[gs.Tensor],
        shape: Shape,
        *,
        attrs: dict[str, Any] | None = None,
        dtype: Any = None,
    ) -> gs.Variable:
        name = f"{self.name}/{short}"
        output = gs.Variable(name, self.dtype if dtype is None else dtype, shape)
        self.nodes.append(gs.Node(op, name, attrs, inputs, [output]))
        return output

    def constant(self, short: str, values: np.ndarray) -> gs.Constant:
        return constant(f"{self.name}/{short}", values)

    def cast(self, tensor: gs.Tensor, dtype: Any, shape: Shape) -> gs.Variable:
        short = "widened" if dtype == self.dtype else "narrowed"
        return self.add("Cast", short, [tensor], shape, attrs=_to(dtype), dtype=dtype)

    def channel(self, short: str, tensor: gs.Tensor, spatial: int, opset: int) -> gs.Tensor:
        """Scale or bias of shape (C,) as (C, 1, ...), in the dtype of the computation."""
        values = values_of(tensor)
        if values is not None:
            shaped = values.astype(self.dtype).reshape(-1, *[1] * spatial)
            return self.constant(short, shaped)
        size = None if tensor.shape is None else tensor.shape[0]
        axes = list(range(1, spatial + 1))
        # from opset 13 the axes are an input; TensorRT 8.6 wants them as an initializer
        attrs = {"axes": axes} if opset < 13 else {}
        extra = [] if attrs else [self.constant(f"{short}_axes", np.array(axes, np.int64))]
        own = tensor.dtype if tensor.dtype is not None else self.dtype
        column = [size, *[1] * spatial]
        made = [tensor, *extra]
        wide = self.add("Unsqueeze", f"{short}_column", made, column, attrs=attrs, dtype=own)
        if own == self.dtype:
            return wide
        return self.add("Cast", f"{short}_wide", [wide], column, attrs=_to(self.dtype))


def _to(dtype: Any) -> dict[str, int]:
    # graph-surgeon gives ONNX's number for the dtypes that numpy lacks, such as bfloat16
    if isinstance(dtype, int):
        return {"to": dtype}
    return {"to": int(onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))}


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
