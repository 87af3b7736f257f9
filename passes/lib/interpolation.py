"""Resize along one axis in plain ops: the position of each output pixel, and its weights.

The formulas are those of the ONNX standard. The order of operations and float32 are those of ONNX
Runtime, so that a coordinate between two pixels rounds to the same side. `n` is the axis' size
before, `out` the size after. The pixel at ``j`` gets a weight for the coordinate ``x``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from pipeline.passes.lib.chain import Chain
from pipeline.passes.lib.values import Value

# ONNX Runtime 1.31 treats a coordinate this near the middle of two pixels as the middle
_TIE = 1e-6


@dataclass(frozen=True)
class ResizedAxis:
    """One resized axis.

    Args:
        place: which axis, not negative.
        before, after: its size before and after, float32 of shape ``(1,)``.
        scale: size after / size before, or the given scale; float32 of shape ``(1,)``.
        roi: start and end of the region, for tf_crop_and_resize.
    """

    place: int
    before: Value
    after: Value
    scale: Value
    roi: tuple[float, float] = (0.0, 1.0)


@dataclass(frozen=True)
class Interpolation:
    """How to interpolate: the attributes of Resize, with its defaults."""

    mode: str = "nearest"
    transform: str = "half_pixel"
    nearest: str = "round_prefer_floor"
    cubic: float = -0.75
    exclude_outside: bool = False
    antialias: bool = False
    extrapolation: float = 0.0


def resize(
    c: Chain, data: gs.Tensor, rank: int, axis: ResizedAxis, kind: Interpolation
) -> gs.Tensor:
    """`data` (float32; for nearest any type) resized along one axis."""
    x = coordinates(axis, kind.transform)
    if kind.antialias and kind.mode != "nearest":
        return _filtered(c, data, rank, axis, kind, x)
    made = None
    for index, weight in _taps(axis, kind, x):
        part = c.op("Gather", data, index.data, dtype=data.dtype, axis=axis.place)
        if weight is not None:
            part = c.op("Mul", part, _along(weight, axis.place, rank).data, dtype=data.dtype)
        made = part if made is None else c.op("Add", made, part, dtype=data.dtype)
    if kind.transform == "tf_crop_and_resize":
        last = axis.before - 1.0
        inside = (x < 0.0).where(0.0, (x > last).where(0.0, 1.0)) > 0.5
        beyond = np.array(kind.extrapolation, data.dtype)
        made = c.op("Where", _along(inside, axis.place, rank).data, made, beyond, dtype=data.dtype)
    assert made is not None
    return made


def coordinates(axis: ResizedAxis, transform: str) -> Value:
    """Where each output pixel lies in the input, float32 of shape ``(out,)``."""
    i = axis.after.cast(np.int64).upto().cast(np.float32)
    n, out, scale = axis.before, axis.after, axis.scale
    last = n - 1.0
    many = out > 1.0
    steps = (out - 1.0).at_least(1.0)
    half = (i + 0.5) / scale
    if transform == "asymmetric":
        x = i / scale
    elif transform == "align_corners":
        x = many.where(i * last / steps, i * 0.0)
    elif transform == "pytorch_half_pixel":
        x = many.where(half - 0.5, i * 0.0)
    elif transform == "tf_half_pixel_for_nn":
        x = half
    elif transform == "half_pixel_symmetric":
        # the exact size is not whole: the output lies in its middle
        x = half - 0.5 + n / 2.0 * (out / (scale * n) * -1.0 + 1.0)
    elif transform == "tf_crop_and_resize":
        start, end = (np.float32(bound) for bound in axis.roi)
        middle = last * float(np.float32(0.5) * (start + end))
        x = last * float(start) + i * float(end - start) * last / steps
        x = many.where(x, middle + i * 0.0)
    else:
        x = half - 0.5
    return x


def _taps(axis: ResizedAxis, kind: Interpolation, x: Value) -> list[tuple[Value, Value | None]]:
    """The pixels to add: int64 indices and float32 weights, each of shape ``(out,)``."""
    last = axis.before - 1.0
    low = x.floor()
    if kind.mode == "nearest":
        part = x - low
        if kind.nearest == "floor":
            near = low
        elif kind.nearest == "ceil":
            near = x.ceil()
        elif kind.nearest == "round_prefer_ceil":
            near = low + (part < 0.5 - _TIE).where(0.0, 1.0)
        else:
            near = low + (part > 0.5 + _TIE).where(1.0, 0.0)
        return [(_clamp(near, last), None)]
    if kind.mode == "linear":
        x = x.at_least(0.0).at_most(last)
        low = x.floor()
        part = x - low
        return [(_clamp(low, last), part * -1.0 + 1.0), (_clamp(low + 1.0, last), part)]
    part = x - low
    places = [low + float(step) for step in (-1, 0, 1, 2)]
    a = kind.cubic
    weights = [
        _outer(part + 1.0, a),
        _inner(part, a),
        _inner(part * -1.0 + 1.0, a),
        _outer(part * -1.0 + 2.0, a),
    ]
    if kind.exclude_outside:
        weights = [_inside(p, last).where(w, 0.0) for p, w in zip(places, weights, strict=True)]
        total = weights[0] + weights[1] + weights[2] + weights[3]
        weights = [weight / total for weight in weights]
    return [(_clamp(p, last), w) for p, w in zip(places, weights, strict=True)]


def _filtered(
    c: Chain, data: gs.Tensor, rank: int, axis: ResizedAxis, kind: Interpolation, x: Value
) -> gs.Tensor:
    """`data` times a matrix of weights. The kernel is widened by 1 / scale if that is above 1.

    Pixels beyond the border repeat the border's pixel. With exclude_outside, which torch's
    exporter writes, they do not count.
    """
    shrink = axis.scale.at_most(1.0)
    if kind.exclude_outside:
        j = axis.before.cast(np.int64).upto().cast(np.float32)
    else:
        reach = (Value(c, np.array([_RADIUS[kind.mode]], np.float32)) / shrink).ceil() + 1.0
        j = (axis.before + reach * 2.0).cast(np.int64).upto().cast(np.float32) - reach
        index = _clamp(j, axis.before - 1.0)
        data = c.op("Gather", data, index.data, dtype=data.dtype, axis=axis.place)
    distance = ((j.reshape(1, -1) - x.reshape(-1, 1)) * shrink).abs()
    if kind.mode == "linear":
        weights = (distance * -1.0 + 1.0).at_least(0.0)
    else:
        far = (distance < 2.0).where(_outer(distance, kind.cubic), 0.0)
        weights = (distance < 1.0).where(_inner(distance, kind.cubic), far)
    # row sums as a product, since the form of Reduce depends on the opset
    ones = (j * 0.0 + 1.0).reshape(-1, 1)
    weights = weights / (weights @ ones)
    return _contract(c, data, rank, axis.place, weights)


def _contract(c: Chain, data: gs.Tensor, rank: int, axis: int, weights: Value) -> gs.Tensor:
    """Sum over ``axis`` of weights ``(out, n)`` times `data`."""
    dtype = data.dtype
    if axis == rank - 2:
        return c.op("MatMul", weights.data, data, dtype=dtype)
    order = [*(a for a in range(rank) if a != axis), axis]
    moved = axis != rank - 1
    if moved:
        data = c.op("Transpose", data, dtype=dtype, perm=order)
    if weights.known is not None:
        across: Any = np.ascontiguousarray(weights.known.T)
    else:
        across = c.op("Transpose", weights.data, dtype=dtype, perm=[1, 0])
    # a vector times a matrix is a vector, so rank 1 needs no Transpose
    made = c.op("MatMul", data, across, dtype=dtype)
    if moved:
        made = c.op("Transpose", made, dtype=dtype, perm=np.argsort(order).tolist())
    return made


_RADIUS = {"linear": 1.0, "cubic": 2.0}


def _inner(d: Value, a: float) -> Value:
    """Keys' cubic kernel for distances in 0..1."""
    return ((d * (a + 2.0) - (a + 3.0)) * d) * d + 1.0


def _outer(d: Value, a: float) -> Value:
    """Keys' cubic kernel for distances in 1..2."""
    return ((d * a - 5.0 * a) * d + 8.0 * a) * d - 4.0 * a


def _inside(place: Value, last: Value) -> Value:
    return (place < 0.0).where(0.0, (place > last).where(0.0, 1.0)) > 0.5


def _clamp(place: Value, last: Value) -> Value:
    return place.at_least(0.0).at_most(last).cast(np.int64)


def _along(values: Value, axis: int, rank: int) -> Value:
    """1-D values laid along an axis, to be broadcast over the others."""
    return values.reshape(-1, *[1] * (rank - 1 - axis))
