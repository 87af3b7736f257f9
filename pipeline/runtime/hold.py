"""What calls gave in, held until the GPU has read it."""

from __future__ import annotations

from collections import deque
from typing import Any

from pipeline.runtime import cuda as _cuda

_MOST = 32  # calls


class Held:
    """Inputs of calls that are not done yet: their owner's stream does not wait for ours."""

    def __init__(self) -> None:
        self._calls: deque[tuple[_cuda.Event, list[Any]]] = deque()

    def hold(self, event: _cuda.Event, keep: list[Any]) -> None:
        """Until the event; waits for the oldest call where there are too many."""
        calls = self._calls
        while calls and calls[0][0].over():
            calls.popleft()
        if len(calls) >= _MOST:
            calls.popleft()[0].synchronise()
        calls.append((event, keep))

    def clear(self) -> None:
        """Lets go of all, once the GPU was waited for."""
        self._calls.clear()
