"""How calls are timed: the same way for an engine and for everything that it is held against.

A call is timed alone (the one before has ended: latency), and many are timed together (as many
in flight as the host can start: throughput), after a warm-up. What measures is a `Clock`; on a
GPU it uses events on the stream that the calls run on, so that the times are the device's.
Needs numpy only.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from pipeline.spec.dims import shape_at
from pipeline.spec.tensors import Input

_CACHE = 256 << 20  # bytes of inputs to go round in, where so many sets do: more than any cache
_SETS = 2, 8  # sets of inputs, at least and at most
_FEW = 5  # calls that are timed however slow they are

Call = Callable[[int], object]  # makes call number n, on the n-th set of inputs


class Clock(Protocol):
    """Times calls; how long the host takes is not its business."""

    def one(self, call: Callable[[], object]) -> float:
        """Milliseconds of a call that starts when nothing else runs; returns when it has ended."""
        ...

    def many(self, call: Call, count: int) -> float:
        """Milliseconds of so many calls started one after the other; returns when all ended."""
        ...


class WallClock:
    """For calls that have ended when they return."""

    def one(self, call: Callable[[], object]) -> float:
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e3

    def many(self, call: Call, count: int) -> float:
        start = time.perf_counter()
        for n in range(count):
            call(n)
        return (time.perf_counter() - start) * 1e3


@dataclass(frozen=True)
class Method:
    """How often a call is repeated.

    Args:
        repeat: timed calls, at least.
        seconds: of timed calls, at least.
        warm_up: seconds of calls before, and three calls at least.
        most: seconds after which no further call is timed, once five are.
        count: timed calls, at most.
    """

    repeat: int = 30
    seconds: float = 1.0
    warm_up: float = 0.5
    most: float = 20.0
    count: int = 5000


@dataclass(frozen=True)
class Timing:
    """What so many calls took, one at a time, in milliseconds; calls a second, many in flight."""

    runs: int
    median_ms: float
    p99_ms: float
    least_ms: float
    calls_per_second: float


def timed(call: Call, clock: Clock, method: Method) -> Timing:
    """Warms up, then times calls one at a time and many at once."""
    start = time.perf_counter()
    warm = 0
    while warm < 3 or time.perf_counter() - start < method.warm_up:
        clock.one(lambda: call(warm))  # noqa: B023  # it is called at once
        warm += 1
    taken: list[float] = []
    start = time.perf_counter()
    while len(taken) < method.count:
        spent = time.perf_counter() - start
        if len(taken) >= method.repeat and spent >= method.seconds:
            break
        if len(taken) >= _FEW and spent >= method.most:
            break
        taken.append(clock.one(lambda: call(len(taken))))
    count = max(len(taken) // 2, _FEW)
    together = clock.many(call, count)
    return Timing(
        len(taken),
        float(np.median(taken)),
        float(np.percentile(taken, 99)),
        min(taken),
        count / together * 1e3,
    )


def input_sets(
    inputs: Sequence[Input], sizes: Mapping[str, int]
) -> tuple[dict[str, np.ndarray], ...]:
    """Random inputs at these sizes, two to eight sets of them, so that a cache does not hold them
    all (eight small ones it may).

    The same sizes give the same values; they are in the range that each input declares.
    """
    one = sum(math.prod(shape_at(i.shape, sizes)) * np.dtype(i.dtype).itemsize for i in inputs)
    least, most = _SETS
    count = min(max(-(-_CACHE // max(one, 1)), least), most)
    return tuple({i.name: i.sample(sizes, seed) for i in inputs} for seed in range(count))
