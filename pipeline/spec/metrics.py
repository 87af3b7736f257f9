"""Measures of an error that mean something to the user of an output.

A comparison passes or fails by the tolerance alone. A metric says beside it what the difference
amounts to: pixels, decibels, or other decisions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

Metric = Literal["end-point-error", "psnr", "top-1"]
METRICS: tuple[Metric, ...] = get_args(Metric)


@dataclass(frozen=True)
class _Rule:
    """How a metric is computed, whether less is better, and its text."""

    of: Callable[[np.ndarray, np.ndarray], float]
    less: bool
    text: str


def _off(want: np.ndarray, got: np.ndarray) -> np.ndarray:
    """The difference; that of half precision is computed in float32."""
    off: np.ndarray = np.subtract(got, want, dtype=np.result_type(want, got, np.float32))
    return off


def _end_point_error(want: np.ndarray, got: np.ndarray) -> float:
    return float(np.linalg.norm(_off(want, got), axis=1).mean(dtype=np.float64))


def _psnr(want: np.ndarray, got: np.ndarray) -> float:
    off = math.sqrt(np.square(_off(want, got)).mean(dtype=np.float64))
    peak = float(want.max()) - float(want.min())
    if off == 0:
        return math.inf
    return 20 * math.log10(peak / off) if peak else -math.inf


def _top_1(want: np.ndarray, got: np.ndarray) -> float:
    return float((want.argmax(-1) == got.argmax(-1)).mean())


_RULES: Mapping[Metric, _Rule] = {
    "end-point-error": _Rule(_end_point_error, True, "mean end-point error {:.3g}"),
    "psnr": _Rule(_psnr, False, "peak signal-to-noise ratio {:.1f} dB"),
    "top-1": _Rule(_top_1, False, "the largest value is the same in {:.2%}"),
}


def measured(metric: Metric, want: np.ndarray, got: np.ndarray) -> float | None:
    """The metric between two outputs of the same shape; None if it is not defined or not finite.

    Args:
        metric: ``end-point-error``: the mean length of the difference of two vectors along axis 1,
            as for optical flow ``[b, 2, h, w]``, in the output's units. ``psnr``: the peak
            signal-to-noise ratio in dB, where the peak is the range of the reference's values.
            ``top-1``: the share of places where the largest value of the last axis is at the same
            index, as for the logits of classes or tokens.
        want: The reference, of any float dtype.
        got: The other output.
    """
    least = 2 if metric == "end-point-error" else 1
    if want.shape != got.shape or want.ndim < least or not want.size:
        return None
    with np.errstate(all="ignore"):
        value = _RULES[metric].of(want, got)
    return value if math.isfinite(value) else None


def worst(metric: Metric, values: list[float]) -> float:
    """The worst of several values of a metric."""
    return max(values) if _RULES[metric].less else min(values)


def metric_text(metric: Metric, value: float) -> str:
    """A metric's value in words."""
    return _RULES[metric].text.format(value)
