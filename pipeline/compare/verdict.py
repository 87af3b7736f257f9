"""Compares two runs of a model at one point, output by output."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from pipeline.compare.run_names import REFERENCE, TORCH
from pipeline.machine.polygraphy import collected
from pipeline.spec.closeness import Difference
from pipeline.spec.findings import Facts
from pipeline.spec.tensors import Tolerance
from pipeline.spec.verdicts import Verdict

# output -> run -> the first run with the same NaN and infinities
Origins = Mapping[str, Mapping[str, str]]
_JUDGED = 1 << 20  # elements of an output that Polygraphy compares
_LEAST_SCALE = 1e-30  # of a part whose atol is 0
_SURE = 0.999  # below this share of the tolerance, an element passes with any rounding


def judge(
    first: str,
    second: str,
    left: Mapping[str, np.ndarray],
    right: Mapping[str, np.ndarray],
    tolerances: Tolerance | Mapping[str, Tolerance],
    origins: Origins | None = None,
) -> list[Verdict]:
    """Compares two runs at one point, output by output.

    Floating-point elements must be within the output's tolerance. Integers and booleans must be
    equal.

    Args:
        first: The reference's name.
        second: The run's name.
        left, right: The outputs of both runs by name.
        tolerances: One tolerance for all outputs, or by name.
        origins: The first run with each NaN and infinity; see `origins_of`. By default a verdict
            names one of the two runs.
    """
    pair = (first, second)
    verdicts = []
    for name in dict.fromkeys([*left, *right]):
        if name not in left or name not in right:
            only = first if name in left else second
            verdicts.append(Verdict("missing", pair, name, facts={"only": only}))
            continue
        a, b = left[name], right[name]
        tolerance = tolerances if isinstance(tolerances, Tolerance) else tolerances[name]
        if a.shape != b.shape:
            verdicts.append(other_shape(pair, name, b.shape, a.shape))
        elif a.dtype != b.dtype and not _narrowed(a.dtype, b.dtype):
            facts: Facts = {"got": str(b.dtype), "want": str(a.dtype)}
            verdicts.append(Verdict("dtype-differs", pair, name, facts=facts))
        elif not a.size:
            verdicts.append(Verdict("no-elements", pair, name))
        elif not (np.isfinite(a).all() and np.isfinite(b).all()):
            verdicts.append(_not_finite(pair, name, a, b, (origins or {}).get(name)))
        elif a.dtype.kind == "f" and _says_nothing(a, b, tolerance):
            facts = {"atol": tolerance.atol}
            verdicts.append(Verdict("inconclusive", pair, name, facts=facts))
        elif a.dtype.kind == "f":
            verdicts.append(_numbers(pair, name, a, b, tolerance))
        else:
            verdicts.append(_equal(pair, name, a, b, tolerance.differing))
    return verdicts


def _says_nothing(a: np.ndarray, b: np.ndarray, tolerance: Tolerance) -> bool:
    """True if zeros would pass in place of the reference `a`, and `b` is within the tolerance.

    An atol of 0 allows no other value than the reference's zeros, so these are judged.
    """
    atol = tolerance.atol_at(a.shape)
    if not np.any(atol) or (np.abs(a) > atol).any():
        return False
    return Difference(a, b, wide=False).within(tolerance)


def other_shape(
    pair: tuple[str, str], name: str, got: tuple[int, ...], want: tuple[int, ...]
) -> Verdict:
    """Returns the verdict on an output with another shape than the reference."""
    return Verdict("shape-differs", pair, name, facts={"got": got, "want": want})


def origins_of(runs: Mapping[str, Mapping[str, np.ndarray]]) -> Origins:
    """Returns the first run with the same NaN and infinity, for each run and output.

    Args:
        runs: The outputs of each run by name. A run comes after its references.
    """
    found: dict[str, dict[str, str]] = {}
    for run, outputs in runs.items():
        for name, array in outputs.items():
            if not np.isfinite(array).all():
                before = found.setdefault(name, {})
                same = (r for r in before if _same_places(runs[r][name], array))
                before[run] = next(same, run)
    return found


def surely_agree(want: np.ndarray, got: np.ndarray, tolerance: Tolerance) -> bool:
    """Returns True if `judge` accepts two floating-point arrays. False if only `judge` can tell.

    Polygraphy takes some 20 ms for the smallest array.
    """
    if want.shape != got.shape or want.dtype != got.dtype or want.dtype.kind != "f":
        return False
    difference = Difference(want, got, wide=False)
    return bool((difference.off <= _SURE * difference.allowed(tolerance)).all())


def _not_finite(
    pair: tuple[str, str],
    name: str,
    a: np.ndarray,
    b: np.ndarray,
    origins: Mapping[str, str] | None,
) -> Verdict:
    """Returns the verdict on NaN or infinity: the run that made it first, and whether the second
    run has other NaN or infinities."""
    first, second = ((origins or {}).get(run, run) for run in pair)
    facts: dict[str, str] = {}
    if np.isfinite(a).all():
        facts["whose"] = second
    else:
        facts["whose"] = first
        if not (np.isfinite(b).all() or _same_places(a, b)):
            facts["others"] = second
    if facts["whose"] in (TORCH, REFERENCE):
        facts["advice"] = "limit-inputs"
    return Verdict("not-finite", pair, name, facts=facts)


def _same_places(a: np.ndarray, b: np.ndarray) -> bool:
    """Returns True if both have the same NaN and infinities at the same places."""
    return a.shape == b.shape and Difference(a, b).odd_alike


def _equal(
    pair: tuple[str, str], name: str, a: np.ndarray, b: np.ndarray, differing: float
) -> Verdict:
    difference = Difference(a, b)
    unequal, far = difference.unequal, difference.largest
    facts: Facts = {"count": unequal, "of": a.size, "dtype": str(a.dtype), "differing": differing}
    if unequal <= differing * a.size:
        return Verdict("agrees", pair, name, far, facts=facts if unequal else {})
    return Verdict("values-differ", pair, name, far, facts=facts)


def _narrowed(a: np.dtype[Any], b: np.dtype[Any]) -> bool:
    """Returns True for int64 as int32: TensorRT up to 9 does this, and the values still count."""
    return a == np.int64 and b == np.int32


def _numbers(
    pair: tuple[str, str], name: str, a: np.ndarray, b: np.ndarray, tolerance: Tolerance
) -> Verdict:
    from polygraphy.comparator import Comparator, RunResults, SimpleCompareFunc
    from polygraphy.comparator.struct import IterationResult

    one, other = _with_one_atol(a, b, tolerance)
    alike = replace(tolerance, axis=None, parts=())
    max_abs, near, far = _nearest_to_failing(one, other, alike)
    if one is not a:
        max_abs = Difference(a, b).largest
    runs = RunResults()
    for runner, array in ((pair[1], far), (pair[0], near)):
        whole = np.ascontiguousarray(array).reshape(array.shape)
        runs.append((runner, [IterationResult({name: whole}, runner_name=runner)]))
    func = SimpleCompareFunc(
        rtol=tolerance.rtol, atol=tolerance.atol, check_error_stat="elemwise", check_shapes=True
    )
    # Polygraphy's report divides by zero and averages empty arrays
    with collected(), np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (accuracy,) = Comparator.compare_accuracy(runs, compare_func=func)
    ((_, [iteration]),) = accuracy.items()
    verdict = iteration[name]
    scale = float(np.abs(a).max()) if a.size else 0.0
    relative = max_abs / scale if scale else None
    # Polygraphy lets a few times 1e-20 pass in place of 0
    if bool(verdict) and (scale or not max_abs):
        zeros: Facts = {"largest": scale} if a.size and not scale else {}
        return Verdict("agrees", pair, name, max_abs, relative, zeros)
    facts: Facts = {
        "largest": scale,
        "index": _index_of_largest(one, other),
        "rtol": tolerance.rtol,
        "atol": tolerance.atol,
    }
    return Verdict("differs", pair, name, max_abs, relative, facts)


def _with_one_atol(
    a: np.ndarray, b: np.ndarray, tolerance: Tolerance
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the arrays, scaled so that one atol fits all parts: Polygraphy knows one only.

    rtol does not change, because both arrays have the same scale at each element.
    """
    if tolerance.axis is None or not tolerance.atol:
        return a, b
    scale = np.maximum(tolerance.atol_at(a.shape) / tolerance.atol, _LEAST_SCALE)
    return a / scale, b / scale


