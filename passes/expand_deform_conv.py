"""``DeformConv`` (torchvision's deform_conv2d) becomes GridSample and MatMul.

TensorRT has no DeformConv: RTX 1.7's parser looks for a plugin and finds none. Every output pixel
samples the image at kernel height x kernel width positions, bilinear, with zeros outside. One
GridSample takes all samples. Mask, kernel and bias are applied to the samples as to the columns
of an unfolded convolution. The samples take (kernel height x kernel width) times the memory of
the image at the output's size, in float32.

The positions are normalised for align_corners=0. Unlike align_corners=1, this also works for an
image that is one pixel high or wide. From opset 20 the mode is called ``linear``, which TensorRT
reads as nearest (NVIDIA/TensorRT#4646). So lower_opset must run after this pass.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from pipeline.machine.target import EVERY
from pipeline.passes.infra import Pass, PassResult, Refused, each
from pipeline.passes.lib.chain import Chain
from pipeline.passes.lib.dims import (
    is_half,
    join,
    rank_of,
    size_of,
    static_size,
    unsqueeze,
    widen,
    work_dtype,
)
from pipeline.passes.lib.values import Value


@dataclass(frozen=True)
class _Shape:
    """Static sizes of channels and kernel, and the attributes.

    Args:
        offset_groups: number of groups; each has an equal share of the input channels.
    """

    outputs: int
    group_inputs: int
    kernel: tuple[int, int]
    groups: int
    offset_groups: int
    strides: tuple[int, int]
    dilations: tuple[int, int]
    pads: tuple[int, int]

    @property
    def places(self) -> int:
        return self.kernel[0] * self.kernel[1]

    @property
    def inputs(self) -> int:
        return self.group_inputs * self.groups


def run(graph: gs.Graph) -> PassResult:
    """Rewrites 2-D DeformConv: X ``(N, C, H, W)``, W ``(oC, C / group, kH, kW)``, offset
    ``(N, offset_group * kH * kW * 2, oH, oW)``, B ``(oC,)`` or none, mask or none.

    N, H, W, oH and oW may be dynamic, and weights may be computed. Half precision is computed in
    float32 and cast back. Refused: other ranks, an unknown rank or dtype, other dtypes, a weight
    whose shape is not static.
    """
    return each(graph, "DeformConv", lambda inner, node: _rewrite(Chain(inner, node)))


def _rewrite(chain: Chain) -> str:
    data, weight, offset = chain.node.inputs[:3]
    bias, mask = _optional(chain.node, 3), _optional(chain.node, 4)
    if rank_of(data) != 4 or rank_of(weight) != 4:
        raise Refused(f"{data.name} has {len(data.shape)} axes: the pass rewrites 4 (images)")
    dtype = work_dtype(data, (np.float32,))
    shape = _shape(chain.node, weight)
    high, wide = size_of(chain, offset, 2), size_of(chain, offset, 3)
    image = widen(chain, data, dtype)
    if shape.offset_groups > 1:
        channels = shape.inputs // shape.offset_groups
        sizes = join(chain, -1, channels, size_of(chain, data, 2), size_of(chain, data, 3))
        image = chain.op("Reshape", image, sizes, short="groups", dtype=dtype)
    grid = _grid(chain, shape, widen(chain, offset, dtype), (high, wide))
    mode = "linear" if chain.graph.opset >= 20 else "bilinear"
    # (N * offset groups, channels of one, places * oH, oW)
    samples = chain.op(
        "GridSample", image, grid, dtype=dtype,
        mode=mode, padding_mode="zeros", align_corners=0,
    )  # fmt: skip
    if mask is not None:
        rows = join(chain, -1, 1, high * shape.places, wide)
        factors = chain.op("Reshape", widen(chain, mask, dtype), rows, short="mask", dtype=dtype)
        samples = chain.op("Mul", samples, factors, dtype=dtype)
    per_group = shape.group_inputs * shape.places
    columns = chain.op(
        "Reshape", samples, join(chain, -1, shape.groups, per_group, high * wide), dtype=dtype
    )
    kernel = chain.op(
        "Reshape", widen(chain, weight, dtype),
        np.array([shape.groups, shape.outputs // shape.groups, per_group]),
        short="kernel", dtype=dtype,
    )  # fmt: skip
    result = chain.op("MatMul", kernel, columns, dtype=dtype)
    result = chain.op("Reshape", result, join(chain, -1, shape.outputs, high, wide), dtype=dtype)
    if bias is not None:
        column = chain.op(
            "Reshape", widen(chain, bias, dtype), np.array([-1, 1, 1]), short="bias", dtype=dtype
        )
        result = chain.op("Add", result, column, dtype=dtype)
    if is_half(data.dtype):
        result = chain.cast(result, data.dtype, short="narrowed")
    chain.finish(result)
    return f"GridSample at {shape.places} positions per pixel, MatMul with the kernel"


def _optional(node: gs.Node, place: int) -> gs.Tensor | None:
    given = node.inputs[place] if len(node.inputs) > place else None
    return given if given is not None and given.name else None


def _shape(node: gs.Node, weight: gs.Tensor) -> _Shape:
    outputs, group_inputs, *kernel = (
        static_size(weight, axis, f"axis {axis}") for axis in range(4)
    )
    return _Shape(
        outputs,
        group_inputs,
        (kernel[0], kernel[1]),
        int(node.attrs.get("group", 1)),
        int(node.attrs.get("offset_group", 1)),
        _pair(node, "strides", 1),
        _pair(node, "dilations", 1),
        # the pads at the end only set the output's size, which the offsets' shape gives
        _pair(node, "pads", 0),
    )


def _pair(node: gs.Node, attribute: str, default: int) -> tuple[int, int]:
    first, second = (int(n) for n in node.attrs.get(attribute, [default] * 2)[:2])
    return first, second


def _grid(chain: Chain, shape: _Shape, offset: gs.Tensor, output: tuple[Value, Value]) -> gs.Tensor:
    """Normalised sample positions: ``(N * offset groups, places * oH, oW, 2)``, x before y."""
    high, wide = output
    data = chain.node.inputs[0]
    sizes = join(chain, -1, shape.places, 2, high, wide)
    offset = chain.op("Reshape", offset, sizes, short="offsets", dtype=offset.dtype)
    steps = np.indices(shape.kernel).reshape(2, -1)
    rows = join(chain, -1, high * shape.places, wide, 1)
    found = []
    for axis in (1, 0):
        start = (steps[axis] * shape.dilations[axis] - shape.pads[axis]).astype(np.float32)
        base = output[axis].upto().cast(np.float32) * float(shape.strides[axis])
        base = base.reshape(*((-1, 1) if axis == 0 else (1, -1)))
        places = Value(chain, start.reshape(-1, 1, 1)) + base
        moves = chain.op(
            "Gather", offset, np.array([axis]), short="offset", dtype=offset.dtype, axis=2
        )
        # (N * offset groups, places, 1, oH, oW) in pixels
        there = chain.op("Add", moves, _with_axis(chain, places), dtype=offset.dtype)
        size = size_of(chain, data, 2 + axis).cast(np.float32)
        doubled = chain.op("Mul", there, np.array([2], np.float32), dtype=offset.dtype)
        centred = chain.op("Add", doubled, np.array([1], np.float32), dtype=offset.dtype)
        scaled = chain.op("Div", centred, size.data, dtype=offset.dtype)
        normal = chain.op("Sub", scaled, np.array([1], np.float32), dtype=offset.dtype)
        found.append(chain.op("Reshape", normal, rows, dtype=offset.dtype))
    return chain.op("Concat", *found, short="grid", dtype=offset.dtype, axis=3)


def _with_axis(chain: Chain, places: Value) -> gs.Tensor | np.ndarray:
    """(places, oH or 1, oW or 1) as (places, 1, oH or 1, oW or 1)."""
    if places.known is not None:
        return places.known[:, None]
    return unsqueeze(chain, places.data, 1)


PASS = Pass(
    name="expand_deform_conv",
    run=run,
    targets=EVERY,
    summary="DeformConv -> GridSample (bilinear, zeros outside), MatMul",
    fault="TensorRT has no DeformConv: the parser refuses it ('Plugin not found')",
    evidence=(
        "cases: rtx-1.7 does not parse it",
        "an op of opset 19; TensorRT 8.6 documents opset 17",
    ),
)
