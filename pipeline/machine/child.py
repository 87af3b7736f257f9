"""Calls functions in a child process, so that a crash of a library does not end the parent.

TensorRT can abort or segfault on some graphs (an Attention of opset 23, a plugin node without its
library). The caller then gets a `ChildDied` with the signal's name and the end of stderr.

A child handles several calls, one after the other. It ends if its parent ends. The function,
its arguments, its result and its exception are pickled. So the child imports only the function's
module and the modules of its arguments.

The two talk through a `multiprocessing.connection`: a socket, or a named pipe on Windows. Each side
has to prove that it knows a secret, which the child reads from stdin.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import os
import pickle
import queue
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, ParamSpec, TypeVar

from pipeline.errors import PipelineError
from pipeline.machine import interrupts
from pipeline.machine.progress import Announce
from pipeline.machine.resources import peak_memory

if TYPE_CHECKING:
    from multiprocessing.connection import _ConnectionBase as Connection

P = ParamSpec("P")
T = TypeVar("T")

_ALONE = 60.0  # seconds until a child ends that nobody connects to: its parent has ended
_TAIL = 4000  # characters of stderr that are kept
_START = (
    "import json, sys; path, *there = json.load(sys.stdin); sys.path[:] = path; "
    "import pipeline.machine.child as c; c.main(*there)"
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
        self._connection: Connection | None = None
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
        timer = threading.Timer(self._time_limit or 0.0, self._end_late, [process])
        try:
            if self._time_limit:
                timer.start()
            connection = self._connection or self._connect(process)
            connection.send_bytes(_pickled((function, args, kwargs), self._announce))
            state, result = self._answer(connection)
        except (EOFError, ConnectionError):
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
        for file in (self._errors, self._connection):
            if file is not None:
                file.close()
        self._process = self._errors = self._connection = None

    def _answer(self, connection: Connection) -> tuple[str, Any]:
        """The answer of a call. Passes on each text that the child announces before."""
        while True:
            try:
                answer = connection.recv_bytes()
            except OSError:  # the child died while it sent
                raise EOFError from None
            state, result, peak = pickle.loads(answer)
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
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        with interrupts.held():
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START],
                stdin=subprocess.PIPE,
                stdout=self._errors,
                stderr=self._errors,
                env=self._env,
            )
            interrupts.register(self._interrupted)
        return self._process

    def _connect(self, process: subprocess.Popen[bytes]) -> Connection:
        """Connects to the child, which listens when it has started."""
        from multiprocessing.connection import Client

        assert process.stdin is not None
        address, key = _new_address(), secrets.token_bytes(32)
        with process.stdin as stdin:
            stdin.write(json.dumps([sys.path, address, key.hex()]).encode())
        while process.poll() is None:
            try:
                self._connection = Client(address, authkey=key)
            except (ConnectionRefusedError, FileNotFoundError):
                time.sleep(0.005)
            else:
                return self._connection
        raise EOFError

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


def _pickled(call: object, announce: Announce | None) -> memoryview:
    file = io.BytesIO()
    _Asking(file, announce).dump(call)
    return file.getbuffer()


class _AskedUnpickler(pickle.Unpickler):
    """The child's side of `_Asking`."""

    def __init__(self, asked: bytes, announce: Announce) -> None:
        super().__init__(io.BytesIO(asked))
        self._announce = announce

    def persistent_load(self, name: str) -> Announce:
        assert name == "announce"
        return self._announce


def _new_address() -> str:
    """A new name for a named pipe (Windows) or a socket."""
    name = f"pipeline-{os.getpid()}-{secrets.token_hex(8)}"
    if sys.platform == "win32":
        return rf"\\.\pipe\{name}"
    if sys.platform == "linux":
        return f"\0{name}"  # no file, so no limit to the length of TMPDIR
    return str(Path(tempfile.gettempdir(), name))


def main(address: str, key: str) -> None:
    """The child's side: answers calls until its parent ends.

    Args:
        address: Where to listen.
        key: The secret, in hexadecimal.
    """
    from multiprocessing.connection import Listener

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole process group
    interrupts.end_on_signals()
    if sys.platform == "linux":  # also while other code keeps Python's lock
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    with Listener(address, authkey=bytes.fromhex(key)) as listener:
        alone = threading.Timer(_ALONE, os._exit, [1])
        alone.daemon = True
        alone.start()
        connection = listener.accept()
        alone.cancel()
    calls: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, calls), name="calls", daemon=True).start()

    def answer(state: str, result: object) -> None:
        connection.send_bytes(pickle.dumps((state, result, _peak())))

    while True:
        asked = _AskedUnpickler(calls.get(), lambda text: answer("announced", text))
        function, args, kwargs = asked.load()
        del asked
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


def _receive(connection: Connection, calls: queue.SimpleQueue[bytes]) -> None:
    """Receives the calls, and ends this process when the parent has ended."""
    try:
        while True:
            calls.put(connection.recv_bytes())
    except (EOFError, OSError):
        os._exit(1)


def _peak() -> int:
    """The peak memory in bytes. A child's ru_maxrss begins with its parent's (getrusage(2))."""
    return peak_memory() or 0
