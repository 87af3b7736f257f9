"""torchvision's deformable convolution, as samples of the image and a product of matrices.

Each tap of the kernel reads the image at its place plus an offset, between pixels. GridSample reads
zeros outside of the image, as ``bilinear_interpolate`` of torchvision's kernel does
(torchvision/csrc/ops/cpu/deform_conv2d_kernel.cpp). `pipeline.passes.expand_deform_conv` does the
same for the DeformConv of an ONNX file, an op that opset 18 lacks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pipeline.errors import ExportError
from pipeline.export.ops.sizes import (
    FLOAT,
    Size,
    Value,
    as_float,
    floats,
    ints,
    op,
    reshaped,
    size,
    steps,
)


def deform_conv2d(  # noqa: PLR0913 - the exporter matches the parameters of torchvision's op by name
    input: Value,
    weight: Value,
    offset: Value,
    mask: Value,
    bias: Value,
    stride_h: int,
    stride_w: int,
    pad_h: int,
    pad_w: int,
    dilation_h: int,
    dilation_w: int,
    groups: int,
    offset_groups: int,
    use_mask: bool,
) -> Value:
    """``torchvision::deform_conv2d``: [n, outputs, height, width].

    Args:
        input: the image, [n, channels, h, w].
        weight: the kernel, [outputs, channels / groups, kernel_h, kernel_w].
        offset: in pixels, [n, offset_groups * taps * 2, height, width]; first y, then x.
        mask: a factor of each tap, [n, offset_groups * taps, height, width].
        bias: [outputs].
        stride_h: the rows from one output to the next.
        stride_w: the columns from one output to the next.
        pad_h: the rows of zeros above the image.
        pad_w: the columns of zeros left of the image.
        dilation_h: the rows from one tap to the next.
        dilation_w: the columns from one tap to the next.
        groups: the groups of channels that a kernel reads.
        offset_groups: the groups of channels that share offsets.
        use_mask: whether `mask` has an effect.

    Raises:
        ExportError: the kernel, the channels or an option follow a size.
    """
    outputs, _, kernel_h, kernel_w = weight.shape
    channels, taps = input.shape[1], kernel_h * kernel_w
    options = (stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w, groups, offset_groups)
    if not all(isinstance(n, int) for n in (*weight.shape, channels, *options)):
        raise ExportError(
            "its kernel, its channels or its options follow a size; make them numbers"
        )
    batch, high, wide = size(input, 0), size(offset, 2), size(offset, 3)
    rows = [tap // kernel_w * dilation_h - pad_h for tap in range(taps)]
    columns = [tap % kernel_w * dilation_w - pad_w for tap in range(taps)]
    shifts = op.Cast(reshaped(offset, -1, taps, 2, high, wide), to=FLOAT)
    y = _places(shifts, 0, rows, op.Reshape(_every(stride_h, high), ints(-1, 1)), size(input, 2))
    x = _places(shifts, 1, columns, _every(stride_w, wide), size(input, 3))
    grid = op.Concat(x, y, axis=-1)  # [n * offset_groups, taps, height, width, 2]
    grid = op.Reshape(grid, ints(0, taps, -1, 2))
    each = channels // offset_groups
    image = op.Cast(reshaped(input, -1, each, size(input, 2), size(input, 3)), to=FLOAT)
    read = op.GridSample(image, grid, mode="bilinear", padding_mode="zeros", align_corners=0)
    read = op.CastLike(read, input)
    if use_mask:
        factors = op.Reshape(mask, ints(0, 1, offset_groups * taps, -1))
        read = op.Mul(read, op.Reshape(factors, ints(-1, 1, taps, 0)))
    read = reshaped(read, batch, groups, channels // groups * taps, -1)
    result = op.MatMul(op.Reshape(weight, ints(groups, outputs // groups, -1)), read)
    return op.Add(reshaped(result, batch, outputs, high, wide), op.Reshape(bias, ints(-1, 1, 1)))


def _every(stride: int, length: Size) -> Value:
    """0, stride, 2 * stride, ...: float32 [length]."""
    return op.Mul(op.Cast(steps(length), to=FLOAT), floats(stride))


def _places(shifts: Value, axis: int, taps: list[int], outputs: Value, length: Size) -> Value:
    """Where the taps read along an axis: -1 and 1 are the outer edges of the image.

    This scale (align_corners=0) also fits an image of one pixel.
    """
    shift = op.Gather(shifts, op.Constant(value_int=axis), axis=2)
    first = op.Reshape(op.Constant(value_floats=list(map(float, taps))), ints(-1, 1, 1))
    pixel = op.Add(shift, op.Add(first, outputs))
    scaled = op.Div(op.Add(op.Mul(pixel, floats(2.0)), floats(1.0)), as_float(length))
    return op.Unsqueeze(op.Sub(scaled, floats(1.0)), ints(-1))


def translations() -> dict[Any, Callable[..., Any]]:
    """The translation of the op, if torchvision was imported."""
    found = getattr(torch.ops.torchvision, "deform_conv2d", None)
    return {} if found is None else {found.default: deform_conv2d}