def _index_of_largest(a: np.ndarray, b: np.ndarray) -> tuple[int, ...]:
    """Returns the index of the largest difference of two finite arrays of one shape."""
    wide = np.float32 if a.dtype == np.float16 else a.dtype
    flat = int(np.abs(np.subtract(a, b, dtype=wide)).argmax())
    return tuple(int(n) for n in np.unravel_index(flat, a.shape))


def _nearest_to_failing(
    a: np.ndarray, b: np.ndarray, tolerance: Tolerance
) -> tuple[float, np.ndarray, np.ndarray]:
    """Returns the largest difference, and the elements for Polygraphy: those that fail, or else the
    one nearest to failing.

    Polygraphy's statistics (medians, percentiles) take a minute on 10**8 elements. Each element is
    compared alone, so all elements pass if and only if these do.
    """
    if a.dtype == np.float16:
        a, b = a.astype(np.float32), b.astype(np.float32)
    difference = Difference(a, b, wide=False)
    largest = difference.largest
    if a.size <= _JUDGED:
        return largest, a, b
    allowed = difference.allowed(tolerance).ravel()
    allowed *= _SURE  # Polygraphy decides on elements near the limit
    over = np.subtract(difference.off.ravel(), allowed, out=allowed)
    chosen = np.flatnonzero(over > 0)[:_JUDGED]
    if not len(chosen):
        chosen = np.array([over.argmax()])
    return largest, a.ravel()[chosen], b.ravel()[chosen]
