"""What an engine has to keep beside the numbers.

The same inputs give the same outputs, at once and after other sizes, and every element of an
output is written. What the rows of a batch have to keep is in `pipeline.compare.rows`. A size that
does not fit into the GPU's memory is no fault: it is noted, and the check is done at the others.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from pipeline.artifact.manifest import CheckInfo
from pipeline.errors import OutOfMemory
from pipeline.spec.closeness import apart
from pipeline.spec.profiles import Point
from pipeline.spec.tensors import Feed, Tolerance

Run = Callable[[Feed], dict[str, np.ndarray]]
DETERMINISM, ORDER, UNWRITTEN = "determinism", "shuffled order", "unwritten outputs"
_REPEATS = 3


@dataclass(frozen=True)
class Subject:
    """An engine in one profile.

    Args:
        name: of its run.
        run: the outputs for a feed, which stay as they are when it is called again.
        poisoned: the same, with every byte of the outputs 0xFF before the run.
    """

    name: str
    run: Run
    poisoned: Run


@dataclass
class Checked:
    """The checks that were done, and a note for every size at which one was not, or for a check
    that was done at none."""

    checks: list[CheckInfo] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass
class Fitting:
    """At which sizes a check was done, and which do not fit into the GPU's memory.

    Args:
        check, run: their names.
        done: at how many sizes.
        full: the others, in words, each with the error.
    """

    check: str
    run: str
    done: int = 0
    full: list[tuple[str, str]] = field(default_factory=list)

    @contextmanager
    def at(self, where: object) -> Iterator[None]:
        """Counts the size if the block ends well; ends an `OutOfMemory` in it."""
        try:
            yield
        except OutOfMemory as error:
            self.full.append((str(where), str(error)))
        else:
            self.done += 1

    @property
    def sizes(self) -> str:
        """Where it was done, in words."""
        return f"{self.done} sizes" if self.done != 1 else "1 size"

    def notes(self) -> list[str]:
        """What was not done, and why."""
        name = f"{self.check} of {self.run}: not done"
        if self.done:
            return [f"{name} at {where}: {why}" for where, why in self.full]
        places = ", ".join(where for where, _ in self.full)
        return [
            f"{name}, no size fits into the GPU's memory: at {places}: {why}"
            for _, why in self.full[:1]
        ]


def check_engine(
    subject: Subject,
    points: Sequence[Point],
    feeds: Sequence[Feed],
    first: Sequence[Feed],
    tolerance: Mapping[str, Tolerance],
    seed: int = 0,
) -> Checked:
    """Determinism, shuffled order and unwritten outputs, each over all points that fit.

    Args:
        subject: the engine.
        points, feeds: the sizes and the inputs.
        first: the outputs that it gave for them when it was compared.
        tolerance: by output name.
        seed: of the order.

    Returns:
        The three checks, but for those that were done at no size; none where there are no points.
    """
    found = Checked()
    if not points:
        return found
    fits, worst = Fitting(DETERMINISM, subject.name), _Worst(tolerance)
    repeated: set[int] = set()
    for n, (point, feed) in enumerate(zip(points, feeds, strict=True)):
        with fits.at(point):
            subject.run(feed)  # what other sizes left is not to be taken for chance
            again = subject.run(feed)
            for _ in range(_REPEATS - 1):
                worst.add(point, again, subject.run(feed))
            repeated.add(n)
    if fits.done or worst.found[0]:
        what = f"{_REPEATS} runs at each of {fits.sizes}"
        found.checks.append(worst.info(fits.check, subject.name, what))
    found.notes += fits.notes()
    exact = repeated if not worst.differs else set()

    fits = Fitting(UNWRITTEN, subject.name)
    holes: list[tuple[Point, str]] = []
    for point, feed, outputs in zip(points, feeds, first, strict=True):
        with fits.at(point):
            holes += [(point, text) for text in _unwritten(outputs, subject.poisoned(feed))]
    if fits.done:
        at, text = (
            holes[0] if holes else (None, f"every element is written at each of {fits.sizes}")
        )
        sizes = dict(at.sizes) if at else {}
        found.checks.append(CheckInfo(fits.check, subject.name, sizes, not holes, text))
    found.notes += fits.notes()

    fits, worst = Fitting(ORDER, subject.name), _Worst(tolerance)
    order = list(range(len(points)))
    random.Random(seed).shuffle(order)
    for n in order:
        with fits.at(points[n]):
            worst.add(points[n], first[n], subject.poisoned(feeds[n]), exact=n in exact)
    if fits.done:
        what = f"{fits.sizes} in another order"
        found.checks.append(worst.info(fits.check, subject.name, what))
    found.notes += fits.notes()
    return found


@dataclass
class _Worst:
    """The largest difference between outputs that should be the same.

    `found`: whether it is too large, and how large it is; `exact`: whether any was too large.
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
        """Holds two runs at a point against each other; `exact`: any difference is too large."""
        for name in dict.fromkeys([*want, *got]):
            far, within = apart(want.get(name), got.get(name), self.tolerance[name])
            found = (far > 0 and (exact or not within), far)
            if found > self.found:
                self.found, self.exact = found, exact
                self.where, self.sizes = name, point.sizes

    def info(self, check: str, run: str, what: str) -> CheckInfo:
        bad, far = self.found
        if not self.differs:
            return CheckInfo(check, run, {}, True, f"{what}: equal to the bit")
        limit = "though repeated runs are equal to the bit" if self.exact else "beyond tolerance"
        text = f"{what}: {self.where} differs by up to {far:.3g}" + (f", {limit}" if bad else "")
        return CheckInfo(check, run, dict(self.sizes), not bad, text)


def _unwritten(want: Feed, poisoned: Feed) -> list[str]:
    """What a run left of the 0xFF bytes in its outputs, one line an output."""
    lines = []
    for name, array in poisoned.items():
        if name not in want or want[name].shape != array.shape or not array.size:
            continue  # the order's check says it
        left = _all_ones(array) & ~_all_ones(want[name])
        if left.any():
            lines.append(f"{int(left.sum())} of {array.size} elements of {name} are not written")
    return lines


def _all_ones(array: np.ndarray) -> np.ndarray:
    """True where every byte of an element is 0xFF; one flag an element, flat."""
    raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return np.asarray((raw.reshape(array.size, array.itemsize) == 0xFF).all(axis=1))
