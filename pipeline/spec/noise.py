"""The change of an output by rounding, and the tolerance for it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from pipeline.errors import InputError
from pipeline.spec.tensors import Tolerance

_RTOL = 1e-4  # the smallest rtol of a measured tolerance
_MARGIN, _MARGIN_HALF = 50, 4  # factors on the measured rounding, the second in half precision
# Units of the simulated rounding, in the smallest rtol and atol. Ten models differed by 0.7 to 4.2
# times the noise, the last where the noise was a sixth of such a unit.
_ULPS_SIMULATED = 2
_MARGIN_LEAST = 10  # the smallest factor, where `_MOST` leaves no larger one: samples of an image
_MARGIN_LEAST_SIMULATED = 2  # the same for simulated rounding
# the smallest atol, as a share of an output's usual value: a measured one may be too small.
# Example: a mean over 128 values near 1 has the usual value 0.09, and rounding moved it by 3.7e-8.
# A float32 engine (TensorRT 8.6.0, H200) differed by 5.0e-7, a share of 5.5e-6.
_LEAST = 2e-5
_ULPS = 4  # the smallest atol in units in the last place of the root mean square
# the largest atol, as a share of their root mean square: a larger one hides faults
_MOST, _MOST_HALF, _MOST_BF16 = 1e-2, 5e-2, 0.2
_MOST_SIMULATED = 0.5  # the same where a simulation of half precision moves it further
_HALF = 1e-4  # a type with a larger eps is half precision
_BF16 = 2e-3  # a type with a larger eps is bfloat16
# times the value that a tenth of the distinct ones exceed: larger values fill a mask
_USUAL = 1e3
_WHOLE = 0.25  # the largest atol for whole numbers


@dataclass(frozen=True)
class Noise:
    """The change of an output by rounding.

    Args:
        moved: The largest change of an element.
        off: The largest change of an element that a relative tolerance does not cover.
        usual: The median of the distinct absolute values, without zero.
        rms: The root mean square without values such as -1e9 in a mask: those above 1000 times
            the value that a tenth of the distinct ones exceed.
        eps: The machine epsilon of the output's type.
        steep: The largest change of an element as a share of its value, times the margin, of those
            that the largest legal atol does not cover.
        whole: Whether all values are whole numbers that rounding does not change, and not all
            are zero.
        simulated: Whether a simulation rounded as another precision does, with this eps. Then
            there always is a tolerance: at most half of the root mean square, however large the
            noise is.
    """

    moved: float
    off: float
    usual: float
    rms: float
    eps: float
    whole: bool
    steep: float = math.inf
    simulated: bool = False

    @staticmethod
    def between(
        moved: np.ndarray, exact: np.ndarray, eps: float, *, simulated: bool = False
    ) -> Noise:
        """Measures the noise between two results of the same output.

        Args:
            moved: The output with rounding, of any type.
            exact: The output without rounding, or with another rounding, of any type.
            eps: The machine epsilon of the type that the model returns.
            simulated: Whether the rounding was simulated. Then eps is that of its precision.
        """
        limits = _Limits.of(eps, simulated)
        a, b = moved.astype(np.float64).ravel(), exact.astype(np.float64).ravel()
        size = np.abs(b)
        different = np.unique(size[size > 0])
        usual = float(np.median(different)) if len(different) else 0.0
        large = float(np.percentile(different, 90)) if len(different) else 0.0
        ordinary = size <= _USUAL * large
        with np.errstate(over="ignore", invalid="ignore"):
            off = np.abs(a - b)
            # -3.4e38 and -1.8e308 are the lowest numbers of two types, so they are not noise
            same = (size > 1e37) & (np.abs(a) > 1e37) & (np.sign(a) == np.sign(b))
            covered = same | (limits.margin * off <= limits.rtol * size)
        rms = float(np.sqrt(np.square(b[ordinary]).mean())) if ordinary.any() else 0.0
        far = ~same & (limits.margin * off > limits.most * min(rms, usual))
        with np.errstate(divide="ignore", invalid="ignore"):
            shares = np.nan_to_num(limits.margin * off[far] / size[far], nan=np.inf)
        whole = bool(size.any()) and np.array_equal(a, b) and np.array_equal(b, np.round(b))
        return Noise(
            float(off[~same].max(initial=0)),
            float(off[~covered].max(initial=0)),
            usual,
            rms,
            eps,
            whole,
            float(shares.max(initial=0)),
            simulated,
        )

    @property
    def silent(self) -> bool:
        """True for an output that is empty or 0, with and without rounding."""
        return not (self.rms or self.moved)

    def worst(self, other: Noise | None) -> Noise:
        """The larger noise of two runs, field by field. A silent run does not count.

        So an output may be empty at some sizes, and be whole numbers at all others.
        """
        if other is None or other.silent:
            return self
        if self.silent:
            return other
        return Noise(
            max(self.moved, other.moved),
            max(self.off, other.off),
            max(self.usual, other.usual),
            max(self.rms, other.rms),
            max(self.eps, other.eps),
            self.whole and other.whole,
            max(self.steep, other.steep),
            self.simulated,
        )

    def tolerance(self, where: str, how: str) -> Tolerance:
        """The tolerance for an output.

        Args:
            where: The model and the output, for an error.
            how: What was rounded, for the text.

        Raises:
            InputError: Rounding changes the output so much that a tolerance could hide a fault,
                and is not simulated.
        """
        if self.whole:
            atol = min(_WHOLE, _RTOL * self.usual)
            return Tolerance(0.0, atol, "measured: whole numbers, which must be equal")
        limits = _Limits.of(self.eps, self.simulated)
        rtol, most = limits.rtol, limits.most
        wanted = limits.margin * self.off
        if self.eps <= _HALF and wanted > most * self.rms >= _MARGIN_LEAST * self.off:
            wanted = most * self.rms
        # a few large values must not widen the tolerance of the usual ones
        rms = min(self.rms, _USUAL * self.usual)
        rules = (  # of equals, the first one counts
            (wanted, f"{limits.margin:g} times that is allowed"),
            (
                limits.ulps * self.eps * rms,
                f"at least {limits.ulps} units in the last place of its root mean square are "
                "allowed, which is more",
            ),
            (_LEAST * self.usual, f"at least {_LEAST:g} of its usual value is allowed"),
        )
        atol, rule = max(rules, key=lambda each: each[0])
        if atol > most * self.rms and rtol < self.steep <= most:
            # most values are tiny, and rounding moves the others by a share of their value
            rtol, atol = float(f"{1.05 * self.steep:.2g}"), most * min(self.rms, self.usual)
            rule = f"{rtol:g} of an element's value is allowed"
        why = f"measured: {how} moves it by {self.moved:.2g}, its usual value is {self.usual:.2g}"
        if self.simulated and not atol <= most * rms:
            # a right engine passes if its rounding is that of the simulation
            atol = max(most * rms, min(_MARGIN_LEAST_SIMULATED * self.off, _MOST_SIMULATED * rms))
            why += f"; {atol / rms if rms else 0:.0%} of its root mean square is allowed"
        elif self.simulated:
            why += f"; {rule}"
        if not math.isfinite(atol) or (atol > most * self.rms and not self.simulated):
            raise InputError(
                f"{where}: {how} alone moves it by {self.off:.2g}, and its root mean square is "
                f"{self.rms:.2g}: no tolerance can be measured. State one (--tolerance RTOL,ATOL, "
                "or tolerance= of the spec), or set the inputs' range (--range, or low= and high=)"
            )
        return Tolerance(rtol, float(f"{atol:.2g}"), why)


@dataclass(frozen=True)
class _Limits:
    """What the tolerance for a kind of rounding may be.

    Args:
        margin: The factor on the measured rounding.
        rtol: The smallest rtol.
        ulps: The smallest atol in units in the last place of the root mean square.
        most: The largest atol, as a share of the root mean square.
    """

    margin: float
    rtol: float
    ulps: float
    most: float

    @staticmethod
    def of(eps: float, simulated: bool) -> _Limits:
        half = eps > _HALF
        margin, ulps = (_MARGIN_HALF if half else _MARGIN), _ULPS
        most = _MOST_HALF if half else _MOST
        if simulated:
            ulps = _ULPS_SIMULATED
            most = _MOST_BF16 if eps > _BF16 else most
        return _Limits(margin, max(_RTOL, ulps * eps), ulps, most)


EQUAL = Tolerance(_RTOL, 0.0, "integers and booleans must be equal")
