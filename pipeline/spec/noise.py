"""What rounding does to an output, and the tolerance that follows."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from pipeline.errors import InputError
from pipeline.spec.tensors import Tolerance

_RTOL = 1e-4  # of a measured tolerance, at least
_MARGIN, _MARGIN_HALF = 50, 4  # times the rounding that was measured; in half precision
# Of an output's usual value: below it, rounding was lucky. A mean over 128 values near 1 (usual
# value 0.09, moved by 3.7e-8) came out of a float32 engine of TensorRT 8.6.0 on an H200 5.0e-7
# off: 5.5e-6.
_LEAST = 2e-5
_ULPS = 4  # of the output's type, at the root mean square: sums of numbers of that size
# of the root mean square of the usual values: above it, a fault could hide
_MOST, _MOST_HALF = 1e-2, 5e-2
_HALF = 1e-4  # the least eps of half precision
_USUAL = 1e3  # times the median: what is larger is a mask's filling, or saturated
_WHOLE = 0.25  # between whole numbers


@dataclass(frozen=True)
class Noise:
    """How far rounding moves an output.

    Args:
        moved: the most that it moves an element by.
        off: the same of the elements that a relative tolerance does not cover already.
        usual: the median of the different values, without zero.
        rms: the root mean square of the usual values, those up to 1000 times the median: a mask
            filled with -1e9 says nothing of what is beside it.
        eps: of the output's type.
        whole: all values are whole numbers that rounding leaves alone, not all of them zero.
    """

    moved: float
    off: float
    usual: float
    rms: float
    eps: float
    whole: bool

    @staticmethod
    def between(moved: np.ndarray, exact: np.ndarray, eps: float) -> Noise:
        """From an output and the same output without the rounding, or with another.

        Args:
            moved, exact: the outputs, of any type.
            eps: of the type that the model gives them in.
        """
        a, b = moved.astype(np.float64).ravel(), exact.astype(np.float64).ravel()
        size = np.abs(b)
        different = np.unique(size[size > 0])
        usual = float(np.median(different)) if len(different) else 0.0
        ordinary = size <= _USUAL * usual
        with np.errstate(over="ignore", invalid="ignore"):
            off = np.abs(a - b)
            # -3.4e38 and -1.8e308 are the least numbers of two types, not noise
            same = (size > 1e37) & (np.abs(a) > 1e37) & (np.sign(a) == np.sign(b))
            margin = _MARGIN_HALF if eps > _HALF else _MARGIN
            covered = same | (margin * off <= max(_RTOL, _ULPS * eps) * size)
        square = np.square(b[ordinary])
        whole = bool(size.any()) and np.array_equal(a, b) and np.array_equal(b, np.round(b))
        return Noise(
            float(off[~same].max(initial=0)),
            float(off[~covered].max(initial=0)),
            usual,
            float(np.sqrt(square.mean())) if len(square) else 0.0,
            eps,
            whole,
        )

    def worst(self, other: Noise | None) -> Noise:
        """The noise of two runs of different sizes together."""
        if other is None:
            return self
        return Noise(
            max(self.moved, other.moved),
            max(self.off, other.off),
            max(self.usual, other.usual),
            max(self.rms, other.rms),
            max(self.eps, other.eps),
            self.whole and other.whole,
        )

    def tolerance(self, where: str, how: str) -> Tolerance:
        """The tolerance for an output.

        Args:
            where: whose output, for an error.
            how: what was rounded.

        Raises:
            InputError: rounding moves it so far that a fault could hide behind a tolerance.
        """
        if self.whole:
            atol = min(_WHOLE, _RTOL * self.usual)
            return Tolerance(0.0, atol, "measured: whole numbers, which have to be equal")
        half = self.eps > _HALF
        margin, most = (_MARGIN_HALF, _MOST_HALF) if half else (_MARGIN, _MOST)
        atol = max(margin * self.off, _LEAST * self.usual, _ULPS * self.eps * self.rms)
        if not math.isfinite(atol) or atol > most * self.rms:
            raise InputError(
                f"{where}: {how} alone moves it by {self.off:.2g} where its root mean square is "
                f"{self.rms:.2g}: no tolerance can be measured; say one (--tolerance RTOL,ATOL, or "
                "tolerance= of the spec), or give the inputs a range (--range, or low= and high=)"
            )
        why = f"measured: {how} moves it by {self.moved:.2g}, its usual value is {self.usual:.2g}"
        return Tolerance(max(_RTOL, _ULPS * self.eps), float(f"{atol:.2g}"), why)


EQUAL = Tolerance(_RTOL, 0.0, "integers and booleans have to be equal")
