"""Calling a function in a child process, so that a crash of a library ends nothing else.

TensorRT can abort or segfault on a graph that it does not like (an Attention of opset 23, a
plugin node without its library); then the caller gets a `ChildDied` with the signal's name and
the last words on stderr. A child serves several calls, one after the other, and is killed with
its parent. What it is asked for goes by name (``module:function``); arguments, results and
exceptions are pickled.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from types import TracebackType
from typing import IO, Any

from pipeline.errors import PipelineError
from pipeline.machine.resources import peak_memory

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
        words: the end of what it wrote to stderr.
    """

    def __init__(self, how: str, words: str) -> None:
        super().__init__(f"the process died: {how}", detail=words)
        self.how, self.words = how, words

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.how, self.words)


class ChildFailed(Exception):
    """An exception in the child that is no `PipelineError`: its type's name and its text."""


class Child:
    """A child process that calls functions; a context manager.

    Args:
        env: variables to set in the child beside the parent's own.
    """

    def __init__(self, env: Mapping[str, str] | None = None) -> None:
        self._env = {**os.environ, **(env or {})}
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

    def call(self, function: str, *args: Any, **kwargs: Any) -> Any:
        """Calls ``module:function`` in the child, which is started if none is there.

        Raises:
            ChildDied: the process ended without an answer; the next call starts a new one.
            PipelineError, OSError, MemoryError: as the function raised it.
            ChildFailed: the function raised anything else.
        """
        process = self._process or self._start()
        assert process.stdin is not None
        assert self._answers is not None
        try:
            pickle.dump((function, args, kwargs), process.stdin)
            process.stdin.flush()
            ok, result, peak = pickle.load(self._answers)
        except (EOFError, BrokenPipeError, pickle.UnpicklingError):
            raise self._died() from None
        except BaseException:  # interrupted: the child must not go on alone
            self.close()
            raise
        self.peak_memory = max(self.peak_memory, peak)
        if ok:
            return result
        if isinstance(result, (PipelineError, OSError, MemoryError)):
            raise result
        raise ChildFailed(result)

    def close(self) -> None:
        """Kills the child, if there is one."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        stdin = None if self._process is None else self._process.stdin
        for file in (self._errors, self._answers, stdin):
            with contextlib.suppress(OSError):  # a pipe that could not be flushed
                if file is not None:
                    file.close()
        self._process = self._errors = self._answers = None

    def _start(self) -> subprocess.Popen[bytes]:
        read, write = os.pipe()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START, json.dumps(sys.path), str(write)],
                stdin=subprocess.PIPE,
                stdout=self._errors,
                stderr=self._errors,
                pass_fds=(write,),
                env=self._env,
            )
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
        how = f"exit code {code}"
        if code < 0:
            number = signal.Signals(-code)
            how = f"{signal.strsignal(-code) or 'signal'} ({number.name})"
        return ChildDied(how, words)


def main() -> None:
    """The child's side: answers calls from stdin until it is closed."""
    answers = os.fdopen(int(sys.argv[2]), "wb")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with contextlib.suppress(OSError, AttributeError):  # Linux only
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    while True:
        try:
            name, args, kwargs = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        module, _, function = name.partition(":")
        try:
            result = getattr(importlib.import_module(module), function)(*args, **kwargs)
            answer = (True, result, _peak())
        except PipelineError as error:
            answer = (False, error, _peak())
        except (OSError, MemoryError) as error:  # a full disk is the caller's matter
            answer = (False, error, _peak())
        except Exception as error:  # whatever a library raises; told to the parent
            answer = (False, f"{type(error).__name__}: {error}", _peak())
        answers.write(pickle.dumps(answer))
        answers.flush()


def _peak() -> int:
    """Bytes. Not getrusage's ru_maxrss: a child's begins with its parent's (getrusage(2))."""
    return peak_memory() or 0
