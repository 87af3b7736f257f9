"""Calls a function in a forked process with a time limit: a crash or a hang becomes a result."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Outcome:
    """How a call ended.

    Args:
        result: What the function returned; None if it did not return.
        failure: ``hang``, ``crash: SIGSEGV``, ``exit 3``, or a traceback; empty if it returned.
        seconds: Its time.
    """

    result: Any
    failure: str
    seconds: float


def forked(function: Callable[..., Any], *arguments: Any, limit: float) -> Outcome:
    """Calls the function in a fork of this process.

    Args:
        function: The function.
        arguments: Its arguments.
        limit: Seconds until the process is killed, with its children.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def work() -> None:
        os.setsid()
        try:
            answer = (function(*arguments), "")
        except BaseException:
            answer = (None, traceback.format_exc())
        sender.send(answer)
        sender.close()
        os._exit(0)

    start = time.perf_counter()
    process = context.Process(target=work)
    process.start()
    sender.close()
    answer: tuple[Any, str] = (None, "hang")
    if receiver.poll(limit):
        try:
            answer = receiver.recv()
        except EOFError:
            process.join()
            answer = (None, _ended(process.exitcode or 0))
    _kill(process.pid)
    process.join()
    receiver.close()
    return Outcome(*answer, time.perf_counter() - start)


def _ended(code: int) -> str:
    return f"crash: {signal.Signals(-code).name}" if code < 0 else f"exit {code}"


def _kill(pid: int | None) -> None:
    if pid is not None:
        try:
            os.killpg(pid, signal.SIGKILL)
        except ProcessLookupError:
            return
