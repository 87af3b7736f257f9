"""Progress on stderr: one line for each step, and while a long step runs."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator

from pipeline.commands.output import show

_HEARTBEAT = 15.0  # seconds without output before a long stage prints that it still runs


class Progress:
    """Prints each step to stderr when it begins, and while a long step runs."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._last = self._start
        self._text = ""
        self._stream = sys.stderr  # a model's own prints are hidden with sys.stderr
        self._done = threading.Event()

    def __call__(self, text: str) -> None:
        self._text, self._last = text, time.monotonic()
        self._print(text)

    def _print(self, text: str) -> None:
        with contextlib.suppress(OSError):  # a full disk behind stderr
            show(f"[{time.monotonic() - self._start:6.1f} s] {text}", self._stream)

    @contextlib.contextmanager
    def heartbeat(self) -> Iterator[None]:
        """Prints a line after every 15 s without output inside the block."""

        def beat() -> None:
            while not self._done.wait(1.0):
                if self._text and time.monotonic() - self._last >= _HEARTBEAT:
                    self._last = time.monotonic()
                    self._print(f"{self._text} ... still running")

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._done.set()
            thread.join()
