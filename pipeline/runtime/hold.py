"""Keeps the inputs of calls alive until the GPU has read them."""

from __future__ import annotations

from collections import deque
from typing import Any

from pipeline.runtime import cuda as _cuda

_MOST = 32  # calls


class Held:
    """Inputs of calls that are not done yet.

    The engine keeps them, because their owner's stream does not wait for the engine's stream.
    """

    def __init__(self) -> None:
        self._calls: deque[tuple[_cuda.Event, list[Any]]] = deque()

    def hold(self, event: _cuda.Event, keep: list[Any]) -> None:
        """Keeps objects until the event; waits for the oldest call if there are too many."""
        calls = self._calls
        while calls and calls[0][0].over():
            calls.popleft()
        if len(calls) >= _MOST:
            calls.popleft()[0].synchronise()
        calls.append((event, keep))

    def clear(self) -> None:
        """Releases everything; wait for the GPU first."""
        self._calls.clear()
