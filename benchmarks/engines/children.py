"""Runs commands that print lines of JSON, each in a child process with a time limit."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def lines(
    command: Sequence[str],
    add: Callable[[dict[str, Any]], None],
    *,
    limit: float | None = None,
    env: Mapping[str, str] | None = None,
) -> str:
    """Runs a command, and passes each line of JSON to `add` as it comes.

    Returns:
        The reason of a failure in one line; empty without a failure.
    """
    with tempfile.TemporaryFile("w+") as errors:
        try:
            child = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=errors, text=True, env=env,
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            return f"{command[0]} can't be started: {error.strerror}"
        try:
            with _limited(child, limit) as late:
                assert child.stdout is not None
                for line in child.stdout:
                    if line.startswith("{"):
                        with contextlib.suppress(ValueError):  # a report over several lines
                            add(json.loads(line))
                child.wait()
        finally:
            _end(child)
        if late:
            return f"not done in {limit:g} s"
        if child.returncode == 0:
            return ""
        errors.seek(0)
        said = [line.strip() for line in errors.read().splitlines() if line.strip()]
    words = [line for line in said if line.startswith("error: ")] or said
    return words[-1].removeprefix("error: ") if words else f"exit code {child.returncode}"


@contextlib.contextmanager
def _limited(child: subprocess.Popen[str], seconds: float | None) -> Iterator[list[int]]:
    """Ends the child after so many seconds. The list is then not empty."""
    late: list[int] = []

    def end() -> None:
        late.append(1)
        _kill(child)

    timer = threading.Timer(seconds, end) if seconds else None
    if timer:
        timer.start()
    try:
        yield late
    finally:
        if timer:
            timer.cancel()


def _kill(child: subprocess.Popen[str]) -> None:
    """Ends a child and its descendants (torch.compile starts workers)."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)


def _end(child: subprocess.Popen[str]) -> None:
    _kill(child)
    child.wait()


def other_python(extra: Sequence[str]) -> dict[str, str]:
    """The environment for another Python.

    It has no variables of this Python, which may set PYTHONHOME and library paths. It can import
    this repository and the `extra` folders.
    """
    base = Path(sys.base_prefix).resolve()
    own = {base / "lib", base.parent / "lib"}
    found = {k: v for k, v in os.environ.items() if k not in ("PYTHONHOME", "PYTHONPATH")}
    libraries = [Path(p) for p in found.pop("LD_LIBRARY_PATH", "").split(":") if p]
    kept = [p for p in libraries if not own & {p.resolve(), *p.resolve().parents}]
    if kept:
        found["LD_LIBRARY_PATH"] = ":".join(map(str, kept))
    return {**found, "PYTHONPATH": ":".join([str(ROOT), *extra])}
