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
_WORTH = 0.5  # a part's atol above this share of the whole atol is not worth stating


def part_axes(rank: int) -> list[int]:
    """The axes of which an index can be a part: channels, and the last axis up to rank 3."""
    return [n for n in sorted({1, rank - 1} if rank <= 3 else {1}) if 0 < n < rank]


def with_parts(
    whole: Tolerance,
    samples: Sequence[Sample],
    where: str,
    how: str,
    axes: Collection[int] | None = None,
) -> Tolerance:
    """The tolerance with an atol for each index of an axis, if its indices differ in scale.

    Args:
        whole: The measured tolerance of the whole output.
        samples: The pairs of results that it was measured on.
        where: The model and the output.
        how: What was rounded.
        axes: The axes of a fixed size; None if only such axes have one size in all samples.
    """
    rank = samples[0][0].ndim if samples else 0
    for axis in part_axes(rank):
        counts = {exact.shape[axis] for _, exact, _ in samples}
        known = axes is None or axis in axes
        if not known or len(counts) > 1 or not all(exact.size for _, exact, _ in samples):
            continue
        atols = np.full(counts.pop(), whole.atol)
        for part in _scales(root_mean_square([exact for _, exact, _ in samples], axis)):
            atols[part] = min(whole.atol, _atol(samples, axis, part, where, how))
        if (atols < _WORTH * whole.atol).any():
            return replace(whole, axis=axis, parts=tuple(atols.tolist()))
    return whole


def _scales(size: np.ndarray) -> list[np.ndarray]:
    """The indices of each scale but the largest one. Indices that are all zero are in none."""
    order = np.argsort(size)
    order = order[size[order] > 0]
    gaps = np.flatnonzero(size[order][1:] >= _GAP * size[order][:-1]) + 1
    return [np.sort(part) for part in np.split(order, gaps)[:-1]]


def _atol(samples: Sequence[Sample], axis: int, part: np.ndarray, where: str, how: str) -> float:
    """The atol of some indices; infinite if none can be measured."""
    noise: Noise | None = None
    for moved, exact, eps in samples:
        a, b = moved.take(part, axis), exact.take(part, axis)
        if a.size < _FEW:
            return float("inf")
        noise = Noise.between(a, b, eps).worst(noise)
    try:
        return _MARGIN * noise.tolerance(where, how).atol if noise else float("inf")
    except InputError:  # rounding moves this part too far
        return float("inf")


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
