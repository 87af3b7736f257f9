"""Measures how long calls wait and run on the GPU."""

from __future__ import annotations

from collections import deque
from contextlib import suppress

from pipeline.errors import EngineError
from pipeline.runtime import cuda as _cuda
from pipeline.runtime.metrics import TimeMetrics

_MOST_PENDING = 256  # calls whose times are not read yet


class Timing:
    """Measures the queue time and the GPU time of calls with CUDA events.

    The first event of a call is on a stream without other work, so the GPU reaches it at once.
    All times are from the GPU's clock. Nothing waits for the GPU: the times of calls that are done
    are read in later calls. While `_MOST_PENDING` calls are not done, further calls are not timed.

    Source: CUDA Runtime API reference, cudaEventElapsedTime.
    """

    def __init__(self, time: TimeMetrics) -> None:
        self._time = time
        self.events = _cuda.Events(timing=True)
        self._idle = _cuda.Stream(blocking=False)
        self.pending: deque[tuple[_cuda.Event, _cuda.Event, _cuda.Event]] = deque()

    def start(self) -> Timer | None:
        """The timer of a call that starts now; None if it is not timed. Needs no lock."""
        if len(self.pending) >= _MOST_PENDING:
            return None
        return Timer(self, self.events.take(self._idle.handle))

    def collect(self) -> None:
        """Adds the times of the calls that are done. It needs the engine's lock."""
        while self.pending:
            submitted, begun, ended = self.pending[0]
            if not (ended.over() and submitted.over()):
                return
            self.pending.popleft()
            # a call on an idle GPU may begin before the GPU reaches the other stream's event
            self._time["queue_seconds"] += max(_cuda.elapsed(submitted, begun), 0.0)
            self._time["gpu_seconds"] += _cuda.elapsed(begun, ended)
            self._time["calls"] += 1

    def close(self) -> None:
        """Collects, and frees the events. It needs the engine's lock."""
        with suppress(EngineError):
            self.collect()
        self.pending.clear()
        self.events.close()


class Timer:
    """The events of one call."""

    __slots__ = ("_begun", "_submitted", "_timing")

    def __init__(self, timing: Timing, submitted: _cuda.Event) -> None:
        self._timing, self._submitted = timing, submitted
        self._begun = submitted

    def begin(self, stream: int) -> None:
        """All work that the run waits for is on the stream; the run comes next."""
        self._begun = self._timing.events.take(stream)

    def end(self, stream: int) -> None:
        """The run is on the stream."""
        timing = self._timing
        timing.pending.append((self._submitted, self._begun, timing.events.take(stream)))
        timing.collect()
