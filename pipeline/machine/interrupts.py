"""Ends the program when a signal comes: cleans up, prints one line, exits with code 130.

Where Ctrl-C is the usual end (`usual_end`), it prints nothing, and the code is 0.

No signal raises an exception in the program. A `KeyboardInterrupt` inside the import of a C
extension (torch) crashes the process, or is swallowed, and the run goes on. So a thread ends the
process. It also runs while the main thread is in a long C call that releases Python's lock.

`end_on_signals` is for programs only. In a library call Python's own Ctrl-C stays as it is, and the
functions here only keep the list of what to clean up.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import NoReturn

INTERRUPTED = 130
UNCHANGED = "existing artifacts are unchanged"
# seconds; with the cleanup they stay below 5 s
CHILDREN = 2.0  # for child processes to clean up and end
_STOP = 0.5  # for the main thread to stop; in a long C call it does not
_HELD = 1.0  # for a `held` block to finish
_ALL = 4.5  # for everything together

Clean = Callable[[], None]


class _Main(threading.local):
    """How many `held` blocks this thread is in."""

    held = 0


class _State:
    """What the thread that ends the process has to know."""

    def __init__(self) -> None:
        self.cleanups: list[Clean] = []
        self.outcome = UNCHANGED
        self.usual = False
        self.numbers: frozenset[int] = frozenset()
        self.wake = -1  # the pipe's end to write a signal's number to
        self.ending = threading.Event()
        self.stopped = threading.Event()
        self.turn = threading.RLock()  # held by `held` blocks
        self.code: int | None = None


_state = _State()
_thread = _Main()


def end_on_signals() -> None:
    """Makes Ctrl-C, SIGTERM and SIGHUP end this process with exit code 130, after a cleanup.

    A signal that the process was started with ignoring stays ignored (`nohup`, `make test &`). Call
    it in the main thread of a program. A second call does nothing.
    """
    if _state.wake >= 0 or sys.platform == "win32":
        return
    wanted = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    numbers = [number for number in wanted if signal.getsignal(number) != signal.SIG_IGN]
    _state.numbers = frozenset(numbers)
    read, _state.wake = os.pipe()
    os.set_blocking(_state.wake, False)
    threading.Thread(target=_watch, args=(read,), name="interrupts", daemon=True).start()
    # the C part of Python's handler writes the number, also while the main thread is in C code
    signal.set_wakeup_fd(_state.wake, warn_on_full_buffer=False)
    for number in numbers:
        signal.signal(number, _handle)
    os.register_at_fork(after_in_child=_forked)
    atexit.register(_leave)  # registered first, so it runs last


def end_with(code: int) -> NoReturn:
    """Ends the program with this exit code, after its `atexit` functions.

    The interpreter's teardown is left out: libraries can crash in it, and a signal would end the
    process with another exit code.
    """
    _state.code = code
    sys.exit(code)


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Delays the end of the process until the block is done.

    For a few system calls that belong together: to make a thing and to register its cleanup.
    """
    _thread.held += 1
    try:
        with _state.turn:
            yield
    finally:
        _thread.held -= 1
        if _state.ending.is_set() and threading.current_thread() is threading.main_thread():
            _stop()


def register(clean: Clean) -> None:
    """Has `clean` called if a signal ends the process. It may run again after it ran already."""
    _state.cleanups.append(clean)


def unregister(clean: Clean) -> None:
    """Undoes `register`."""
    with contextlib.suppress(ValueError):
        _state.cleanups.remove(clean)


@contextlib.contextmanager
def cleaned(clean: Clean) -> Iterator[None]:
    """Calls `clean` at the end of the block, also if a signal ends the process."""
    register(clean)
    try:
        yield
    finally:
        clean()
        unregister(clean)


@contextlib.contextmanager
def usual_end() -> Iterator[None]:
    """Makes Ctrl-C the usual end of the program inside the block: no line, and exit code 0.

    In a library call, Ctrl-C ends the block.
    """
    _state.usual = True
    try:
        with contextlib.suppress(KeyboardInterrupt):
            yield
    finally:
        _state.usual = False


def settle(outcome: str) -> None:
    """Says what the program has changed so far, for the line on its end."""
    _state.outcome = outcome


def outcome() -> str:
    """What the program has changed so far, as a part of a sentence."""
    return _state.outcome


def _handle(number: int, _: FrameType | None) -> None:
    for each in _state.numbers:
        signal.signal(each, signal.SIG_IGN)
    _state.ending.set()
    with contextlib.suppress(OSError):  # other code may have taken the wakeup file away
        os.write(_state.wake, bytes([number]))
    if not _thread.held:
        _stop()


def _stop() -> NoReturn:
    """Stops the main thread where it is, until the process ends."""
    _state.stopped.set()
    time.sleep(_ALL)
    os._exit(INTERRUPTED)  # the cleanup takes too long; the next run does the rest


def _watch(read: int) -> None:
    while True:
        numbers = _state.numbers.intersection(os.read(read, 64))
        if numbers:  # not another signal with a Python handler
            break
    _state.ending.set()
    usual, code = _state.usual and numbers == {signal.SIGINT}, INTERRUPTED
    try:
        _state.stopped.wait(_STOP)
        said = "interrupted while files were moved; run the command again"
        if _state.turn.acquire(timeout=_HELD):
            said, code = f"interrupted; {_state.outcome}", 0 if usual else INTERRUPTED
            for clean in reversed(_state.cleanups):
                with contextlib.suppress(Exception):
                    clean()
        if code:
            os.write(2, f"error: {said}\n".encode())
    finally:
        os._exit(code)


def _forked() -> None:
    """A forked process has neither the thread nor anything to clean up."""
    signal.set_wakeup_fd(-1)
    for number in _state.numbers:
        signal.signal(number, signal.SIG_DFL)
    _state.cleanups.clear()
    _state.code = None


def _leave() -> None:
    if _state.code is None:  # an error that nobody caught
        return
    for file in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            file.flush()
    os._exit(_state.code)
