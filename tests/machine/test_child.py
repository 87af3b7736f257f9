"""A child process that calls functions: answers, errors, deaths, and that it never outlives us."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pipeline.errors import InputError
from pipeline.machine.child import Child, ChildDied, ChildFailed


def alive(pid: int) -> bool:
    """True if there is such a process and it is no zombie."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.fixture
def child() -> Iterator[Child]:
    with Child() as made:
        yield made


def test_serves_several_calls(child: Child) -> None:
    pid = child.call("os:getpid")
    assert pid != os.getpid()
    assert child.call("math:hypot", 3, 4) == 5
    assert child.call("os:getpid") == pid
    child.close()
    assert not alive(pid)
    assert child.call("os:getpid") != pid


def test_environment_and_arguments() -> None:
    with Child({"pipelineTEST": "here"}) as child:
        assert child.call("os:getenv", key="pipelineTEST") == "here"
    assert "pipelineTEST" not in os.environ


def test_errors_come_as_what_they_are(child: Child) -> None:
    with pytest.raises(InputError, match="unknown target 'x'") as caught:
        child.call("pipeline.machine.target:find_target", "x")
    assert caught.value.exit_code == 2
    with pytest.raises(FileNotFoundError) as missing:
        child.call("os:stat", "/nowhere")
    assert missing.value.filename == "/nowhere"
    with pytest.raises(ChildFailed, match="ZeroDivisionError: division by zero"):
        child.call("operator:truediv", 1, 0)
    assert child.call("math:hypot", 3, 4) == 5


@pytest.mark.parametrize(
    ("function", "arguments", "how"),
    [
        ("os:abort", (), "Aborted (SIGABRT)"),
        ("ctypes:string_at", (0,), "Segmentation fault (SIGSEGV)"),
        ("os:_exit", (3,), "exit code 3"),
    ],
)
def test_death_is_told_and_survived(
    child: Child, function: str, arguments: tuple[int, ...], how: str
) -> None:
    child.call("os:write", 2, b"last words\n")
    with pytest.raises(ChildDied) as caught:
        child.call(function, *arguments)
    assert caught.value.how == how
    assert caught.value.words.splitlines()[0] == "last words"
    assert child.call("math:hypot", 3, 4) == 5


def test_what_it_prints_does_not_disturb_the_answers(
    child: Child, capfd: pytest.CaptureFixture[str]
) -> None:
    assert child.call("builtins:print", "to stdout") is None
    assert child.call("os:write", 1, b"and this") == 8
    assert capfd.readouterr() == ("", "")


def test_peak_memory_is_the_childs_own(child: Child) -> None:
    ballast = np.ones(300 << 17)  # 300 MiB, in the parent
    child.call("os:getpid")
    empty = child.peak_memory
    assert 5 << 20 < empty < ballast.nbytes
    child.call("builtins:bytearray", 200 << 20)
    assert child.peak_memory > empty + (200 << 20)
    del ballast


def test_interrupted_parent_kills_it_at_once(child: Child) -> None:
    pid = child.call("os:getpid")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    start = time.monotonic()
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            child.call("time:sleep", 60)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - start < 5
    assert not alive(pid)


def test_killed_parent_takes_it_along() -> None:
    code = (
        "from pipeline.machine.child import Child\n"
        "child = Child()\n"
        "print(child.call('os:getpid'), flush=True)\n"
        "child.call('time:sleep', 60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert alive(pid)
    parent.kill()
    parent.wait()
    end = time.monotonic() + 10
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.02)
    assert not alive(pid)
    parent.stdout.close()
