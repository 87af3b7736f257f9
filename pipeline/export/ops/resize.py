"""Resizes where ONNX's Resize differs from torch: nearest, nearest-exact, antialias.

*nearest*: torch takes row ``floor(i * s)`` in float32 (aten/src/ATen/native/UpSample.h). s is
float32(in / out), or float32(1 / scale) if a scale factor is given. ONNX's asymmetric Resize
divides by out / in, which rounds differently where ``i * in / out`` is a whole number. That is so
at 274 of 8,427 pairs of sizes up to 160. So the graph computes the row indices, operation by
operation as torch does, and gathers the rows. A whole scale factor stays a Resize where both are
proven equal.

*nearest-exact* is ``floor((i + 0.5) * s)``, as in torch's CUDA kernel. Torch's CPU kernel fuses a
multiply and an add. It takes row 1 where the position differs from 1 only by rounding, so 6 of
those pairs differ. Torch's CPU kernel for channels-last images takes the same rows as the graph. A
comparison at such a pair fails, because its reference has other pixels.

*antialias*: TensorRT's parser refuses it (8.6 ignores it, NVIDIA/TensorRT#3560). The exporter
loses the scale factor, which torch's coordinates depend on. So each axis is multiplied by a
matrix, and the graph computes its weights (aten/src/ATen/native/cpu/UpSampleKernel.cpp,
``_compute_indices_min_size_weights_aa``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from pipeline.export.ops.axes import apply_matrices, in_float32
from pipeline.export.ops.sizes import (
    FLOAT,
    INT64,
    Size,
    Value,
    as_float,
    as_size,
    floats,
    ints,
    known,
    largest,
    op,
    rank,
    size,
    steps,
    tensor,
    times,
)

aten: Any = torch.ops.aten
_LONGEST = 1 << 14  # largest input size at which a whole scale factor is proven


def nearest(
    x: Value, output_size: Sequence[Any] | None, scale_factors: Sequence[float] | None
) -> Value:
    """``upsample_nearest{1,2,3}d.vec``: [n, c, ...]."""
    factors = scale_factors if scale_factors is not None else _ratios(x, output_size or ())
    if factors and all(map(_plain, factors)):
        scales = op.Constant(value_floats=[1.0, 1.0, *map(float, factors)])
        return op.Resize(
            x, None, scales, None, mode="nearest",
            coordinate_transformation_mode="asymmetric", nearest_mode="floor",
        )  # fmt: skip
    return _gathered(x, output_size, scale_factors, shift=0.0)


def nearest_exact(
    x: Value, output_size: Sequence[Any] | None, scale_factors: Sequence[float] | None
) -> Value:
    """``_upsample_nearest_exact{1,2,3}d.vec``: rows by the middle of each pixel."""
    return _gathered(x, output_size, scale_factors, shift=0.5)


def antialias_linear(
    x: Value,
    output_size: Sequence[Any] | None,
    align_corners: bool,
    scale_factors: Sequence[float] | None,
) -> Value:
    """``_upsample_bilinear2d_aa.vec``."""
    return _antialias(x, output_size, align_corners, scale_factors, _triangle)


def antialias_cubic(
    x: Value,
    output_size: Sequence[Any] | None,
    align_corners: bool,
    scale_factors: Sequence[float] | None,
) -> Value:
    """``_upsample_bicubic2d_aa.vec``."""
    return _antialias(x, output_size, align_corners, scale_factors, _cubic)


def _ratios(x: Value, output_size: Sequence[Any]) -> list[float]:
    """The ratio of each output size to its axis (``size=(2 * h, 2 * w)``), 0 if it isn't whole."""
    fake = known(x)
    if not isinstance(fake, torch.Tensor):
        return []
    found = []
    for before, after in zip(fake.shape[-len(output_size) :], output_size, strict=True):
        new = after if isinstance(after, int) else known(after)
        if isinstance(before, int) and isinstance(new, int):
            found.append(new / before)
        elif isinstance(before, torch.SymInt) and isinstance(new, torch.SymInt):
            ratio = new.node.expr / before.node.expr
            found.append(float(ratio) if ratio.is_Integer else 0.0)
        else:
            found.append(0.0)
    return found


