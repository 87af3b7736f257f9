"""How far an array is from the one that is wanted: every comparison of numbers measures it here.

What each comparison makes of it is its own: a tolerance, a part of the largest value, a norm.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pipeline.spec.tensors import Tolerance

_LEAST = float(np.finfo(np.float64).tiny)


@dataclass(frozen=True, eq=False)
class Difference:
    """Two arrays of one shape, element by element.

    Elements are the same if they are equal, or both NaN. Infinities of one sign are equal.

    Args:
        want: the array that the other is compared with.
        got: the other, of the same shape.
        wide: True computes in float64. False computes floats in their own dtype (float16 in
            float32), which takes half the memory for large outputs.
    """

    want: np.ndarray
    got: np.ndarray
    wide: bool = True

    @cached_property
    def same(self) -> np.ndarray:
        """Which elements are the same, compared in their own dtypes: float64 does not hold all
        integers of 64 bits."""
        same = np.asarray(self.want == self.got)
        if self.want.dtype.kind == "f":
            same |= np.isnan(self.want) & np.isnan(self.got)
        return same

    @cached_property
    def off(self) -> np.ndarray:
        """|got - want| of each element: 0 for the same NaN or infinity, infinite for others."""
        a, b = self._numbers
        with np.errstate(invalid="ignore", over="ignore"):
            off = np.asarray(np.subtract(a, b))
        np.abs(off, out=off)
        odd = ~np.isfinite(off)
        if odd.any():
            off[odd] = np.where(self.same[odd], 0.0, np.inf)
        return off

    @property
    def largest(self) -> float:
        """The largest difference; infinite where NaN or infinity is in one array only.

        Integers that differ do so by 1 at least, also where float64 can't tell them apart.
        """
        largest = float(self.off.max(initial=0.0))
        return max(largest, 1.0) if self.want.dtype.kind in "iu" and self.unequal else largest

    @property
    def largest_finite(self) -> float:
        """The largest difference among the elements that are finite in both arrays."""
        finite = np.isfinite(self.want) & np.isfinite(self.got)
        return float(self.off[finite].max(initial=0.0))

    @property
    def scale(self) -> float:
        """The largest magnitude among the finite elements of `want`; 0 if there are none."""
        values, finite = self._numbers[0], np.isfinite(self.want)
        return float(np.abs(values if finite.all() else values[finite]).max(initial=0.0))

    @property
    def unequal(self) -> int:
        """How many elements are not the same."""
        return int(self.same.size - np.count_nonzero(self.same))

    @property
    def finite_alike(self) -> bool:
        """True if both arrays are finite at the same places."""
        return bool((np.isfinite(self.want) == np.isfinite(self.got)).all())

    @property
    def odd_alike(self) -> bool:
        """True if both arrays have the same NaN and infinities at the same places."""
        finite = np.isfinite(self.want) & np.isfinite(self.got)
        return bool(self.same[~finite].all())

    def allowed(self, tolerance: Tolerance) -> np.ndarray:
        """How far each element may be off: atol, or rtol of `want` where that is more."""
        allowed = np.asarray(np.abs(self._numbers[0]))
        with np.errstate(invalid="ignore"):  # 0 times infinity
            allowed *= tolerance.rtol
        np.maximum(allowed, tolerance.atol, out=allowed)
        return allowed

    def within(self, tolerance: Tolerance) -> bool:
        """True if every float is as near as the tolerance allows.

        Of integers and booleans, the share that may differ is `Tolerance.differing`.
        """
        if self.want.dtype.kind != "f":
            return self.unequal <= tolerance.differing * self.same.size
        near = (self.off <= self.allowed(tolerance)) & ~np.isinf(self.off)
        return bool((self.same | near).all())

    def norm(self, least: float) -> float:
        """||got - want|| / ||want||, of the elements that are finite.

        Infinite where NaN or infinity is in one array only.

        Args:
            least: taken for the norm of `want` where that is smaller.
        """
        if self.same.all():
            return 0.0
        a, b = self._numbers
        off = self.off[~self.same]
        if not (np.isfinite(a[~self.same]).all() and np.isfinite(b[~self.same]).all()):
            return float("inf")
        far = float(np.sqrt(np.square(off).sum()))
        whole = float(np.sqrt(np.square(a[np.isfinite(a)]).sum()))
        return far / max(whole, least)

    @cached_property
    def _numbers(self) -> tuple[np.ndarray, np.ndarray]:
        """`want` and `got` in the dtype that is computed in."""
        kind = np.dtype(np.float64)
        if not self.wide and self.want.dtype.kind == "f":
            kind = np.promote_types(self.want.dtype, np.float32)
        return self.want.astype(kind, copy=False), self.got.astype(kind, copy=False)


def apart(
    want: np.ndarray | None, got: np.ndarray | None, tolerance: Tolerance
) -> tuple[float, bool]:
    """The largest difference, and whether every element is within the tolerance of `want`.

    0 only for the same bits; infinity where one is missing, of another shape or dtype, or not
    finite where the other is another value.
    """
    if want is None or got is None or want.shape != got.shape or want.dtype != got.dtype:
        return float("inf"), False
    if want.tobytes() == got.tobytes():
        return 0.0, True
    difference = Difference(want, got)
    # numbers that are equal in other bits, such as -0.0, differ by the least that can be said
    return max(difference.largest, _LEAST), difference.within(tolerance)
