"""The actual output sizes of a pool with ``ceil_mode``.

Below opset 22, the shape inference of ONNX and of ONNX Runtime counts a last window that starts in
the padding. A run does not compute that window (https://github.com/onnx/onnx/pull/5741).

A pool that rounds down, with more padding at the end, has the same windows, and every tool infers
its sizes correctly. `pipeline.passes.pad_ceil_pools` rewrites the model in this way.
`with_true_pools` rewrites a copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx

from pipeline.graph.files import inner_graphs, nodes_of
from pipeline.graph.names import values_of

POOLS = ("MaxPool", "AveragePool", "LpPool")


@dataclass(frozen=True)
class PooledAxis:
    """One axis of a pool: the window and the padding before and after the image, in elements."""

    kernel: int
    stride: int
    begin: int
    end: int

    def ceil(self, size: int) -> int:
        """The number of windows as TensorRT counts them."""
        rest = size + self.begin + self.end - self.kernel
        return -(-rest // self.stride) + 1

    def windows(self, size: int) -> int:
        """The number of windows, except a window that starts in the padding at the end."""
        count = self.ceil(size)
        return count - 1 if (count - 1) * self.stride >= size + self.begin else count

    @property
    def end_to_round_down(self) -> int:
        """The padding at the end that gives a pool that rounds down the same `windows`."""
        return min(self.end + self.stride, self.kernel) - 1


def pool_axes(attributes: Mapping[str, Any]) -> list[PooledAxis] | None:
    """The axes of a pool from its attributes.

    Returns:
        None for dilations, and where ``auto_pad`` makes the sizes independent of rounding.
    """
    kernel = [int(k) for k in attributes["kernel_shape"]]
    strides = [int(s) for s in attributes.get("strides", [1] * len(kernel))]
    pads = [0] * 2 * len(kernel)
    auto_pad = attributes.get("auto_pad", "NOTSET")
    if auto_pad == "NOTSET":
        pads = [int(p) for p in attributes.get("pads", pads)]
    dilated = any(int(d) != 1 for d in attributes.get("dilations", ()))
    if dilated or auto_pad not in ("NOTSET", "VALID"):
        return None
    begin, end = pads[: len(kernel)], pads[len(kernel) :]
    return [PooledAxis(*numbers) for numbers in zip(kernel, strides, begin, end, strict=True)]


def may_round_otherwise(axes: Sequence[PooledAxis], sizes: Sequence[Any] | None) -> bool:
    """True if the last window may start in the padding at the end, at some possible size.

    Args:
        axes: The pool's axes.
        sizes: The sizes of the image; a fixed size is an int. None if no size is known.
    """
    return any(
        axis.end + axis.stride > axis.kernel
        and (
            not isinstance(size, (int, np.integer))
            or axis.windows(int(size)) != axis.ceil(int(size))
        )
        for size, axis in zip(sizes or [None] * len(axes), axes, strict=True)
    )


def with_true_pools(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model, or a copy whose ceil-mode pools round down, for correct shape inference.

    The copy is for shape inference only: averages that count their padding get other values. A
    pool stays the same if the pass would refuse it. This is so if its padding is as large as the
    window, or its stated output size is wrong.
    """
    if not any(a.name == "ceil_mode" and a.i for n in nodes_of(model.graph) for a in n.attribute):
        return model
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for graph in inner_graphs(copy.graph):
        shapes = {value.name: _sizes(value) for value in values_of(graph)}
        for node in graph.node:
            if node.op_type in POOLS and node.domain in ("", "ai.onnx"):
                _round_down(node, shapes)
    return copy


def _sizes(value: onnx.ValueInfoProto) -> list[int | None]:
    """The sizes after batch and channels; None for a size that is not fixed."""
    shape = value.type.tensor_type.shape
    return [d.dim_value if d.HasField("dim_value") else None for d in shape.dim][2:]


def _round_down(node: onnx.NodeProto, shapes: Mapping[str, list[int | None]]) -> None:
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    if isinstance(attributes.get("auto_pad"), bytes):
        attributes["auto_pad"] = attributes["auto_pad"].decode()
    axes = pool_axes(attributes) if attributes.get("ceil_mode") else None
    image = shapes.get(node.input[0]) or None
    if axes is None or not may_round_otherwise(axes, image):
        return
    if any(max(axis.begin, axis.end) >= axis.kernel for axis in axes):
        return
    if list(_stated_otherwise(axes, image, shapes.get(node.output[0]))):
        return
    kept = [a for a in node.attribute if a.name not in ("ceil_mode", "auto_pad", "pads")]
    pads = [*(axis.begin for axis in axes), *(axis.end_to_round_down for axis in axes)]
    del node.attribute[:]
    node.attribute.extend([*kept, onnx.helper.make_attribute("pads", pads)])


def _stated_otherwise(
    axes: Sequence[PooledAxis],
    image: Sequence[int | None] | None,
    output: Sequence[int | None] | None,
) -> Iterator[PooledAxis]:
    """The axes whose stated output size is wrong."""
    for axis, size, stated in zip(axes, image or (), output or (), strict=False):
        if size is not None and stated is not None and axis.windows(size) != stated:
            yield axis
