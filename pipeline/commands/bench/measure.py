"""Times calls of an engine, and of anything that is compared with an engine, in the same way.

After a warm-up, single calls are timed (latency), and then many calls together (throughput). A
`Clock` measures. On a GPU it uses events on the stream of the calls, so it gives the device's
times. Needs numpy only.
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

_CACHE = 256 << 20  # wanted bytes of all input sets: more than any cache holds
_SETS = 2, 8  # the least and the most sets of inputs
_FEW = 5  # calls that are timed even if they are slow

Call = Callable[[int], object]  # makes call number n


class Clock(Protocol):
    """Times calls."""

    def one(self, call: Callable[[], object]) -> float:
        """Returns the milliseconds of one call, alone. Waits until the call has ended."""
        ...

    def many(self, call: Call, count: int) -> float:
        """Returns the milliseconds of `count` calls in a row. Waits until all have ended."""
        ...


class WallClock:
    """Times calls that have ended when they return."""

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
        repeat: The least number of timed calls.
        seconds: The least duration of all timed calls, in seconds.
        warm_up: The least duration of the warm-up, in seconds. It has at least three calls.
        most: The seconds after which timing stops, if at least five calls were timed.
        count: The largest number of timed calls.
    """

    repeat: int = 30
    seconds: float = 1.0
    warm_up: float = 0.5
    most: float = 20.0
    count: int = 5000


@dataclass(frozen=True)
class Timing:
    """Milliseconds of single calls, and calls per second with many calls at a time."""

    runs: int
    median_ms: float
    p99_ms: float
    least_ms: float
    calls_per_second: float


def timed(call: Call, clock: Clock, method: Method) -> Timing:
    """Warms up, then times single calls, then many calls together."""
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
    """Returns two to eight sets of random inputs at these sizes.

    Several sets together are larger than the caches, except for small inputs. Values are in the
    declared ranges. The same sizes give the same values.
    """
    one = sum(math.prod(shape_at(i.shape, sizes)) * np.dtype(i.dtype).itemsize for i in inputs)
    least, most = _SETS
    count = min(max(-(-_CACHE // max(one, 1)), least), most)
    return tuple({i.name: i.sample(sizes, seed) for i in inputs} for seed in range(count))
