"""Whether two runs of a model at one point agree, output by output."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from pipeline.artifact.manifest import PairResult
from pipeline.machine.polygraphy import collected
from pipeline.spec.tensors import Tolerance

RANGE_HINT = (
    "; if its inputs' values are to blame, give the Input a range (--range NAME=LOW..HIGH, or low= "
    "and high=)"
)
TIES = (
    "; if values tie there (an argmax), give what they are made of as an output, or state the "
    "share that may differ (Tolerance(..., differing=0.001), --tolerance RTOL,ATOL,0.001)"
)
# output -> run -> the first run that had the same NaN and infinities
Origins = Mapping[str, Mapping[str, str]]
_JUDGED = 1 << 20  # elements of an output that Polygraphy is given
_SURE = 0.999  # of the tolerance: within it an element passes whatever way it is rounded


def judge(
    first: str,
    second: str,
    left: Mapping[str, np.ndarray],
    right: Mapping[str, np.ndarray],
    tolerances: Tolerance | Mapping[str, Tolerance],
    origins: Origins | None = None,
) -> list[PairResult]:
    """Compares two runs at one point, output by output; `right` is held against `left`.

    Floating point within the output's tolerance (one for all, or by name); integers and booleans
    have to be equal. NaN and infinity are put down to the run of `origins`, if that is given.
    """
    pair = (first, second)
    results = []
    for name in dict.fromkeys([*left, *right]):
        if name not in left or name not in right:
            results.append(failed(pair, name, f"only {first if name in left else second} has it"))
            continue
        a, b = left[name], right[name]
        tolerance = tolerances if isinstance(tolerances, Tolerance) else tolerances[name]
        if a.shape != b.shape:
            results.append(failed(pair, name, f"shape {b.shape}, not {a.shape}"))
        elif a.dtype != b.dtype and not _narrowed(a.dtype, b.dtype):
            results.append(failed(pair, name, f"dtype {b.dtype}, not {a.dtype}"))
        elif not (np.isfinite(a).all() and np.isfinite(b).all()):
            results.append(failed(pair, name, _not_finite(pair, a, b, (origins or {}).get(name))))
        elif a.size and a.dtype.kind == "f" and not (np.abs(a) > tolerance.atol).any():
            results.append(
                failed(pair, name, f"says nothing: all of {first} is below atol={tolerance.atol}")
            )
        elif a.dtype.kind == "f":
            results.append(_numbers(pair, name, a, b, tolerance))
        else:
            results.append(_equal(pair, name, a, b, tolerance.differing))
    return results


def origins_of(runs: Mapping[str, Mapping[str, np.ndarray]]) -> Origins:
    """Whose NaN and infinity it is that a run has at one point.

    Args:
        runs: each one's outputs by name; a run comes after those that it is held against.
    """
    found: dict[str, dict[str, str]] = {}
    for run, outputs in runs.items():
        for name, array in outputs.items():
            if not np.isfinite(array).all():
                before = found.setdefault(name, {})
                same = (r for r in before if _same_places(runs[r][name], array))
                before[run] = next(same, run)
    return found


def _not_finite(
    pair: tuple[str, str], a: np.ndarray, b: np.ndarray, origins: Mapping[str, str] | None
) -> str:
    """In words: whose values are not finite, and whether the second run has others than the
    first."""
    first, second = ((origins or {}).get(run, run) for run in pair)
    if np.isfinite(a).all():
        which, others = second, ""
    else:
        known = np.isfinite(b).all() or _same_places(a, b)
        which, others = first, "" if known else f", and {second} has others"
    return f"{which} has NaN or infinity{others}{RANGE_HINT if which == 'torch' else ''}"


def _same_places(a: np.ndarray, b: np.ndarray) -> bool:
    """True if both have the same NaN and infinities, and at the same places."""
    if a.shape != b.shape:
        return False
    odd = ~np.isfinite(a)
    return np.array_equal(odd, ~np.isfinite(b)) and np.array_equal(a[odd], b[odd], equal_nan=True)


def _equal(
    pair: tuple[str, str], name: str, a: np.ndarray, b: np.ndarray, differing: float
) -> PairResult:
    apart = int((a != b).sum())
    far = float(np.abs(a.astype(np.float64) - b.astype(np.float64)).max()) if a.size else 0.0
    good = apart <= differing * a.size
    why = "" if good else f"{apart} of {a.size} {a.dtype} values differ{TIES}"
    return PairResult(pair, name, far, None, good, why)


def _narrowed(a: np.dtype[Any], b: np.dtype[Any]) -> bool:
    """True for int64 that came back as int32, as TensorRT up to 9 does (values are compared)."""
    return a == np.int64 and b == np.int32


def _numbers(
    pair: tuple[str, str], name: str, a: np.ndarray, b: np.ndarray, tolerance: Tolerance
) -> PairResult:
    from polygraphy.comparator import Comparator, RunResults, SimpleCompareFunc
    from polygraphy.comparator.struct import IterationResult

    max_abs, near, far = _nearest_to_failing(a, b, tolerance)
    runs = RunResults()
    for runner, array in ((pair[1], far), (pair[0], near)):
        whole = np.ascontiguousarray(array).reshape(array.shape)
        runs.append((runner, [IterationResult({name: whole}, runner_name=runner)]))
    func = SimpleCompareFunc(
        rtol=tolerance.rtol, atol=tolerance.atol, check_error_stat="elemwise", check_shapes=True
    )
    # for its report Polygraphy divides by zero, and averages what is empty
    with collected(), np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (accuracy,) = Comparator.compare_accuracy(runs, compare_func=func)
    ((_, [iteration]),) = accuracy.items()
    verdict = iteration[name]
    scale = float(np.abs(a).max()) if a.size else 0.0
    passed = bool(verdict)
    why = "" if passed else f"off by up to {max_abs:.3g}; the largest value is {scale:.3g}"
    return PairResult(pair, name, max_abs, max_abs / scale if scale else None, passed, why)


def _nearest_to_failing(
    a: np.ndarray, b: np.ndarray, tolerance: Tolerance
) -> tuple[float, np.ndarray, np.ndarray]:
    """The largest difference, and the elements that Polygraphy is to judge: those that fail, or
    else the one nearest to it, since its statistics (medians, percentiles) take a minute on 10**8
    elements.

    Each element is judged alone, so that all pass if and only if these do.
    """
    if a.dtype == np.float16:
        a, b = a.astype(np.float32), b.astype(np.float32)
    off = np.subtract(a, b).ravel()
    np.abs(off, out=off)
    largest = float(off.max(initial=0))
    if a.size <= _JUDGED:
        return largest, a, b
    allowed = np.abs(a).ravel()
    allowed *= tolerance.rtol
    np.maximum(allowed, tolerance.atol, out=allowed)
    allowed *= _SURE  # what is near to it is Polygraphy's to decide
    off -= allowed
    chosen = np.flatnonzero(off > 0)[:_JUDGED]
    if not len(chosen):
        chosen = np.array([off.argmax()])
    return largest, a.ravel()[chosen], b.ravel()[chosen]


def failed(pair: tuple[str, str], name: str, why: str) -> PairResult:
    """The result of a comparison that could not come to numbers."""
    return PairResult(pair, name, None, None, False, why)
