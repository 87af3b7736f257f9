"""Checks of an engine beyond its numbers.

The same inputs must give the same outputs, also after other sizes. Every element of an output must
be written. `pipeline.compare.rows` checks the rows of a batch. A size that does not fit into the
GPU's memory is noted, and the other sizes are checked.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from pipeline.errors import OutOfMemory
from pipeline.spec.closeness import apart
from pipeline.spec.findings import Facts, Note
from pipeline.spec.profiles import Point
from pipeline.spec.runner import Runner, run_once
from pipeline.spec.tensors import Feed, Tolerance
from pipeline.spec.verdicts import Check, CheckKind, CheckName, finite

DETERMINISM: Final = "determinism"
ORDER: Final = "shuffled order"
UNWRITTEN: Final = "unwritten outputs"
_REPEATS = 3


@dataclass(frozen=True)
class Subject:
    """An engine in one profile.

    Args:
        plain: Runs the engine.
        poisoned: Runs the engine after setting every byte of the outputs to 0xFF.
    """

    plain: Runner
    poisoned: Runner

    @property
    def name(self) -> str:
        return self.plain.name


@dataclass
class Checked:
    """The finished checks, and a note for every size or check that was not done."""

    checks: list[Check] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)


@dataclass
class Fitting:
    """Counts the sizes of a check, and the sizes that do not fit into the GPU's memory.

    Args:
        check, run: The names of the check and of the run.
        done: The number of checked sizes.
        full: The sizes that do not fit, as text, each with the error.
    """

    check: CheckName
    run: str
    done: int = 0
    full: list[tuple[str, str]] = field(default_factory=list)

    @contextmanager
    def at(self, where: object) -> Iterator[None]:
        """Counts a size as done, or as too large if the block raises `OutOfMemory`."""
        try:
            yield
        except OutOfMemory as error:
            self.full.append((str(where), str(error)))
        else:
            self.done += 1

    def notes(self) -> list[Note]:
        """Returns a note for each size that was not checked, or one for the whole check."""
        both = {"check": self.check, "run": self.run}
        if self.done:
            return [
                Note("check-out-of-memory", {**both, "at": where, "reason": why})
                for where, why in self.full
            ]
        names = tuple(where for where, _ in self.full)
        facts: Facts = {**both, "names": names}
        return [Note("check-not-done", {**facts, "reason": why}) for _, why in self.full[:1]]


def check_engine(
    subject: Subject,
    points: Sequence[Point],
    feeds: Sequence[Feed],
    first: Sequence[Feed],
    tolerance: Mapping[str, Tolerance],
    seed: int = 0,
) -> Checked:
    """Checks determinism, shuffled order and unwritten outputs at all points that fit into memory.

    Args:
        subject: The engine.
        points, feeds: The sizes and the inputs.
        first: The engine's outputs in the comparison.
        tolerance: Tolerance by output name.
        seed: The seed of the shuffled order.

    Returns:
        The checks that were done at one size or more; empty if there are no points.
    """
    found = Checked()
    if not points:
        return found
    fits, worst = Fitting(DETERMINISM, subject.name), _Worst(tolerance)
    repeated: set[int] = set()
    for n, (point, feed) in enumerate(zip(points, feeds, strict=True)):
        with fits.at(point):
            run_once(subject.plain, feed)  # leftovers of other sizes must not count as chance
            again = run_once(subject.plain, feed)
            for _ in range(_REPEATS - 1):
                worst.add(point, again, run_once(subject.plain, feed))
            repeated.add(n)
    if fits.done or worst.found[0]:
        found.checks.append(worst.check(fits, {"runs": _REPEATS, "count": fits.done}))
    found.notes += fits.notes()
    exact = repeated if not worst.differs else set()

    fits = Fitting(UNWRITTEN, subject.name)
    holes: list[tuple[Point, Facts]] = []
    for point, feed, outputs in zip(points, feeds, first, strict=True):
        with fits.at(point):
            holes += [
                (point, facts) for facts in _unwritten(outputs, run_once(subject.poisoned, feed))
            ]
    if fits.done and holes:
        at, facts = holes[0]
        found.checks.append(Check(UNWRITTEN, subject.name, "not-written", dict(at.sizes), facts))
    elif fits.done:
        facts = {"count": fits.done}
        found.checks.append(Check(UNWRITTEN, subject.name, "all-written", facts=facts))
    found.notes += fits.notes()

    fits, worst = Fitting(ORDER, subject.name), _Worst(tolerance)
    order = list(range(len(points)))
    random.Random(seed).shuffle(order)
    for n in order:
        with fits.at(points[n]):
            worst.add(points[n], first[n], run_once(subject.poisoned, feeds[n]), exact=n in exact)
    if fits.done:
        found.checks.append(worst.check(fits, {"count": fits.done}))
    found.notes += fits.notes()
    return found


@dataclass
class _Worst:
    """The largest difference between outputs that must be equal.

    `found` is whether the difference is too large, and its size. `exact` is True if any difference
    was too large.
    """

    tolerance: Mapping[str, Tolerance]
    exact: bool = False
    found: tuple[bool, float] = (False, 0.0)
    where: str = ""
    sizes: Mapping[str, int] = field(default_factory=dict)

    @property
    def differs(self) -> bool:
        return self.found[1] > 0

    def add(self, point: Point, want: Feed, got: Feed, *, exact: bool = False) -> None:
        """Compares two runs at a point. With `exact`, any difference is too large."""
        for name in dict.fromkeys([*want, *got]):
            far, within = apart(want.get(name), got.get(name), self.tolerance[name])
            found = (far > 0 and (exact or not within), far)
            if found > self.found:
                self.found, self.exact = found, exact
                self.where, self.sizes = name, point.sizes

    def check(self, fits: Fitting, facts: Facts) -> Check:
        """Returns the finished check with its facts."""
        bad, far = self.found
        if not self.differs:
            return Check(fits.check, fits.run, "bit-identical", facts=facts)
        kind: CheckKind = "within-tolerance"
        if bad:
            kind = "differs-from-repeats" if self.exact else "beyond-tolerance"
        facts = {**facts, "output": self.where, "max_abs": finite(far)}
        return Check(fits.check, fits.run, kind, dict(self.sizes), facts)


def _unwritten(want: Feed, poisoned: Feed) -> list[Facts]:
    """Returns the number of elements that are still 0xFF after a run, for each such output."""
    found: list[Facts] = []
    for name, array in poisoned.items():
        if name not in want or want[name].shape != array.shape or not array.size:
            continue  # the check of the order reports this
        left = _all_ones(array) & ~_all_ones(want[name])
        if left.any():
            found.append({"count": int(left.sum()), "of": array.size, "output": name})
    return found


def _all_ones(array: np.ndarray) -> np.ndarray:
    """Returns one flag for each element, flat: True if all its bytes are 0xFF."""
    raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return np.asarray((raw.reshape(array.size, array.itemsize) == 0xFF).all(axis=1))
