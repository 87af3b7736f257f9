"""Pools with ``ceil_mode=1`` become pools that round down, with more padding at the end.

With ``ceil_mode`` there are ``ceil((in + begin + end - kernel) / stride) + 1`` windows. A last
window that would start in the padding at the end does not count. ONNX Runtime, torch and opset 22
omit it (https://github.com/onnx/onnx/issues/5711). ONNX's shape inference below opset 22 counts
it. TensorRT also counts it (PaddingMode EXPLICIT_ROUND_UP): its max pools return a row too many,
and its average pools are refused. Such a window exists for some size only if
``end + stride > kernel``.

Rounding down gives the same number of windows if the padding at the end is the smaller of

* ``end + stride - 1``: rounding up equals rounding down with ``stride - 1`` more;
* ``kernel - 1``: one window for each multiple of the stride below ``in + begin``, which are the
  windows that start before the padding at the end.

Neither depends on `in`, so no size is computed. A maximum, a p-norm, and an average without
``count_include_pad`` ignore the padding. An average with ``count_include_pad`` counts only the
requested padding: it becomes a Pad, and the added padding is not counted.
"""

from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs

from pipeline.graph.ceil_pools import POOLS, PooledAxis, may_round_otherwise, pool_axes
from pipeline.machine.target import FROM_10, RTX, Versions
from pipeline.passes.graph_ops import constant, label
from pipeline.passes.infra import Pass, PassResult, Refused, each


def run(graph: gs.Graph) -> PassResult:
    """Rewrites MaxPool, AveragePool and LpPool of ``(N, C, D1, ...)``, of any dtype and sizes.

    Left alone: pools for which TensorRT has the right size, ``auto_pad`` SAME_UPPER and SAME_LOWER
    (their sizes are not rounded), and dilations (TensorRT does not accept them). TensorRT's size is
    right if ``end + stride <= kernel`` on every axis, or if the last window starts before the
    padding at a static size. Its averages have ONNX Runtime's divisor, as documented. Refused:
    padding as large as the window, which ONNX Runtime refuses too, and an output whose size is
    stated wrongly.
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


def _check_sizes(node: gs.Node, axes: list[PooledAxis]) -> None:
    """Refuses a wrong stated size: passes and TensorRT would fold it into constants."""
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
    """Inserts a Pad with zeros before the node."""
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
