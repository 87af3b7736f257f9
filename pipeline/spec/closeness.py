"""How far two arrays differ."""

from __future__ import annotations

import numpy as np

from pipeline.spec.tensors import Tolerance


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
    a, b = want.astype(np.float64), got.astype(np.float64)
    same = want == got  # float64 has not all the integers of 64 bits
    if want.dtype.kind == "f":
        same |= np.isnan(a) & np.isnan(b)
    with np.errstate(invalid="ignore"):
        off = np.where(same, 0.0, np.nan_to_num(np.abs(a - b), nan=np.inf, posinf=np.inf))
    if want.dtype.kind in "iu":
        off = np.where(same, 0.0, np.maximum(off, 1.0))
    allowed = np.zeros_like(a)
    if want.dtype.kind == "f":
        allowed = np.maximum(tolerance.atol, tolerance.rtol * np.abs(a))
    largest = float(off.max(initial=0.0))
    good = same | ((off <= allowed) & np.isfinite(off))
    few = want.dtype.kind != "f" and np.count_nonzero(~good) <= tolerance.differing * good.size
    # the same numbers in other bits, such as -0.0, are apart by nothing that can be measured
    return max(largest, float(np.finfo(np.float64).tiny)), bool(few or good.all())
