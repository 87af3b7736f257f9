"""The failures of a comparison, one for each cause: a NaN of torch is in every later run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from pipeline.artifact.manifest import ComparisonInfo, PointInfo
from pipeline.compare.run_names import EXPORTED, REWRITTEN, in_precision
from pipeline.spec.verdicts import AdviceKind, Verdict

Cause = tuple[str, str, str]  # output, kind of the verdict, run
_TOLERANCE: tuple[AdviceKind, ...] = ("state-engine-tolerance", "beyond-rounding")


@dataclass
class Problem:
    """One output that fails for one cause.

    Args:
        point, result: The first point with the failure, and its verdict.
        points: The number of points with the failure.
        causes: The common causes of several verdicts; empty if the verdict stands alone.
    """

    point: PointInfo
    result: Verdict
    points: int = 1
    causes: tuple[Cause, ...] = ()

    @property
    def key(self) -> tuple[str, tuple[str, str], str]:
        """The sizes, the pair and the output. A comparison has one verdict for each key."""
        return key_of(self.point, self.result)


def key_of(point: PointInfo, result: Verdict) -> tuple[str, tuple[str, str], str]:
    """See `Problem.key`."""
    return str(sorted(point.sizes.items())), result.pair, result.output


def problems(points: Sequence[PointInfo]) -> list[Problem]:
    """Returns the failures in the order of the points.

    Verdicts of several pairs and points are one problem if an output has NaN or infinity from the
    same run, or cannot be judged. Every other failed verdict is its own problem.
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


def only_engine_failed(comparison: ComparisonInfo) -> bool:
    """True if the comparison failed, and all failures are of the engine or of half.onnx.

    So model.onnx itself passed. It is False if nothing of model.onnx was compared.
    """
    results = [result for point in comparison.points for result in point.results]
    kinds = {note.kind for note in comparison.notes}
    run = EXPORTED if "model-unchanged" in kinds else REWRITTEN
    compared = any(result.compared for result in results if result.pair[1] == run)
    compared = compared or kinds >= {"model-unchanged", "source-is-onnx"}  # equal to the byte
    failed = [result.pair[1] for result in results if not result.passed]
    failed += [check.run for check in comparison.checks if not check.passed]
    others = any(note.fails for note in comparison.notes)
    return compared and bool(failed) and not others and all(map(in_precision, failed))


def worst_of(results: Iterable[Verdict]) -> Verdict | None:
    """The verdict with the largest error. One that failed is worse than any that passed.

    Errors are compared in units of the reference's largest value, and others by their size.
    """
    found = (result for result in results if result.compared)
    return max(found, key=_badness, default=None)


def _badness(result: Verdict) -> tuple[bool, float, float]:
    share, far = result.max_rel, result.max_abs
    return not result.passed, -1.0 if share is None else share, -1.0 if far is None else far


def with_worst(points: Sequence[PointInfo]) -> list[PointInfo]:
    """Adds the largest error over all points to verdicts that advise to state a tolerance."""
    worst: dict[tuple[str, str], tuple[float, float]] = {}
    for result in (r for point in points for r in point.results):
        if result.max_abs is not None and result.max_rel is not None:
            far, share = worst.get((result.pair[1], result.output), (0.0, 0.0))
            both = max(far, result.max_abs), max(share, result.max_rel)
            worst[result.pair[1], result.output] = both

    def known(result: Verdict) -> Verdict:
        far, share = worst.get((result.pair[1], result.output), (0.0, 0.0))
        if result.facts.get("advice") not in _TOLERANCE or not far:
            return result
        return result.knowing(worst_abs=far, worst_rel=share)

    return [replace(point, results=tuple(map(known, point.results))) for point in points]
