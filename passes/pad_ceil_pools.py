"""Pools with ``ceil_mode=1`` become pools that round down, with more padding at the end.

With ``ceil_mode`` there are ``ceil((in + begin + end - kernel) / stride) + 1`` windows, less one
that would start in the padding at the end. TensorRT does not leave that one out (PaddingMode
EXPLICIT_ROUND_UP): its max pools give a row too many, its average pools are refused. Nor does
ONNX's shape inference below opset 22; ONNX Runtime, torch and opset 22 do
(https://github.com/onnx/onnx/issues/5711). Such a window comes at some size only where
``end + stride > kernel``.

Rounded down, there are as many windows where the padding at the end is the smaller of

* ``end + stride - 1``: rounding up is rounding down of ``stride - 1`` more;
* ``kernel - 1``: then there is a window for each multiple of the stride below ``in + begin``, which
  are those that start before the padding at the end.

Neither depends on `in`, so no size has to be computed. A maximum, a p-norm, and an average of the
image's values alone don't see the padding. An average with ``count_include_pad`` counts the
padding that was asked for and none beyond it: the former becomes a Pad, the latter is not counted.
"""

from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs

from pipeline.graph.ceil_pools import POOLS, Axis, may_round_otherwise, pool_axes
from pipeline.machine.target import FROM_10, RTX, Versions
from pipeline.passes.graph_ops import constant, label
from pipeline.passes.infra import Pass, PassResult, Refused, each


def run(graph: gs.Graph) -> PassResult:
    """Rewrites MaxPool, AveragePool and LpPool of ``(N, C, D1, ...)``, whatever dtype and sizes.

    Left alone: pools for which TensorRT has the right size (``end + stride <= kernel`` on every
    axis, or a static size at which the last window starts in time; the divisor of its averages is
    documented as ONNX Runtime has it), ``auto_pad`` SAME_UPPER and SAME_LOWER, whose sizes are
    not rounded, and dilations, which TensorRT does not take anyway. Refused: padding as large as
    the window, as ONNX Runtime does; an output whose size is stated wrongly.
    """
    return each(graph, POOLS, _rewrite)


def _rewrite(graph: gs.Graph, node: gs.Node) -> str | None:
    axes, shape = pool_axes(node.attrs), node.inputs[0].shape
    if not node.attrs.get("ceil_mode", 0) or axes is None:
        return None
    if not may_round_otherwise(axes, None if shape is None else shape[2:]):
        return None
    for axis in axes:
        if max(axis.begin, axis.end) >= axis.kernel:
            raise Refused(
                f"{max(axis.begin, axis.end)} rows of padding for a window of {axis.kernel}: "
                "pad less than the window"
            )
    _check_sizes(node, axes)
    begin, end = [axis.begin for axis in axes], [axis.end for axis in axes]
    wide = [axis.end_to_round_down for axis in axes]
    detail = "ceil_mode written as padding at the end"
    if node.op == "AveragePool" and node.attrs.pop("count_include_pad", 0) and any(begin + end):
        _pad(graph, node, [0, 0, *begin, 0, 0, *end])
        begin, wide = [0] * len(axes), [b - a for a, b in zip(end, wide, strict=True)]
        detail += ", the counted padding as a Pad"
    node.attrs.pop("auto_pad", None)
    del node.attrs["ceil_mode"]
    node.attrs["pads"] = [*begin, *wide]
    return detail


def _check_sizes(node: gs.Node, axes: list[Axis]) -> None:
    """Refuses what would leave wrong sizes behind: passes and TensorRT fold them into constants."""
    given, stated = node.inputs[0].shape, node.outputs[0].shape
    if given is None or stated is None:
        return
    for number, (axis, size, said) in enumerate(zip(axes, given[2:], stated[2:], strict=True)):
        if not isinstance(size, (int, np.integer)) or not isinstance(said, (int, np.integer)):
            continue
        if axis.windows(int(size)) != said:
            raise Refused(
                f"axis {number + 2} of {node.outputs[0].name} is stated or inferred as {said}, but "
                f"is {axis.windows(int(size))}. Below opset 22 ONNX's shape inference is wrong "
                "here. Export with opset 22, or pad explicitly and drop ceil_mode"
            )


def _pad(graph: gs.Graph, node: gs.Node, pads: list[int]) -> None:
    """Puts zeros round the image in front of the node."""
    image, name = node.inputs[0], f"{label(node)}/pad"
    padded = gs.Variable(name, image.dtype)
    sizes = constant(f"{name}/sizes", np.array(pads, dtype=np.int64))
    place = next(i for i, other in enumerate(graph.nodes) if other is node)
    graph.nodes.insert(place, gs.Node("Pad", name, {}, [image, sizes], [padded]))
    node.inputs[0] = padded


PASS = Pass(
    name="pad_ceil_pools",
    run=run,
    targets=(RTX, FROM_10, Versions("tensorrt", below=(10,), basis="read")),
    summary="pools with ceil_mode -> pools that round down, with more padding at the end",
    fault="a max pool gets a row too many if its last window would start in the padding; average "
    "pools are refused",
    evidence=(
        "cases: rtx-1.7 gives other sizes, or does not build",
        "NvInfer.h, PaddingMode, 8.6 and 10: EXPLICIT_ROUND_UP is O = ceil((M - DK) / S) + 1",
    ),
)
