"""Which candidate is kept: each change is tried on top of those that made the engine faster."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from pipeline.commands.tune.candidates import Candidate, Change
from pipeline.commands.tune.trial import Trial

GAIN = 0.01  # a smaller gain counts as noise

Attempt = Callable[[Candidate], Trial]


@dataclass(frozen=True)
class Found:
    """What a search found.

    Args:
        trials: Every candidate with its trial, in the order in which they were tried.
        kept: The candidate to keep; None if no engine was right.
    """

    trials: tuple[tuple[Candidate, Trial], ...]
    kept: Candidate | None


def search(
    start: Candidate,
    others: Sequence[Candidate],
    changes: Iterable[Change],
    attempt: Attempt,
    again: Attempt,
) -> Found:
    """Tries the artifact's own build, the others, and then each change of the best build so far.

    The best one, the artifact's own and the others are timed once more at the end, one directly
    after the other, and the fastest is kept. The artifact's own stays unless another one is at
    least 1 % faster.

    Args:
        start: The artifact's own build.
        others: Candidates to compare with, such as the naive engine.
        changes: Changes of a build.
        attempt: Builds, checks and times a candidate.
        again: Times a candidate once more.
    """
    tried = {one.name: (one, attempt(one)) for one in (start, *others)}
    best = start
    for change in changes:
        candidate = change.of(best)
        trial = attempt(candidate)
        tried[candidate.name] = candidate, trial
        if score(trial) < score(tried[best.name][1]) - GAIN:
            best = candidate
    finalists = [
        name
        for name in dict.fromkeys((start.name, *(one.name for one in others), best.name))
        if tried[name][1].times
    ]
    if len(finalists) > 1:
        for name in finalists:
            tried[name] = tried[name][0], again(tried[name][0])
    scores = {name: score(tried[name][1]) for name in finalists}
    least = min(scores.values(), default=math.inf)
    if not math.isfinite(least):
        return Found(tuple(tried.values()), None)
    kept = min(scores, key=lambda name: scores[name])
    if scores.get(start.name, math.inf) <= least + GAIN:
        kept = start.name
    return Found(tuple(tried.values()), tried[kept][0])


def score(trial: Trial) -> float:
    """The mean of the logarithm of the times: a difference of 0.01 is 1 %. Infinite without times.

    So each set of sizes counts the same, however long a call takes there.
    """
    if not trial.times:
        return math.inf
    return sum(math.log(time.ms) for time in trial.times) / len(trial.times)
