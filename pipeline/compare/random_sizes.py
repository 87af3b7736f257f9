"""Compares a model at random legal sizes, after the planned ones.

The planned sizes are the ends of the ranges and a few between them. A model may do something else
at one size only. So a tenth of the time of the conversion goes to sizes that nobody chose.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from pipeline.compare.plan import Job
from pipeline.compare.verdict import judge, surely_agree
from pipeline.errors import PipelineError
from pipeline.probe.sample_sizes import elements
from pipeline.spec.dims import Dim, kept_rules, shape_at
from pipeline.spec.profiles import Point, Profile
from pipeline.spec.runner import Runner
from pipeline.spec.tensors import Feed
from pipeline.spec.verdicts import Verdict

_SHARE = 0.1  # of the seconds so far
_BATCH = 64  # sets of sizes that are drawn together, and run from small to large
_MOST = 1000
_LEAST, _LEAST_SECONDS = 128, 2.0  # so many are compared if they take so little time
_FRUITLESS = 20  # batches in a row without a new legal set
_CARDS = 1 << 16  # most sizes of a dim that are dealt without repetition
_FAILURES = 2  # then it stops


@dataclass
class RandomSizes:
    """What random sizes showed.

    Args:
        compared: The number of sets of sizes that were compared, with those that failed.
        failed: The sets of sizes where a run failed or differs.
    """

    compared: int = 0
    failed: list[Point] = field(default_factory=list)


def compare_random_sizes(
    job: Job,
    runners: Sequence[Runner],
    planned: Sequence[Point],
    seconds: float,
    sample: Callable[[Mapping[str, int]], Feed],
    seed: int,
) -> RandomSizes:
    """Compares every runner with the first one at random sizes.

    Args:
        job: The interface, its profiles and its tolerances.
        runners: The reference, then the others.
        planned: The sizes that ran before. No random size has more input elements than these.
        seconds: The seconds of the conversion so far. A fixed part of this time is used, and more
            for a few quick runs. The first run, which loads the models, is not counted.
        sample: Makes the inputs for sizes.
        seed: The seed of the sizes.
    """
    found = RandomSizes()
    if not planned or len(runners) < 2 or all(d.static for d in job.interface.dims.values()):
        return found
    inputs = job.interface.inputs
    counts = [elements(inputs, point.sizes) for point in planned]
    now: list[Feed] = []

    def current() -> Iterator[Feed]:
        while True:
            yield now[0]

    runs = {runner.name: runner.run(current()) for runner in runners}
    end, least_end, per_element = math.inf, math.inf, 0.0
    for sizes in _drawn(job, planned, max(counts), seed):
        begin = time.perf_counter()
        left = (end if found.compared >= _LEAST else max(end, least_end)) - begin
        if left <= 0 or found.compared == _MOST or len(found.failed) == _FAILURES:
            break
        if per_element * elements(inputs, sizes) > left:
            continue
        now[:] = [sample(sizes)]
        found.compared += 1
        try:
            outputs = {name: next(run) for name, run in runs.items()}
        except PipelineError:  # the model remembers earlier calls
            raise
        except Exception:  # the caller repeats the run, and reports its error
            found.failed.append(Point("random", dict(sizes)))
            break
        if not agree(job, outputs, sizes):
            found.failed.append(Point("random", dict(sizes)))
        if found.compared == 1:
            begin = time.perf_counter()
            end, least_end = begin + _SHARE * seconds, begin + _LEAST_SECONDS
        else:
            per_element = (time.perf_counter() - begin) / max(elements(inputs, sizes), 1)
    for run in runs.values():
        close = getattr(run, "close", None)
        if close is not None:
            close()
    return found


def _drawn(job: Job, planned: Sequence[Point], most: int, seed: int) -> Iterator[Mapping[str, int]]:
    """Legal sets of sizes in random order, each once; of each batch, small ones come first."""
    interface = job.interface
    random = np.random.default_rng(seed)
    seen = {tuple(sorted(point.sizes.items())) for point in planned}
    deck = cache(lambda _, legal: _Deck(legal, random))  # one for each dim and range
    decks = [
        {name: deck(name, _legal(dim, profile)) for name, dim in interface.dims.items()}
        for profile in interface.profiles
    ]
    fruitless = 0
    while fruitless < _FRUITLESS:
        batch = []
        for _ in range(_BATCH):
            of_profile = decks[random.integers(len(decks))]
            sizes = {name: cards.deal() for name, cards in of_profile.items()}
            key = tuple(sorted(sizes.items()))
            if key in seen:
                continue
            seen.add(key)
            if kept_rules(interface.rules, sizes) and elements(interface.inputs, sizes) <= most:
                batch.append(sizes)
        fruitless = 0 if batch else fruitless + 1
        yield from sorted(batch, key=lambda sizes: elements(interface.inputs, sizes))


def _legal(dim: Dim, profile: Profile) -> range:
    low, _, high = profile.ranges[dim.name]
    return range(low, high + 1, dim.multiple_of)


class _Deck:
    """Deals the sizes of one dim in random order, then again in another order.

    Each size comes once before any comes twice, so that a short range is seen whole. Small sizes
    come rather early, as the logarithm of the size counts.
    """

    def __init__(self, legal: range, random: np.random.Generator) -> None:
        self._legal, self._random = legal, random
        self._left: list[int] = []

    def deal(self) -> int:
        if not self._left:
            if len(self._legal) > _CARDS:
                place = len(self._legal) ** self._random.random() - 1
                return self._legal[min(int(place), len(self._legal) - 1)]
            late = self._random.exponential(size=len(self._legal))
            late *= np.arange(1, len(self._legal) + 1)
            self._left = np.argsort(-late).tolist()
        return self._legal[self._left.pop()]


def agree(job: Job, outputs: Mapping[str, Feed], sizes: Mapping[str, int]) -> bool:
    """True if the runs agree with the first one, or its values allow no verdict."""
    (base, want), *others = outputs.items()
    declared = job.interface.output_shapes
    if any(want[n].shape != shape_at(s, sizes) for n, s in declared.items() if n in want):
        return False
    for name, got in others:
        tolerances = job.tolerances(name)
        if want.keys() == got.keys() and all(
            surely_agree(want[n], got[n], tolerances[n]) for n in want
        ):
            continue
        verdicts = judge(base, name, want, got, tolerances)
        if not all(verdict.passed or _says_nothing(verdict, want) for verdict in verdicts):
            return False
    return True


def _says_nothing(verdict: Verdict, want: Feed) -> bool:
    """True if the reference's values at these sizes allow no verdict."""
    if verdict.kind == "not-finite":
        return not np.isfinite(want[verdict.output]).all()
    return verdict.kind == "inconclusive"
