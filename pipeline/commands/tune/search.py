"""Which candidate is kept: single changes first, then the good ones together."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from pipeline.commands.tune.candidates import Candidate, Change, together
from pipeline.commands.tune.trial import Trial

# A smaller gain counts as noise: repeated medians of one engine on an H200 differ by up to 0.6 %.
GAIN = 0.01

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
    """Tries the artifact's own build, the others, each change alone, and the good ones together.

    The best one, the artifact's own and the others are timed once more at the end, one directly
    after the other, and the fastest is kept. The artifact's own stays unless another one is at
    least 1 % faster.

    Args:
        start: The artifact's own build.
        others: Candidates to compare with, such as the naive engine.
        changes: Changes of `start`.
        attempt: Builds, checks and times a candidate.
        again: Times a candidate once more.
    """
    tried = {one.name: (one, attempt(one)) for one in (start, *others)}
    better: list[tuple[float, Change]] = []
    base = score(tried[start.name][1])
    for change in changes:
        candidate = change.of(start)
        trial = attempt(candidate)
        tried[candidate.name] = candidate, trial
        if score(trial) < base - GAIN:
            better.append((score(trial), change))
    if len(better) > 1:
        fastest_first = [change for _, change in sorted(better, key=lambda one: one[0])]
        candidate = together(start, fastest_first)
        tried[candidate.name] = candidate, attempt(candidate)
    right = [name for name, (_, trial) in tried.items() if trial.times]
    if not right:
        return Found(tuple(tried.values()), None)
    best = min(right, key=lambda name: score(tried[name][1]))
    last = [name for name in right if name in (start.name, best, *(one.name for one in others))]
    if len(last) > 1:
        for name in last:
            tried[name] = tried[name][0], again(tried[name][0])
    scores = {name: score(tried[name][1]) for name in last}
    kept = min(scores, key=lambda name: scores[name])
    if scores.get(start.name, math.inf) <= scores[kept] + GAIN and math.isfinite(scores[kept]):
        kept = start.name
    if not math.isfinite(scores[kept]):
        return Found(tuple(tried.values()), None)
    return Found(tuple(tried.values()), tried[kept][0])


def score(trial: Trial) -> float:
    """The mean of the logarithm of the times: a difference of 0.01 is 1 %. Infinite without times.

    So each set of sizes counts the same, however long a call takes there.
    """
    if not trial.times:
        return math.inf
    return sum(math.log(time.ms) for time in trial.times) / len(trial.times)
