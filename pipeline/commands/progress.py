"""Progress on stderr: lines in a pipe, and a line that moves on a terminal."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, TextIO

from pipeline.commands.output import BEFORE_RESULTS, plain, show
from pipeline.machine.progress import StageText

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

_LOADING = "load libraries"
_FIRST = 0.1  # seconds after which a pipe gets a line, if no step has begun
_HEARTBEAT = 15.0  # seconds without output before a long stage prints that it still runs


class Progress:
    """Shows each step on stderr when it begins, and while a long step runs.

    In a pipe, each step is a line; with `as_json`, it is a JSON object with its seconds. On a
    terminal with rich (the extra ``live``), each stage is a line, and the step that runs is a line
    below them with its seconds.
    """

    def __init__(self, *, as_json: bool = False) -> None:
        self._as_json = as_json
        self._start = time.monotonic()
        self._last = self._start
        self._text = ""
        self._stream = sys.stderr  # a model's own prints are hidden with sys.stderr
        self._done = threading.Event()
        self._bar = None if as_json else _bar(self._stream)

    def __call__(self, text: str) -> None:
        self._text, self._last = text, time.monotonic()
        if self._bar is None or not self._bar.live.is_started:
            self._print(text)
            return
        stage = isinstance(text, StageText) or " " not in text
        text = plain(text)
        if stage:
            self._bar.console.print(self._stamped(text), highlight=False, markup=False)
        for task in self._bar.task_ids:
            self._bar.remove_task(task)
        self._bar.add_task(text, total=None)

    def _stamped(self, text: str) -> str:
        if self._as_json:
            seconds = round(time.monotonic() - self._start, 1)
            if isinstance(text, StageText) and text.last is not None:
                return json.dumps(
                    {"seconds": seconds, "step": text.name, "last_seconds": text.last}
                )
            return json.dumps({"seconds": seconds, "step": text})
        return f"[{time.monotonic() - self._start:6.1f} s] {text}"

    def _print(self, text: str) -> None:
        with contextlib.suppress(OSError):  # a full disk behind stderr
            show(self._stamped(text), self._stream)

    @contextlib.contextmanager
    def heartbeat(self, *, loads: bool = True) -> Iterator[None]:
        """Inside the block, the line on a terminal moves; a pipe gets a line after every 15 s
        without output. If `loads` and torch is not loaded yet, the first line comes at once."""
        if self._bar is not None:
            BEFORE_RESULTS.append(self._bar.stop)
            try:
                with self._bar:
                    self._bar.add_task(_LOADING, total=None)
                    yield
            finally:
                BEFORE_RESULTS.remove(self._bar.stop)
            return

        loads = loads and "torch" not in sys.modules

        def beat() -> None:
            if not self._done.wait(_FIRST) and not self._text and loads:
                self._print(_LOADING)
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


def _bar(stream: TextIO) -> Bar | None:
    """rich's display of the step that runs; None in a pipe, on a plain terminal or without rich."""
    if not stream.isatty():
        return None
    try:
        from rich.console import Console
        from rich.progress import Progress as Bar
        from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn
    except ImportError:
        return None
    console = Console(file=stream)
    if not console.is_terminal or console.is_dumb_terminal:
        return None
    return Bar(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )
