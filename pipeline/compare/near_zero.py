"""Decides on outputs whose reference is below atol at some sizes, where zeros would pass too.

Such a set of sizes says nothing, and it is no failure if other sizes were judged. If no size says
anything about an output, the comparison fails. An output of zeros with an atol of 0 is judged: the
run has the same zeros. A note says so if no size has other values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from pipeline.artifact.manifest import PointInfo
from pipeline.spec.findings import Note, note
from pipeline.spec.verdicts import Verdict

_Key = tuple[tuple[str, str], str]  # the pair of runs and the output


def settled(points: Sequence[PointInfo]) -> tuple[list[PointInfo], list[Note]]:
    """Turns inconclusive verdicts into passed ones where the same runs agree at other sizes.

    `pipeline.compare.verdict.judge` calls a difference beyond the tolerance by its name, so an
    inconclusive verdict always is within the tolerance.

    Args:
        points: The points with their verdicts.

    Returns:
        The points, and one note for each output and run that some sizes say nothing about, or
        that is 0 at all sizes; and one for each output without elements at all sizes.
    """
    found: Counter[_Key] = Counter(
        _key(verdict) for point in points for verdict in point.results if _judged(verdict)
    )
    left: Counter[_Key] = Counter()

    def known(verdict: Verdict) -> Verdict:
        if verdict.kind != "inconclusive" or not found[_key(verdict)]:
            return verdict
        left[_key(verdict)] += 1
        return replace(verdict, kind="near-zero", text="")

    results = [verdict for point in points for verdict in point.results]
    seen = {verdict.output for verdict in results if verdict.compared}
    empty = dict.fromkeys(verdict.output for verdict in results if verdict.output not in seen)
    new = [replace(point, results=tuple(map(known, point.results))) for point in points]
    notes = [
        note("near-zero", output=output, run=run, reference=reference, count=count,
             of=count + found[(reference, run), output])
        for ((reference, run), output), count in left.items()
    ]  # fmt: skip
    zeros = dict.fromkeys(
        _key(verdict) for point in points for verdict in point.results if _same_zeros(verdict)
    )
    notes += [
        note("only-zeros", output=output, run=run, reference=reference)
        for (reference, run), output in zeros
        if not found[(reference, run), output]
    ]
    notes += [note("no-elements", output=output) for output in empty]
    return new, notes


def _judged(verdict: Verdict) -> bool:
    """True for numbers that agree; a reference of zeros has no largest value and says nothing."""
    return verdict.kind == "agrees" and verdict.max_rel is not None


def _same_zeros(verdict: Verdict) -> bool:
    """True for an output that is 0 in both runs."""
    return verdict.kind == "agrees" and verdict.facts.get("largest") == 0


def _key(verdict: Verdict) -> _Key:
    return verdict.pair, verdict.output
