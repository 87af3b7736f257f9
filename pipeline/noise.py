"""What rounding does to an output, and the tolerance that follows."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from pipeline.errors import InputError
from pipeline.tensors import Tolerance

_RTOL = 1e-4  # of a measured tolerance
_MARGIN = 50  # times the rounding that was measured
_LEAST = 4e-6  # of an output's usual value: below it, rounding was lucky
_ULP = 5e-7  # of the root mean square: sums of numbers of that size
_MOST = 1e-2  # of the root mean square of the usual values: above it, a fault could hide
_USUAL = 1e3  # times the median: what is larger is a mask's filling, or saturated
_WHOLE = 0.25  # between whole numbers


@dataclass(frozen=True)
class Noise:
    """How far rounding moves an output.

    Args:
        off: the most that it moves an element by for which a relative tolerance does not stand
            in already.
        usual: the median of the different values, without zero.
        rms: the root mean square of the usual values, those up to 1000 times the median: a mask
            filled with -1e9 says nothing of what is beside it.
        whole: all values are whole numbers that rounding leaves alone, not all of them zero.
    """

    off: float
    usual: float
    rms: float
    whole: bool

    @staticmethod
    def between(moved: np.ndarray, exact: np.ndarray) -> Noise:
        """From an output and the same output without the rounding, or with another."""
        a, b = moved.astype(np.float64).ravel(), exact.astype(np.float64).ravel()
        size = np.abs(b)
        different = np.unique(size[size > 0])
        usual = float(np.median(different)) if len(different) else 0.0
        ordinary = size <= _USUAL * usual
        with np.errstate(over="ignore", invalid="ignore"):
            off = np.abs(a - b)
            # -3.4e38 and -1.8e308 are the least numbers of two types, not noise
            same = (size > 1e37) & (np.abs(a) > 1e37) & (np.sign(a) == np.sign(b))
            covered = same | (_MARGIN * off <= _RTOL * size)
        square = np.square(b[ordinary])
        whole = bool(size.any()) and np.array_equal(a, b) and np.array_equal(b, np.round(b))
        return Noise(
            float(off[~covered].max(initial=0)),
            usual,
            float(np.sqrt(square.mean())) if len(square) else 0.0,
            whole,
        )

    def worst(self, other: Noise | None) -> Noise:
        """The noise of two runs of different sizes together."""
        if other is None:
            return self
        return Noise(
            max(self.off, other.off),
            max(self.usual, other.usual),
            max(self.rms, other.rms),
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
            return Tolerance(0.0, _WHOLE, "measured: whole numbers, which have to be equal")
        atol = max(_MARGIN * self.off, _LEAST * self.usual, _ULP * self.rms)
        if not math.isfinite(atol) or atol > _MOST * self.rms:
            raise InputError(
                f"{where}: {how} alone moves it by {self.off:.2g} where its root mean square is "
                f"{self.rms:.2g}: no tolerance can be measured; say one (--tolerance RTOL,ATOL, "
                "or tolerance= of the spec), or give the inputs a range (low=, high=)"
            )
        why = f"measured: {how} moves it by {self.off:.2g}, its usual value is {self.usual:.2g}"
        return Tolerance(_RTOL, float(f"{atol:.2g}"), why)


EQUAL = Tolerance(_RTOL, 0.0, "integers and booleans have to be equal")
