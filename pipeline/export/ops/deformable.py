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


def deform_conv2d(
    input: Value, weight: Value, offset: Value, mask: Value, bias: Value, *options: Any
) -> Value:
    """``torchvision::deform_conv2d``: [n, outputs, height, width].

    Args:
        input: the image, [n, channels, h, w].
        weight: the kernel, [outputs, channels / groups, kernel_h, kernel_w].
        offset: in pixels, [n, offset_groups * taps * 2, height, width]; first y, then x.
        mask: a factor of each tap, [n, offset_groups * taps, height, width].
        bias: [outputs].
        options: the rows and columns from one output to the next (2 numbers), the zeros above and
            left of the image (2), the rows and columns from one tap to the next (2), the groups of
            channels that a kernel reads, the groups of channels that share offsets, and whether
            `mask` has an effect.

    Raises:
        ExportError: the kernel, the channels or an option follow a size.
    """
    outputs, _, kernel_h, kernel_w = weight.shape
    channels, taps = input.shape[1], kernel_h * kernel_w
    stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w, groups, offset_groups, masked = (
        options
    )
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
    if masked:
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
