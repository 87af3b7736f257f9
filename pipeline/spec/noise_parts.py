"""Measures a tolerance for the parts of an output, where these have very different scales.

Example: boxes in pixels beside scores from 0 to 1. An atol that fits the boxes hides any error in
the scores. So indices of an axis whose values are much smaller get an atol of their own, which is
never larger than that of the whole output.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np

from pipeline.errors import InputError
from pipeline.spec.noise import Noise
from pipeline.spec.tensors import Tolerance

Sample = tuple[np.ndarray, np.ndarray, float]  # with rounding, without, and the eps

MOST = 1 << 22  # most elements of a sample that is worth keeping
_GAP = 30.0  # the ratio of two root mean squares that makes them different scales
_FEW = 64  # a part with fewer elements is too small to be measured
# A sigmoid's kernel is right to a unit of 1, not to a unit of a small score. Scores near 0.002 of
# ONNX Runtime differed by 1e-7 from torch's, and 6e-8 was measured for them.
_MARGIN = 10.0
_MARGIN_SIMULATED = 2.0  # a simulation of half precision has such kernels too
_WORTH = 0.5  # a part's atol above this share of the whole atol is not worth stating


def part_axes(rank: int) -> list[int]:
    """The axes of which an index can be a part: channels, and the last axis up to rank 3."""
    return [n for n in sorted({1, rank - 1} if rank <= 3 else {1}) if 0 < n < rank]


def measured(
    noise: Noise,
    samples: Sequence[Sample],
    where: str,
    how: str,
    axes: Collection[int] | None = None,
) -> Tolerance:
    """The tolerance of an output, with an atol for each index of an axis whose scales differ.

    Args:
        noise: The noise of the whole output.
        samples: The pairs of results that it was measured on; none if no axis has a fixed size.
        where: The model and the output.
        how: What was rounded.
        axes: The axes of a fixed size; None if only such axes have one size in all samples.

    Raises:
        InputError: Rounding changes the output so much that a tolerance could hide a fault.
    """
    try:
        whole = noise.tolerance(where, how)
    except InputError:
        found = _of_largest_scale(samples, how, axes)
        if found is None:
            raise
        whole = found
    margin = _MARGIN_SIMULATED if noise.simulated else _MARGIN
    for axis in _part_axes(samples, axes):
        atols = np.full(samples[0][1].shape[axis], whole.atol)
        for part in _scales(root_mean_square([exact for _, exact, _ in samples], axis))[:-1]:
            own = _tolerance(samples, axis, part, how, noise.simulated)
            if own is not None and own.rtol <= whole.rtol:
                atols[part] = min(whole.atol, margin * own.atol)
        if (atols < _WORTH * whole.atol).any():
            return replace(whole, axis=axis, parts=tuple(atols.tolist()))
    return whole


def _part_axes(samples: Sequence[Sample], axes: Collection[int] | None) -> list[int]:
    """The axes of which an index can be a part: they have one size in all samples."""
    if not samples or not all(exact.size for _, exact, _ in samples):
        return []
    return [
        axis
        for axis in part_axes(samples[0][0].ndim)
        if (axes is None or axis in axes) and len({e.shape[axis] for _, e, _ in samples}) == 1
    ]


def _of_largest_scale(
    samples: Sequence[Sample], how: str, axes: Collection[int] | None
) -> Tolerance | None:
    """The tolerance of an output's largest scale, for an output that has none as a whole.

    Example: four box sides in pixels beside 80 scores near 1e-5. Most values are scores, so the
    boxes' rounding seems to be larger than the output.

    Returns:
        The tolerance; None if no axis has several scales, or if one of them can't be measured.
    """
    for axis in _part_axes(samples, axes):
        scales = _scales(root_mean_square([exact for _, exact, _ in samples], axis))
        every = [_tolerance(samples, axis, part, how) for part in scales]
        found = [tolerance for tolerance in every if tolerance is not None]
        if len(found) == len(every) > 1:
            return replace(found[-1], rtol=max(tolerance.rtol for tolerance in found))
    return None


def _scales(size: np.ndarray) -> list[np.ndarray]:
    """The indices of each scale, the largest last. Indices that are all zero are in none."""
    order = np.argsort(size)
    order = order[size[order] > 0]
    gaps = np.flatnonzero(size[order][1:] >= _GAP * size[order][:-1]) + 1
    return [np.sort(part) for part in np.split(order, gaps)]


def _tolerance(
    samples: Sequence[Sample], axis: int, part: np.ndarray, how: str, simulated: bool = False
) -> Tolerance | None:
    """The tolerance of some indices; None if none can be measured."""
    noise: Noise | None = None
    for moved, exact, eps in samples:
        a, b = moved.take(part, axis), exact.take(part, axis)
        if a.size < _FEW:
            return None
        noise = Noise.between(a, b, eps, simulated=simulated).worst(noise)
    try:
        return noise.tolerance("", how) if noise else None
    except InputError:  # rounding moves this part too far
        return None


def root_mean_square(arrays: Sequence[np.ndarray], axis: int) -> np.ndarray:
    """The root mean square for each index of the axis, over all arrays."""
    total, count = 0.0, 0
    for array in arrays:
        rest = tuple(n for n in range(array.ndim) if n != axis)
        wide = array.astype(np.float32) if array.dtype == np.float16 else array
        with np.errstate(over="ignore"):
            total = total + np.square(wide).sum(rest, dtype=np.float64)
        count += array.size // array.shape[axis]
    return np.asarray(np.sqrt(total / count))
