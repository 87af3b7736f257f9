"""Finds the sizes of one dim at which a module runs, from a few dozen runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from pipeline.probe.rules import residues

_WINDOW = 128  # sizes on each side of the base in the search for the step
_STEPS = (2, 4, 8, 14, 16, 32, 64)  # of most models that need a multiple
_RUN = 64  # consecutive sizes that are tried if nothing has failed
_SMALL, _LARGE = 10, 3  # sizes at the ends of the range; small ones fail more often
_FAR = (96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 1024)


class Search:
    """Finds the sizes of one dim at which a module runs, with the other dims fixed.

    After `explore`, the result is in `low`, `high` and `step`. The module runs at every size that
    was tried from `low` to `high` in steps of `step`. It fails at the sizes directly outside.

    Args:
        legal: The dim's legal sizes.
        base: A size at which the module runs.
        takes: Returns True if the module runs at a size; None if that is unknown.
        ended: Returns True if the time is used up.
    """

    def __init__(
        self,
        legal: Sequence[int],
        base: int,
        takes: Callable[[int], bool | None],
        ended: Callable[[], bool] = lambda: False,
    ) -> None:
        self.legal, self.base, self._ended = legal, base, ended
        self.tested: dict[int, bool] = {base: True}
        self.settled = True  # False if time ran out before `step`, `low` and `high` were found
        self._takes = takes
        self._unit = legal[1] - legal[0] if len(legal) > 1 else 1
        self.low, self.high, self.step = legal[0], legal[-1], self._unit

    @property
    def good(self) -> list[int]:
        return sorted(n for n, ok in self.tested.items() if ok)

    @property
    def bad(self) -> list[int]:
        return sorted(n for n, ok in self.tested.items() if not ok)

    def run(self) -> list[int]:
        """The sizes from `low` to `high` in steps of `step`."""
        return list(range(self.low, self.high + 1, self.step))

    def outside(self) -> list[int]:
        """Sizes that run, but are not in `run`."""
        inside = range(self.low, self.high + 1, self.step)
        return [n for n in self.good if n not in inside]

    def explore(self, *, brief: bool = False) -> None:
        """Tries sizes that often fail first, then sizes that show the step and the ends.

        If `brief` and none of the first thirty or so fails, no more are tried.
        """
        at = self.legal.index(self.base)
        last = len(self.legal) - 1
        near = [0, at + 1, at - 1, last, 1, at + 2, at + 3, 2, last - 1, at - 2, 3]
        self._try(self.legal[k] for k in near if 0 <= k <= last)
        if not self.bad:
            self._try(self.legal[k] for k in _spread(last + 1, 6))
            self._try(self.legal[:_SMALL])
            self._try(self.legal[at : at + _SMALL])
            if self.bad or not brief:
                self._try(self.legal[k] for k in _spread(last + 1, 24))
                self._try(self.legal[:_RUN])
                self._try(self.legal[at : at + _RUN])
        if self.bad:
            self._find_step(at)
            self._find_ends()
            if (self.high - self.low) * 4 < self.legal[-1] - self.legal[0] or self.outside():
                # the range may be one of many: 112..115, 140..143
                self._try(self.legal[max(at - _RUN, 0) : at + _RUN])

    def _try(self, sizes: Sequence[int] | Iterator[int]) -> None:
        for size in sizes:
            self.ok(size)

    def ok(self, size: int) -> bool | None:
        if size not in self.tested:
            if size not in self.legal:
                return None
            result = self._takes(size)
            if result is None:
                return None
            self.tested[size] = result
        return self.tested[size]

    def _find_step(self, at: int) -> None:
        """The distance from the base to the nearest size that runs."""
        near: list[int] = []
        common = [k // self._unit for k in _STEPS if k > self._unit and k % self._unit == 0]
        for place, k in enumerate([1, *common, *range(2, min(_WINDOW, len(self.legal)) + 1)]):
            near = [self.legal[i] for i in (at + k, at - k) if 0 <= i < len(self.legal)]
            # a size of 1 may run at any step, because it broadcasts
            near = [n for n in near if (n > 1 or place > len(common)) and self.ok(n)]
            if near:
                break
        near = near or self._far()
        self.step = math.gcd(*(n - self.base for n in near))
        while self.step > self._unit and (finer := self._finer()):
            self.step = finer
        if self.step == 0:
            self.low = self.high = self.base
            self.step = self._unit
            self.settled = not self._ended()

    def _far(self) -> list[int]:
        """Sizes that run, after a try of sizes far from the base."""
        far = [self.base * 2, self.base * 3, self.base // 2]
        far += [self.base + sign * n for n in _FAR for sign in (1, -1)]
        self._try(far)
        self._try(n for n in (*_FAR, 224, 336, 448, 672))
        return self.good

    def _finer(self) -> int:
        """A smaller step, if a size between two steps runs; otherwise 0."""
        for prime in _primes(self.step // self._unit):
            finer = self.step // prime
            for n in (self.base + finer, self.base - finer):
                if self.ok(n):
                    return finer
        return 0

    def _find_ends(self) -> None:
        if self.low == self.high:
            return
        first = self.base - (self.base - self.legal[0]) // self.step * self.step
        last = self.base + (self.legal[-1] - self.base) // self.step * self.step
        steps = range(first, last + 1, self.step)
        at = steps.index(self.base)
        self._try([*steps[:1], *steps[-1:]])
        self.low, self.high = steps[self._end(steps, at, -1)], steps[self._end(steps, at, 1)]
        self.settled = not self._ended()
        self._try([*steps[:_SMALL], *steps[: -_LARGE - 1 : -1]])
        self._try(steps[k] for k in _spread(len(steps), 12))
        self._check_between()
        self.low, self.high = steps[self._end(steps, at, -1)], steps[self._end(steps, at, 1)]

    def _end(self, steps: range, at: int, sign: int) -> int:
        """The index of the last size before one that fails, up or down from the base."""
        while True:
            tried = [steps.index(n) for n in self.tested if n in steps]
            outward = sorted((k for k in tried if (k - at) * sign >= 0), key=lambda k: abs(k - at))
            kept = at
            failed = -1
            for k in outward:
                if not self.tested[steps[k]]:
                    failed = k
                    break
                kept = k
            if failed < 0:
                return len(steps) - 1 if sign > 0 else 0
            if abs(failed - kept) == 1:
                inner = [kept - sign * k for k in (1, 2, 3) if (kept - sign * k - at) * sign >= 0]
                fresh = [k for k in inner if steps[k] not in self.tested]
                if not any(self.ok(steps[k]) is not None for k in fresh):
                    return kept
                continue
            middle = (kept + failed) // 2
            if self.ok(steps[middle]) is None:
                return kept  # unknown: keep the sizes that have run

    def _check_between(self) -> None:
        """Tries sizes off the step over the whole range: all of them should fail."""
        if self.step > self._unit:
            inside = range(self.low, self.high + 1, self._unit)
            for n in (inside[k] for k in _spread(len(inside), 8)):
                self.ok(n if (n - self.base) % self.step else n + self._unit)

    def residues(self) -> tuple[int, int, int] | None:
        """See `residues`. Ignores sizes below the first that runs."""
        return residues({n: ok for n, ok in self.tested.items() if n >= self.good[0]})


def _spread(count: int, most: int) -> list[int]:
    """At most `most` of `count` indices, in irregular steps, so that no multiple can hide.

    Most of them are small, because small sizes run faster.
    """
    if count <= most:
        return list(range(count))
    golden = (math.sqrt(5) - 1) / 2
    return list(dict.fromkeys(int((k * golden % 1) ** 3 * count) for k in range(1, most + 1)))


def _primes(number: int) -> list[int]:
    found = []
    for n in range(2, number + 1):
        while number % n == 0:
            found.append(n)
            number //= n
    return list(dict.fromkeys(found))
