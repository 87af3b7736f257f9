"""A child process that calls functions: answers, errors, deaths, and its end with the parent."""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import operator
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.errors import InputError
from pipeline.machine import interrupts
from pipeline.machine.child import (
    _START,
    Child,
    ChildDied,
    ChildFailed,
    ChildLate,
    _new_address,
)
from pipeline.machine.progress import Announce
from pipeline.machine.target import find_target


def alive(pid: int) -> bool:
    """True if the process exists and is not a zombie."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.fixture
def child() -> Iterator[Child]:
    with Child() as made:
        yield made


def test_serves_several_calls(child: Child) -> None:
    pid = child.call(os.getpid)
    assert pid != os.getpid()
    assert child.call(math.hypot, 3, 4) == 5
    assert child.call(os.getpid) == pid
    child.close()
    assert not alive(pid)
    assert child.call(os.getpid) != pid


def test_environment_and_arguments() -> None:
    with Child({"pipelineTEST": "here"}) as child:
        assert child.call(os.getenv, key="pipelineTEST") == "here"
    assert "pipelineTEST" not in os.environ


def test_errors_come_as_what_they_are(child: Child) -> None:
    with pytest.raises(InputError, match="unknown target 'x'") as caught:
        child.call(find_target, "x")
    assert caught.value.exit_code == 2
    with pytest.raises(FileNotFoundError) as missing:
        child.call(os.stat, "/nowhere")
    assert missing.value.filename == "/nowhere"
    with pytest.raises(ChildFailed, match=r"^ZeroDivisionError: division by zero$") as failed:
        child.call(operator.truediv, 1, 0)
    assert failed.value.trace.startswith("Traceback")
    assert child.call(math.hypot, 3, 4) == 5


@pytest.mark.parametrize(
    ("function", "arguments", "how"),
    [
        (os.abort, (), "Aborted (SIGABRT)"),
        (ctypes.string_at, (0,), "Segmentation fault (SIGSEGV)"),
        (os._exit, (3,), "exit code 3"),
    ],
)
def test_death_is_told_and_survived(
    child: Child, function: Callable[..., Any], arguments: tuple[int, ...], how: str
) -> None:
    child.call(os.write, 2, b"last words\n")
    with pytest.raises(ChildDied) as caught:
        child.call(function, *arguments)
    assert caught.value.how == how
    assert caught.value.words.splitlines()[0] == "last words"
    assert child.call(math.hypot, 3, 4) == 5


def test_what_it_prints_does_not_disturb_the_answers(
    child: Child, capfd: pytest.CaptureFixture[str]
) -> None:
    assert child.call(print, "to stdout") is None
    assert child.call(os.write, 1, b"and this") == 8
    assert capfd.readouterr() == ("", "")


def test_peak_memory_is_the_childs_own(child: Child) -> None:
    ballast = np.ones(300 << 17)  # 300 MiB, in the parent
    child.call(os.getpid)
    empty = child.peak_memory
    assert 5 << 20 < empty < ballast.nbytes
    child.call(bytearray, 200 << 20)
    assert child.peak_memory > empty + (200 << 20)
    del ballast


def test_interrupted_parent_kills_it_at_once(child: Child) -> None:
    pid = child.call(os.getpid)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    start = time.monotonic()
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            child.call(time.sleep, 60)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - start < 5
    assert not alive(pid)


def test_killed_parent_takes_it_along() -> None:
    code = (
        "import os, time\n"
        "from pipeline.machine.child import Child\n"
        "child = Child()\n"
        "print(child.call(os.getpid), flush=True)\n"
        "child.call(time.sleep, 60)\n"
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


def test_a_child_that_ends_before_it_listens_is_told(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os\nos.write(2, b'no')\nos._exit(7)\n")
    with Child({"PYTHONPATH": str(tmp_path)}) as child, pytest.raises(ChildDied) as caught:
        child.call(os.getpid)
    assert (caught.value.how, caught.value.words) == ("exit code 7", "no")


def test_a_child_that_never_listens_is_late(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import time\ntime.sleep(60)\n")
    with Child({"PYTHONPATH": str(tmp_path)}, time_limit=1) as child, pytest.raises(ChildLate):
        child.call(os.getpid)


def test_large_arguments_and_results(child: Child) -> None:
    data = os.urandom(1 << 24)
    assert child.call(bytes.__add__, data, data) == data + data


def test_a_child_that_dies_with_an_argument_half_read(child: Child) -> None:
    pid = child.call(os.getpid)
    os.kill(pid, signal.SIGSTOP)
    timer = threading.Timer(0.3, os.kill, [pid, signal.SIGKILL])
    timer.start()
    with pytest.raises(ChildDied, match="Killed"):
        child.call(len, bytes(1 << 24))
    assert child.call(math.hypot, 3, 4) == 5


def test_only_who_knows_the_secret_is_heard() -> None:
    address = _new_address()
    words = json.dumps([sys.path, address, "00" * 32])
    with subprocess.Popen(
        [sys.executable, "-c", _START], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stderr is not None
        with process.stdin as stdin:
            stdin.write(words)
        end = time.monotonic() + 30
        while time.monotonic() < end:
            try:
                with pytest.raises(AuthenticationError):
                    Client(address, authkey=b"guessed")
                break
            except ConnectionRefusedError:
                time.sleep(0.02)
        assert "AuthenticationError" in process.stderr.read()


def test_it_imports_the_module_of_the_function_alone(child: Child) -> None:
    def loaded() -> set[str]:
        return set(child.call(eval, "list(__import__('sys').modules)"))

    rest = {"onnx", "torch", "tensorrt_rtx", "pipeline.build", "pipeline.passes", "test_child"}
    assert not rest & loaded()
    before = loaded()
    with pytest.raises(InputError):
        child.call(find_target, "x")
    assert {name for name in loaded() - before if name.startswith("pipeline")} <= {
        "pipeline.machine.target"
    }


def announced(texts: list[str], announce: Announce, fails: bool = False) -> int:
    for text in texts:
        announce(text)
    if fails:
        raise InputError("no more")
    return len(texts)


def test_what_a_call_announces_arrives_before_its_end() -> None:
    heard: list[str] = []
    hear = heard.append
    with Child(announce=hear) as child:
        assert child.call(announced, ["one", "two"], hear) == 2
        assert heard == ["one", "two"]
        with pytest.raises(InputError, match="no more"):
            child.call(announced, ["three"], hear, fails=True)
    assert heard == ["one", "two", "three"]


def cleans_up(place: Path, seconds: float = 60) -> None:
    """Leaves ``place`` there only if it is killed."""
    with interrupts.cleaned(lambda: place.unlink(missing_ok=True)):
        place.touch()
        time.sleep(seconds)


def test_a_call_that_ends_its_process_is_reported(child: Child) -> None:
    pid = child.call(os.getpid)
    with pytest.raises(ChildFailed, match=r"^SystemExit: 0$"):
        child.call(sys.exit, 0)
    assert child.call(os.getpid) == pid


def test_a_late_call_cleans_up_and_the_next_one_works(tmp_path: Path) -> None:
    with Child(time_limit=3, grace=20) as child:
        pid = child.call(os.getpid)
        start = time.monotonic()
        with pytest.raises(ChildLate, match="took longer than the time limit of 3 s"):
            child.call(cleans_up, tmp_path / "there")
        assert 2.5 < time.monotonic() - start < 15
        assert not alive(pid)
        assert not (tmp_path / "there").exists()
        assert child.call(math.hypot, 3, 4) == 5


def ignores_sigterm() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(60)


def test_a_late_call_that_does_not_end_is_killed() -> None:
    start = time.monotonic()
    with Child(time_limit=1, grace=0.5) as child, pytest.raises(ChildLate):
        child.call(ignores_sigterm)
    assert time.monotonic() - start < 10


def test_an_interrupted_call_cleans_up(tmp_path: Path) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with Child(grace=20) as child:
            child.call(os.getpid)
            signal.setitimer(signal.ITIMER_REAL, 1)
            with pytest.raises(KeyboardInterrupt):
                child.call(cleans_up, tmp_path / "there")
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not (tmp_path / "there").exists()
