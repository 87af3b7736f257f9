"""Calls functions in a child process, so that a crash of a library does not end the parent.

TensorRT can abort or segfault on some graphs (an Attention of opset 23, a plugin node without its
library). The caller then gets a `ChildDied` with the signal's name and the end of stderr.

A child handles several calls, one after the other. It is killed if its parent ends. The function,
its arguments, its result and its exception are pickled. So the child imports only the function's
module and the modules of its arguments.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import IO, Any, ParamSpec, TypeVar

from pipeline.errors import PipelineError
from pipeline.machine import interrupts
from pipeline.machine.progress import Announce
from pipeline.machine.resources import peak_memory

P = ParamSpec("P")
T = TypeVar("T")

_TAIL = 4000  # characters of stderr that are kept
_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "import pipeline.machine.child as c; c.main()"
)
_PR_SET_PDEATHSIG = 1  # prctl(2)


class ChildDied(PipelineError):
    """The child process ended without an answer.

    Args:
        how: ``Segmentation fault (SIGSEGV)``, ``exit code 3``.
        words: The end of its output on stderr.
    """

    def __init__(self, how: str, words: str) -> None:
        super().__init__(f"the process died: {how}", detail=words)
        self.how, self.words = how, words

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.how, self.words)


class ChildLate(ChildDied):
    """The child process was killed because a call took longer than the time limit."""


class ChildFailed(Exception):
    """An exception in the child that is not a `PipelineError`.

    Args:
        text: The exception's type and text.
        trace: The traceback in the child.
    """

    def __init__(self, text: str, trace: str = "") -> None:
        super().__init__(text)
        self.trace = trace


class Child:
    """A child process that calls functions; a context manager.

    Args:
        env: Variables to set in the child, in addition to the parent's.
        announce: Called in the parent for each text that a call announces. Pass the same object as
            an argument of `call`: the child gets a function that sends the text.
        time_limit: The time limit of one call, in seconds.
        grace: The seconds from SIGTERM to SIGKILL for an interrupted or late call. At SIGTERM the
            child runs what `pipeline.machine.interrupts` has registered. With 0 it is killed at
            once. If a signal ends this process, the time is shorter.
    """

    def __init__(
        self,
        env: Mapping[str, str] | None = None,
        *,
        announce: Announce | None = None,
        time_limit: float | None = None,
        grace: float = 0.0,
    ) -> None:
        self._env = {**os.environ, **(env or {})}
        self._announce, self._time_limit, self._grace = announce, time_limit, grace
        self._late = False
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None
        self._answers: IO[bytes] | None = None
        self.peak_memory = 0

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def call(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Calls a function in the child. Starts a child if there is none.

        Args:
            function: A function of a module that the child can import.
            args, kwargs: The function's arguments.

        Raises:
            ChildLate: The call took longer than the time limit.
            ChildDied: The child ended without an answer. The next call starts a new child.
            PipelineError, OSError, MemoryError: The function raised this error.
            ChildFailed: The function raised another exception.
        """
        process = self._process or self._start()
        assert process.stdin is not None
        timer = threading.Timer(self._time_limit or 0.0, self._end_late, [process])
        try:
            if self._time_limit:
                timer.start()
            _Asking(process.stdin, self._announce).dump((function, args, kwargs))
            process.stdin.flush()
            state, result = self._answer()
        except (EOFError, BrokenPipeError, pickle.UnpicklingError):
            raise self._died() from None
        except BaseException:  # an interrupt: the child must not continue
            self._end(process)
            self.close()
            raise
        finally:
            timer.cancel()
        if state == "done":
            done: T = result
            return done
        if isinstance(result, (PipelineError, OSError, MemoryError)):
            raise result
        raise ChildFailed(*result)

    def close(self) -> None:
        """Kills the child, if there is one."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            interrupts.unregister(self._interrupted)
        stdin = None if self._process is None else self._process.stdin
        for file in (self._errors, self._answers, stdin):
            with contextlib.suppress(OSError):  # a pipe that could not be flushed
                if file is not None:
                    file.close()
        self._process = self._errors = self._answers = None

    def _answer(self) -> tuple[str, Any]:
        """The answer of a call. Passes on each text that the child announces before."""
        assert self._answers is not None
        while True:
            state, result, peak = pickle.load(self._answers)
            self.peak_memory = max(self.peak_memory, peak)
            if state != "announced":
                return state, result
            assert self._announce is not None
            self._announce(result)

    def _end_late(self, process: subprocess.Popen[bytes]) -> None:
        self._late = True
        self._end(process)

    def _interrupted(self) -> None:
        if self._process is not None:
            self._end(self._process, min(self._grace, interrupts.CHILDREN))
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(0.5)

    def _end(self, process: subprocess.Popen[bytes], grace: float | None = None) -> None:
        grace = self._grace if grace is None else grace
        try:
            if grace:
                process.terminate()
                process.wait(grace)
        except subprocess.TimeoutExpired:
            pass
        finally:
            process.kill()

    def _start(self) -> subprocess.Popen[bytes]:
        read, write = os.pipe()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            with interrupts.held():
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _START, json.dumps(sys.path), str(write)],
                    stdin=subprocess.PIPE,
                    stdout=self._errors,
                    stderr=self._errors,
                    pass_fds=(write,),
                    env=self._env,
                )
                interrupts.register(self._interrupted)
        finally:
            os.close(write)
        self._answers = os.fdopen(read, "rb")
        return self._process

    def _died(self) -> ChildDied:
        assert self._process is not None
        assert self._errors is not None
        code = self._process.wait()
        self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, self._errors.tell() - _TAIL))
        words = self._errors.read().decode(errors="replace").strip()
        self.close()
        if self._late:
            self._late = False
            return ChildLate(f"took longer than the time limit of {self._time_limit:g} s", words)
        how = f"exit code {code}"
        if code < 0:
            number = signal.Signals(-code)
            how = f"{signal.strsignal(-code) or 'signal'} ({number.name})"
        return ChildDied(how, words)


class _Asking(pickle.Pickler):
    """Pickles a call. In place of `announce`, the child gets a function that sends the text."""

    def __init__(self, file: IO[bytes], announce: Announce | None) -> None:
        super().__init__(file)
        self._announce = announce

    def persistent_id(self, item: Any) -> str | None:
        return "announce" if item is not None and item is self._announce else None


class _AskedUnpickler(pickle.Unpickler):
    """The child's side of `_Asking`."""

    def __init__(self, file: IO[bytes], announce: Announce) -> None:
        super().__init__(file)
        self._announce = announce

    def persistent_load(self, name: str) -> Announce:
        assert name == "announce"
        return self._announce


def main() -> None:
    """The child's side: answers calls from stdin until it is closed."""
    answers = os.fdopen(int(sys.argv[2]), "wb")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole process group
    interrupts.end_on_signals()
    with contextlib.suppress(OSError, AttributeError):  # Linux only
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    def answer(state: str, result: object) -> None:
        answers.write(pickle.dumps((state, result, _peak())))
        answers.flush()

    while True:
        try:
            asked = _AskedUnpickler(sys.stdin.buffer, lambda text: answer("announced", text))
            function, args, kwargs = asked.load()
        except EOFError:
            return
        result: object
        try:
            state, result = "done", function(*args, **kwargs)
        except (
            PipelineError,
            OSError,
            MemoryError,
        ) as error:  # such as a full disk: the caller handles it
            state, result = "failed", error
        except BaseException as error:  # also sys.exit() in a model; the parent reports it
            state, result = "failed", (f"{type(error).__name__}: {error}", traceback.format_exc())
        answer(state, result)
        del function, args, kwargs, result  # frees the memory before the next call


def _peak() -> int:
    """The peak memory in bytes. A child's ru_maxrss begins with its parent's (getrusage(2))."""
    return peak_memory() or 0