def _plain(factor: float) -> bool:
    """Whether a scale factor is whole, and torch's float32 index is exactly ``i // factor``."""
    if factor < 1 or factor != int(factor) or factor > 64:
        return False
    i = np.arange(_LONGEST * int(factor), dtype=np.int64)
    found = np.floor(i.astype(np.float32) * np.float32(1.0 / factor)).astype(np.int64)
    return bool((found == i // int(factor)).all())


def resized_axes(
    x: Value, output_size: Sequence[Any] | None, scale_factors: Sequence[float] | None
) -> list[tuple[int, Size, Size, float | None]]:
    """For each resized axis: its number, the sizes before and after, and the scale if given."""
    count = len(output_size if output_size is not None else scale_factors or ())
    result: list[tuple[int, Size, Size, float | None]] = []
    for n in range(count):
        axis = rank(x) - count + n
        before, factor = size(x, axis), None if scale_factors is None else float(scale_factors[n])
        if output_size is not None:
            after = as_size(output_size[n])
        else:
            assert factor is not None
            after = times(before, factor, largest(x, axis))
        result.append((axis, before, after, factor))
    return result


def step_between(before: Size, after: Size, factor: float | None) -> Value:
    """The input rows for each output row: float32, a scalar or [1]."""
    if factor is not None:
        return floats(1.0 / factor)
    if isinstance(before, int) and isinstance(after, int):
        return floats(float(np.float32(before) / np.float32(after)))
    return op.Div(as_float(before), as_float(after))


def _gathered(
    x: Value,
    output_size: Sequence[Any] | None,
    scale_factors: Sequence[float] | None,
    shift: float,
) -> Value:
    for axis, before, after, factor in resized_axes(x, output_size, scale_factors):
        position = op.Cast(steps(after), to=FLOAT)
        if shift:
            position = op.Add(position, floats(shift))
        row = op.Floor(op.Mul(position, step_between(before, after, factor)))
        last = op.Sub(tensor(before), ints(1))
        x = op.Gather(x, op.Min(op.Cast(row, to=INT64), last), axis=axis)
    return x


def _antialias(
    x: Value,
    output_size: Sequence[Any] | None,
    align_corners: bool,
    scale_factors: Sequence[float] | None,
    kernel: Callable[[Value], Value],
) -> Value:
    matrices = [
        _weights(
            before, after, aligned_step(before, after) if align_corners else None, factor, kernel
        )
        for _, before, after, factor in resized_axes(x, output_size, scale_factors)
    ]
    return in_float32(x, lambda y: apply_matrices(y, matrices))


def aligned_step(before: Size, after: Size) -> Value:
    """torch's step with align_corners: 0 for a single output row."""
    gaps = op.Max(op.Sub(tensor(after), ints(1)), ints(1))
    step = op.Div(op.Cast(op.Sub(tensor(before), ints(1)), to=FLOAT), op.Cast(gaps, to=FLOAT))
    single = op.Equal(tensor(after), ints(1))
    return op.Where(single, floats(0.0), step)


def _weights(
    before: Size,
    after: Size,
    step: Value | None,
    factor: float | None,
    kernel: Callable[[Value], Value],
) -> Value:
    """The filter as a matrix: float32 [out, in], each row's sum 1.

    The filter is 0 outside the rows that torch visits, so no bounds are needed.
    """
    if step is None:
        step = step_between(before, after, factor)
    half = floats(0.5)
    centre = op.Mul(op.Add(op.Cast(steps(after), to=FLOAT), half), step)
    row = op.Add(op.Cast(steps(before), to=FLOAT), half)
    distance = op.Sub(op.Unsqueeze(row, ints(0)), op.Unsqueeze(centre, ints(1)))
    weights = kernel(op.Abs(op.Div(distance, op.Max(step, floats(1.0)))))
    return op.Div(weights, op.ReduceSum(weights, ints(1), keepdims=1))


def _triangle(d: Value) -> Value:
    return op.Relu(op.Sub(floats(1.0), d))


def _cubic(d: Value) -> Value:
    """Keys' cubic with a = -0.5, as in torch with antialias (-0.75 without)."""
    near = op.Sub(op.Mul(floats(1.5), d), floats(2.5))
    near = op.Add(op.Mul(op.Mul(near, d), d), floats(1.0))
    far = op.Add(op.Mul(op.Sub(d, floats(5.0)), d), floats(8.0))
    far = op.Mul(floats(-0.5), op.Sub(op.Mul(far, d), floats(4.0)))
    far = op.Where(op.Less(d, floats(2.0)), far, floats(0.0))
    return op.Where(op.Less(d, floats(1.0)), near, far)


TRANSLATIONS: dict[Any, Callable[..., Any]] = {
    aten.upsample_nearest1d.vec: nearest,
    aten.upsample_nearest2d.vec: nearest,
    aten.upsample_nearest3d.vec: nearest,
    aten._upsample_nearest_exact1d.vec: nearest_exact,
    aten._upsample_nearest_exact2d.vec: nearest_exact,
    aten._upsample_nearest_exact3d.vec: nearest_exact,
    aten._upsample_bilinear2d_aa.vec: antialias_linear,
    aten._upsample_bicubic2d_aa.vec: antialias_cubic,
}
