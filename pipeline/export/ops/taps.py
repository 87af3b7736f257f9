"""bilinear, bicubic and trilinear resizes by a scale factor whose sizes are wrong in float32.

ONNX's Resize computes ``floor(size * scale)`` in float32, and torch ``int(size * scale)`` in
float64. With a factor of 0.7, an input of 90 becomes 62 in torch and 63 in ONNX. Sizes instead of
the scale would change the coordinates, which torch computes from the factor. So the scale is the
float32 beside the factor that gives torch's size at every size of the dim, if there is one. If
not, the graph gathers and mixes the neighbouring rows. So it does for every linear resize of one
axis. The exporter translates every other resize.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from onnx import TensorProto
from onnxscript.function_libs.torch_lib.ops import nn  # the exporter's own; torch 2.13

from pipeline.export.ops.axes import in_float32
from pipeline.export.ops.resize import aligned_step, resized_axes, step_between
from pipeline.export.ops.sizes import (
    FLOAT,
    INT64,
    Value,
    floats,
    ints,
    largest,
    op,
    products,
    rank,
    size,
    steps,
    tensor,
)

aten: Any = torch.ops.aten

_EXACT = 1 << 24  # float32 holds every whole number up to it


def bilinear(
    x: Value,
    output_size: Sequence[Any] | None,
    align_corners: bool,
    scale_factors: Sequence[float] | None,
) -> Value:
    """``upsample_bilinear2d.vec``."""
    scales = _scales(x, scale_factors)
    if scale_factors is None or scales is not None:
        return nn.aten_upsample_bilinear2d_vec(x, output_size, align_corners, scales)
    return _mixed(x, None, scale_factors, align_corners, _linear_taps)


def linear(
    x: Value,
    output_size: Sequence[Any] | None,
    align_corners: bool,
    scale_factors: Sequence[float] | None,
) -> Value:
    """``upsample_linear1d.vec``. torch's decomposition divides by 0 for one row and corners."""
    return _mixed(x, output_size, scale_factors, align_corners, _linear_taps)


def bicubic(
    x: Value,
    output_size: Sequence[Any] | None,
    align_corners: bool,
    scale_factors: Sequence[float] | None,
) -> Value:
    """``upsample_bicubic2d.vec``."""
    scales = _scales(x, scale_factors)
    if scale_factors is None or scales is not None:
        return nn.aten_upsample_bicubic2d_vec(x, output_size, align_corners, scales)
    return _mixed(x, None, scale_factors, align_corners, _cubic_taps)


def trilinear(
    x: Value,
    output_size: Sequence[Any] | None,
    align_corners: bool,
    scale_factors: Sequence[float] | None,
) -> Value:
    """``upsample_trilinear3d.vec``."""
    scales = _scales(x, scale_factors)
    if scale_factors is None or scales is not None:
        return nn.aten_upsample_trilinear3d_vec(x, output_size, align_corners, scales)
    return _mixed(x, None, scale_factors, align_corners, _linear_taps)


def _scales(x: Value, scale_factors: Sequence[float] | None) -> list[float] | None:
    """For each factor a float32 beside it that gives torch's output size at every size of the axis.

    The product is taken in float32, as ONNX Runtime does, and in float64, as ONNX's shape inference
    does. None if an axis has no such float32.
    """
    found = []
    for n, factor in enumerate(scale_factors or ()):
        axis = rank(x) - len(scale_factors or ()) + n
        known = size(x, axis)
        most = known if isinstance(known, int) else _reach(largest(x, axis))
        if most > _EXACT:
            return None
        sizes = np.arange(most + 1)[known if isinstance(known, int) else slice(None)]
        wanted = products(factor, most)[sizes]
        near = np.float32(factor)
        for scale in (near, np.nextafter(near, np.float32(np.inf))):
            given = sizes.astype(np.float32) * scale, sizes * np.float64(scale)
            if all((np.floor(each).astype(np.int64) == wanted).all() for each in given):
                found.append(float(scale))
                break
        else:
            return None
    return found or None


def _reach(most: float) -> int:
    """The largest size that is checked."""
    return int(most) if math.isfinite(most) else 1 << 15


Taps = list[tuple[int, Value]]  # offset from the nearest lower row, and the row's weight [out]


def _mixed(
    x: Value,
    output_size: Sequence[Any] | None,
    scale_factors: Sequence[float] | None,
    align_corners: bool,
    taps: Callable[[Value], Taps],
) -> Value:
    double = x.dtype == TensorProto.DOUBLE

    def resize(y: Value) -> Value:
        for axis, before, after, factor in resized_axes(x, output_size, scale_factors):
            position = op.Cast(steps(after), to=FLOAT)
            if align_corners:
                place = op.Mul(position, aligned_step(before, after))
            else:
                half = floats(0.5)
                step = step_between(before, after, factor)
                place = op.Sub(op.Mul(op.Add(position, half), step), half)
                if taps is _linear_taps:
                    place = op.Relu(place)
            low = op.Floor(place)
            row, last = op.Cast(low, to=INT64), op.Sub(tensor(before), ints(1))
            column = ints(-1, *[1] * (rank(x) - axis - 1))
            total = None
            for offset, weight in taps(op.Sub(place, low)):
                index = op.Max(op.Min(op.Add(row, ints(offset)), last), ints(0))
                factors = op.Reshape(op.CastLike(weight, y) if double else weight, column)
                part = op.Mul(op.Gather(y, index, axis=axis), factors)
                total = part if total is None else op.Add(total, part)
            y = total
        return y

    return resize(x) if double else in_float32(x, resize)


def _linear_taps(t: Value) -> Taps:
    return [(0, op.Sub(floats(1.0), t)), (1, t)]


def _cubic_taps(t: Value) -> Taps:
    """Keys' cubic with a = -0.75."""
    rest = op.Sub(floats(1.0), t)
    return [
        (-1, _far(op.Add(t, floats(1.0)))),
        (0, _near(t)),
        (1, _near(rest)),
        (2, _far(op.Add(rest, floats(1.0)))),
    ]


def _near(d: Value) -> Value:
    inner = op.Sub(op.Mul(floats(1.25), d), floats(2.25))
    return op.Add(op.Mul(op.Mul(inner, d), d), floats(1.0))


def _far(d: Value) -> Value:
    inner = op.Add(op.Mul(op.Sub(d, floats(5.0)), d), floats(8.0))
    return op.Mul(floats(-0.75), op.Sub(op.Mul(inner, d), floats(4.0)))


TRANSLATIONS: dict[Any, Callable[..., Any]] = {
    aten.upsample_linear1d.vec: linear,
    aten.upsample_bilinear2d.vec: bilinear,
    aten.upsample_bicubic2d.vec: bicubic,
    aten.upsample_trilinear3d.vec: trilinear,
}
