"""Convolutions whose number of groups is a size: another kernel for each image of a batch.

``conv2d(x.reshape(1, b * c, h, w), kernels, groups=b)`` is how StyleGAN2 and dynamic convolutions
apply computed kernels. ONNX needs a number of groups. So the image is unfolded into columns (the
transposed one is folded from columns), and each group is a product of matrices. torch's exporter
translates all other convolutions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from onnxscript.function_libs.torch_lib.ops import core  # the exporter's own; torch 2.13

from pipeline.errors import ExportError
from pipeline.export.ops.sizes import Value, as_size, ints, op, rank, reshaped, size, tensor

aten: Any = torch.ops.aten
_END = (1 << 31) - 1
_TRANSPOSED = ((1, 1), (0, 0), (0, 0), 1, (1, 1))  # the options of conv_transpose2d, by default


def conv2d(
    input: Value,
    weight: Value,
    bias: Value | None = None,
    stride: Sequence[int] = (1, 1),
    padding: Sequence[int] = (0, 0),
    dilation: Sequence[int] = (1, 1),
    groups: Any = 1,
) -> Value:
    """``conv2d.default``."""
    if isinstance(groups, int):
        return core.aten_conv2d(input, weight, bias, stride, padding, dilation, groups)
    channels, *kernel = _numbers(input, weight, (1, 2, 3))
    groups = as_size(groups)
    stride, padding, dilation = (_two(v) for v in (stride, padding, dilation))
    high, wide = (size(input, n) for n in (2, 3))
    x = reshaped(input, -1, channels, high, wide)  # [n * groups, channels, h, w]
    if any(padding):
        x = op.Pad(x, ints(0, 0, *padding, 0, 0, *padding))
    reach = [(k - 1) * d for k, d in zip(kernel, dilation, strict=True)]
    taps = []
    for row in range(kernel[0]):
        for column in range(kernel[1]):
            starts = [row * dilation[0], column * dilation[1]]
            # negative ends count from the last row; 0 would be the first
            ends = [s - r if s < r else _END for s, r in zip(starts, reach, strict=True)]
            taps.append(op.Slice(x, ints(*starts), ints(*ends), ints(2, 3), ints(*stride)))
    high, wide = (op.Shape(taps[0], start=n, end=n + 1) for n in (2, 3))
    columns = op.Concat(*(op.Unsqueeze(tap, ints(2)) for tap in taps), axis=2)
    length = channels * len(taps)
    columns = reshaped(columns, size(input, 0), groups, length, -1)
    kernels = reshaped(weight, groups, -1, length)
    y = reshaped(op.MatMul(kernels, columns), -1, size(weight, 0), high, wide)
    return _with_bias(y, bias)


def conv_transpose2d(
    input: Value, weight: Value, bias: Value | None = None, *options: Any
) -> Value:
    """``conv_transpose2d.input``.

    Args:
        input: [n, groups * inputs, h, w].
        weight: [groups * inputs, outputs, kernel_h, kernel_w].
        bias: [groups * outputs].
        options: the stride, padding, output_padding, groups and dilation, as far as they are given.
    """
    given = (*options, *_TRANSPOSED[len(options) :])
    stride, padding, output_padding, groups, dilation = given
    if isinstance(groups, int):
        return core.aten_convolution(
            input, weight, bias, stride, padding, dilation, True, output_padding, groups
        )
    outputs, *kernel = _numbers(input, weight, (1, 2, 3))
    groups = as_size(groups)
    stride, padding, dilation = (_two(v) for v in (stride, padding, dilation))
    more = _two(output_padding)
    sides = []
    for n in (0, 1):
        # (size - 1) * stride - 2 * padding + dilation * (kernel - 1) + output_padding + 1
        fixed = dilation[n] * (kernel[n] - 1) + more[n] + 1 - stride[n] - 2 * padding[n]
        product = op.Mul(tensor(size(input, 2 + n)), ints(stride[n]))
        sides.append(op.Add(product, ints(fixed)))
    length = outputs * kernel[0] * kernel[1]
    kernels = op.Transpose(reshaped(weight, groups, -1, length), perm=[0, 2, 1])
    inputs = op.Div(tensor(size(weight, 0)), tensor(groups))
    x = reshaped(input, size(input, 0), groups, inputs, -1)
    pixels = op.Shape(x, start=3, end=4)
    columns = reshaped(op.MatMul(kernels, x), -1, length, pixels)
    # [n * groups, outputs, h, w]
    y = op.Col2Im(
        columns, op.Concat(*sides, axis=0), ints(*kernel),
        dilations=dilation, pads=[*padding, *padding], strides=stride,
    )  # fmt: skip
    y = reshaped(y, size(input, 0), -1, *sides)
    return _with_bias(y, bias)


def _numbers(x: Value, weight: Value, axes: Sequence[int]) -> list[int]:
    """Sizes of the kernel.

    Raises:
        ExportError: one of them is dynamic, or the image has no batch.
    """
    if rank(weight) != rank(x):
        raise ExportError("its groups follow a size: give it images [n, c, h, w]")
    found = [size(weight, axis) for axis in axes]
    if not all(isinstance(n, int) for n in found):
        raise ExportError(
            "its groups follow a size, and so do its kernel's size or channels; make the "
            "kernel's size and channels numbers"
        )
    return found


def _two(value: Sequence[int]) -> list[int]:
    return [int(v) for v in (value if len(value) == 2 else [*value, *value])]


def _with_bias(y: Value, bias: Value | None) -> Value:
    return y if bias is None else op.Add(y, op.Reshape(bias, ints(1, -1, 1, 1)))


TRANSLATIONS: dict[Any, Callable[..., Any]] = {
    aten.conv2d.default: conv2d,
    aten.conv_transpose2d.input: conv_transpose2d,
}
