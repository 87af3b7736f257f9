"""What failed in a comparison, once for each cause: a NaN of torch's is in every run after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipeline.artifact.manifest import PointInfo
from pipeline.spec.verdicts import Verdict

Cause = tuple[str, str, str]  # output, kind of the verdict, run


@dataclass
class Problem:
    """One output that is wrong for one cause.

    Args:
        point, result: where it was seen first, and the verdict there.
        points: at how many points it was seen.
        causes: what several verdicts have in common; empty where the verdict is a problem by
            itself.
    """

    point: PointInfo
    result: Verdict
    points: int = 1
    causes: tuple[Cause, ...] = ()

    @property
    def key(self) -> tuple[str, tuple[str, str], str]:
        """The point's sizes, the pair and the output: a comparison has one verdict for each."""
        return key_of(self.point, self.result)


def key_of(point: PointInfo, result: Verdict) -> tuple[str, tuple[str, str], str]:
    """See `Problem.key`."""
    return str(sorted(point.sizes.items())), result.pair, result.output


def problems(points: Sequence[PointInfo]) -> list[Problem]:
    """What failed, in the order of the points.

    The verdicts of several pairs and points are one problem where an output has NaN or infinity
    in the same run, or cannot be judged. Every other failed verdict is one by itself.
    """
    found: list[Problem] = []
    known: dict[Cause, Problem] = {}
    for point in points:
        here: set[Cause] = set()
        for result in point.results:
            if result.passed:
                continue
            causes = result.causes
            new = tuple(cause for cause in causes if cause not in known)
            if new or not causes:
                found.append(Problem(point, result, 0 if causes else 1, new))
                known.update(dict.fromkeys(new, found[-1]))
            here.update(causes)
        for problem in found:
            problem.points += not here.isdisjoint(problem.causes)
    return found


def with_worst(points: Sequence[PointInfo]) -> list[PointInfo]:
    """The points; a verdict that advises to state a tolerance knows the largest error of its run's
    output over all of them."""
    worst: dict[tuple[str, str], tuple[float, float]] = {}
    for result in (r for point in points for r in point.results):
        if result.max_abs is not None and result.max_rel is not None:
            far, share = worst.get((result.pair[1], result.output), (0.0, 0.0))
            both = max(far, result.max_abs), max(share, result.max_rel)
            worst[result.pair[1], result.output] = both

    def known(result: Verdict) -> Verdict:
        far, share = worst.get((result.pair[1], result.output), (0.0, 0.0))
        if result.facts.get("advice") != "state-engine-tolerance" or not far:
            return result
        return result.knowing(worst_abs=far, worst_rel=share)

    return [replace(point, results=tuple(map(known, point.results))) for point in points]
