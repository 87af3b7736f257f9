"""What failed in a comparison, once for each cause: a NaN of torch's is in every run after it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipeline.artifact.manifest import PairResult, PointInfo

_NOT_FINITE = re.compile(r"(?:(\S+) )?has NaN or infinity(?:, and (\S+) has others)?(?=[;:\s]|\Z)")


@dataclass
class Problem:
    """One output that is wrong for one cause.

    Args:
        point, result: where it was seen first, and what of.
        points: at how many points it was seen.
        cause: in words; empty where nothing is known of it, and the result stands for itself.
    """

    point: PointInfo
    result: PairResult
    points: int = 1
    cause: str = ""


def problems(points: Sequence[PointInfo]) -> list[Problem]:
    """What failed, in the order of the points.

    The results of several pairs and points are one problem where an output has NaN or infinity in
    the same run, or is too small for its tolerance. Every other result is one by itself.
    """
    found: list[Problem] = []
    told: dict[tuple[str, str], Problem] = {}
    for point in points:
        here: set[tuple[str, str]] = set()
        for result in point.results:
            if result.passed:
                continue
            causes = _causes(result)
            new = [cause for cause in causes if cause not in told]
            if new or not causes:
                words = ", ".join(text for _, text in new)
                found.append(Problem(point, result, 0 if causes else 1, words))
                told.update(dict.fromkeys(new, found[-1]))
            here.update(causes)
        for problem in {id(told[cause]): told[cause] for cause in here}.values():
            problem.points += 1
    return found


def with_worst(points: Sequence[PointInfo], ending: str) -> list[PointInfo]:
    """The points; what ends so is told the largest errors of its run's output over all of them."""
    worst: dict[tuple[str, str], tuple[float, float]] = {}
    for result in (r for point in points for r in point.results):
        if result.max_abs is not None and result.max_rel is not None:
            far, share = worst.get((result.pair[1], result.output), (0.0, 0.0))
            both = max(far, result.max_abs), max(share, result.max_rel)
            worst[result.pair[1], result.output] = both
    told = []
    for point in points:
        results = []
        for result in point.results:
            why = result.why
            far, share = worst.get((result.pair[1], result.output), (0.0, 0.0))
            if why.endswith(ending) and far:
                why += f"; over all sizes up to {far:.2e}, {share:.2e} of the largest value"
            results.append(replace(result, why=why))
        told.append(replace(point, results=tuple(results)))
    return told


def _causes(result: PairResult) -> list[tuple[str, str]]:
    """The output with each run whose NaN it is, or with what else is to blame; nothing where that
    is not known."""
    match = _NOT_FINITE.match(result.why)
    if match:
        runs = [match[1] or result.pair[0], match[2]]
        return [(result.output, f"NaN of {run}") for run in runs if run]
    if result.why.startswith("says nothing:"):
        return [(result.output, "too small")]
    return []
