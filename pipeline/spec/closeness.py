"""Measures how far an array differs from a reference. All comparisons of numbers use this module.

Each comparison then uses its own limit: a tolerance, a part of the largest value, or a norm.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pipeline.errors import InputError
from pipeline.spec.tensors import Tolerance

_LEAST = float(np.finfo(np.float64).tiny)


@dataclass(frozen=True, eq=False)
class Difference:
    """The difference of two arrays of one shape, element by element.

    Elements are the same if they are equal, or both NaN. Infinities of one sign are equal.

    Args:
        want: The reference.
        got: The array to compare with the reference, of the same shape.
        wide: True to compute in float64. False to compute floats in their dtype (float16 in
            float32), which needs half the memory for large outputs.
    """

    want: np.ndarray
    got: np.ndarray
    wide: bool = True

    @cached_property
    def same(self) -> np.ndarray:
        """True for each element that is the same.

        The arrays keep their dtypes, because float64 can't represent all integers of 64 bits.
        """
        same = np.asarray(self.want == self.got)
        if self.want.dtype.kind == "f":
            same |= np.isnan(self.want) & np.isnan(self.got)
        return same

    @cached_property
    def off(self) -> np.ndarray:
        """|got - want| of each element. 0 for the same NaN or infinity, infinite for another."""
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
        """The largest difference; infinite if NaN or infinity is in one array only.

        Integers that are not equal differ by at least 1, even if they are equal in float64.
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
        """The number of elements that are not the same."""
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
        """The allowed difference of each element: atol, or rtol of `want` if that is larger."""
        allowed = np.asarray(np.abs(self._numbers[0]))
        with np.errstate(invalid="ignore"):  # 0 times infinity
            allowed *= tolerance.rtol
        np.maximum(allowed, tolerance.atol_at(self.want.shape), out=allowed)
        return allowed

    def within(self, tolerance: Tolerance) -> bool:
        """True if every float is within the tolerance.

        For integers and booleans, the share `Tolerance.differing` of the elements may differ.
        """
        if self.want.dtype.kind != "f":
            return self.unequal <= tolerance.differing * self.same.size
        near = (self.off <= self.allowed(tolerance)) & ~np.isinf(self.off)
        return bool((self.same | near).all())

    def norm(self, least: float) -> float:
        """||got - want|| / ||want|| of the finite elements.

        Infinite if NaN or infinity is in one array only.

        Args:
            least: The smallest divisor. It replaces a smaller norm of `want`.
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
        """`want` and `got` in the dtype of the computation."""
        kind = np.dtype(np.float64)
        if not self.wide and self.want.dtype.kind == "f":
            kind = np.promote_types(self.want.dtype, np.float32)
        return self.want.astype(kind, copy=False), self.got.astype(kind, copy=False)


def check_has_effect(output: str, dtype: str, tolerance: Tolerance) -> None:
    """Raises `InputError` for an rtol or atol of integers, which `Difference.within` ignores."""
    if "float" in dtype or tolerance.differing or not (tolerance.rtol or tolerance.atol):
        return
    raise InputError(
        f"tolerance {output}: the output is {dtype}, and integers and booleans are compared "
        f"exactly: {tolerance.rtol:g},{tolerance.atol:g} has no effect. Leave it out, or allow a "
        f"share of the elements to differ: --tolerance {output}=0,0,0.001 (in Python: "
        'Tolerance(0, 0, "ties", differing=0.001))'
    )


def apart(
    want: np.ndarray | None, got: np.ndarray | None, tolerance: Tolerance
) -> tuple[float, bool]:
    """The largest difference, and whether every element is within the tolerance.

    The difference is 0 only for the same bits. It is infinite if one array is missing, or
    has another shape or dtype. It is also infinite for a NaN or infinity in one array only.
    """
    if want is None or got is None or want.shape != got.shape or want.dtype != got.dtype:
        return float("inf"), False
    if want.tobytes() == got.tobytes():
        return 0.0, True
    difference = Difference(want, got)
    # equal numbers with other bits, such as -0.0, differ by the smallest float
    return max(difference.largest, _LEAST), difference.within(tolerance)
