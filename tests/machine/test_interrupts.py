"""Signals end a program with code 130, after its cleanup, whatever its main thread does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers import HERE
from test_child import alive

from pipeline.machine.files import write_whole

PRELUDE = """
    import contextlib, hashlib, os, signal, subprocess, sys, threading, time
    from pathlib import Path
    from pipeline.machine import interrupts, program
    from pipeline.machine.child import Child

    program.begin()
    folder = Path(os.getcwd())

    def left():
        (folder / "left").unlink(missing_ok=True)

    (folder / "left").touch()
    interrupts.register(left)

    def ready():
        print(os.environ["TMPDIR"], flush=True)
"""
Start = Callable[[str], "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a program, and waits until it prints a line or ends."""
    running = []
    (tmp_path / "tmp").mkdir()

    def begin(code: str) -> subprocess.Popen[str]:
        text = textwrap.dedent(PRELUDE) + textwrap.dedent(code)
        process = subprocess.Popen(
            [sys.executable, "-c", text],
            cwd=tmp_path,
            env={
                **os.environ,
                "PYTHONPATH": str(HERE.parents[1]),
                "TMPDIR": str(tmp_path / "tmp"),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        running.append(process)
        assert process.stdout is not None
        process.stdout.readline()
        return process

    yield begin
    for process in running:
        process.kill()
        process.communicate()


def check_end(process: subprocess.Popen[str], number: signal.Signals, line: str) -> None:
    """Sends a signal, and checks the end and that nothing is left."""
    sent = time.monotonic()
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (130, f"error: interrupted; {line}\n")
    assert time.monotonic() - sent < 5


UNCHANGED = "existing artifacts are unchanged"
BUSY = {
    "Python code": "while True: pass",
    "a sleep": "time.sleep(60)",
    "C code without Python's lock": "hashlib.pbkdf2_hmac('sha256', b'', b'', 10**9)",
    "code that swallows every exception": """
        while True:
            try:
                time.sleep(60)
            except BaseException:
                pass
        """,
    "the import of a module": """
        (folder / "slow_module.py").write_text(
            "import time\\ntry: time.sleep(60)\\nexcept BaseException: pass"
        )
        sys.path.insert(0, str(folder))
        with contextlib.suppress(BaseException):
            import slow_module
        time.sleep(60)
        """,
    "a handler of another library": """
        def nothing(*_): pass
        signal.signal(signal.SIGTERM, nothing), signal.signal(signal.SIGINT, nothing)
        while True: time.sleep(60)
        """,
    "without the wakeup file": "signal.set_wakeup_fd(-1)\ntime.sleep(60)",
    "the end of the interpreter": """
        import atexit
        atexit.register(time.sleep, 60)
        interrupts.end_with(0)
        """,
    "a thread that goes on": """
        threading.Thread(target=time.sleep, args=(60,)).start()
        interrupts.end_with(0)
        """,
}


@pytest.mark.parametrize(
    ("busy", "number"),
    [(busy, signal.SIGTERM) for busy in BUSY]
    + [("Python code", signal.SIGINT), ("Python code", signal.SIGHUP)],
)
def test_a_signal_ends_it(start: Start, tmp_path: Path, busy: str, number: signal.Signals) -> None:
    process = start("ready()\n" + textwrap.dedent(BUSY[busy]))
    time.sleep(0.1)
    check_end(process, number, UNCHANGED)
    assert not (tmp_path / "left").exists()
    assert list((tmp_path / "tmp").iterdir()) == []


def test_impatient_ctrl_c_is_one_ctrl_c(start: Start) -> None:
    process = start("ready()\ntime.sleep(60)")
    for _ in range(20):
        process.send_signal(signal.SIGINT)
    check_end(process, signal.SIGINT, UNCHANGED)


def test_a_signal_waits_for_a_held_block(start: Start, tmp_path: Path) -> None:
    code = """
    with interrupts.held():
        ready()
        time.sleep(0.7)
        interrupts.settle("it is done")
    (folder / "went on").touch()
    """
    process = start(code)
    check_end(process, signal.SIGTERM, "it is done")
    assert not (tmp_path / "went on").exists()


def test_a_held_block_that_hangs_ends_too(start: Start) -> None:
    process = start("with interrupts.held(): ready(), time.sleep(60)")
    sent = time.monotonic()
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=30)
    assert time.monotonic() - sent < 5
    assert process.returncode == 130
    assert errors == "error: interrupted while files were moved; run the command again\n"


def test_a_cleanup_that_hangs_ends_too(start: Start) -> None:
    process = start("interrupts.register(lambda: time.sleep(60)); ready(); time.sleep(60)")
    sent = time.monotonic()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert time.monotonic() - sent < 5.5
    assert process.returncode == 130


@pytest.mark.parametrize("grace", [0, 20])
def test_children_end_with_it(start: Start, tmp_path: Path, grace: int) -> None:
    code = f"""
    sys.path.insert(0, {str(Path(__file__).parent)!r})
    sys.path.insert(0, {str(HERE)!r})
    import test_child
    child = Child(grace={grace})
    (folder / "pid").write_text(str(child.call(os.getpid)))
    ready()
    child.call(test_child.cleans_up, folder / "there")
    """
    process = start(code)
    end = time.monotonic() + 60
    while not (tmp_path / "there").exists() and time.monotonic() < end:
        time.sleep(0.02)
    check_end(process, signal.SIGTERM, UNCHANGED)
    assert not alive(int((tmp_path / "pid").read_text()))
    assert (tmp_path / "there").exists() == (grace == 0)


def test_a_fork_ends_alone(start: Start) -> None:
    """A model's own workers can be forks. Their end does not end the program or clean up."""
    code = """
    for ended in (True, False):
        child = os.fork()
        if child == 0:
            if not ended:
                sys.exit(0)
            time.sleep(60)
        time.sleep(0.2)
        if ended:
            os.kill(child, signal.SIGTERM)
        _, status = os.waitpid(child, 0)
        assert status == (signal.SIGTERM if ended else 0)
    assert Path(os.environ["TMPDIR"]).is_dir() and (folder / "left").exists()
    interrupts.end_with(3)
    """
    process = start(code)
    assert process.communicate(timeout=30)[1] == ""
    assert process.returncode == 3


def test_ignored_signals_stay_ignored(start: Start) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # children inherit it
    try:
        process = start("ready()\ntime.sleep(1)\ninterrupts.end_with(0)")
    finally:
        signal.signal(signal.SIGINT, before)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=30)[1] == ""
    assert process.returncode == 0


def test_the_next_program_clears_what_a_killed_one_left(start: Start, tmp_path: Path) -> None:
    living = start("ready()\ntime.sleep(60)")
    killed = start("ready()\ntime.sleep(60)")
    mine = tmp_path / "tmp" / "pipeline-mine"
    mine.mkdir()
    killed.kill()
    killed.wait()
    assert len(list((tmp_path / "tmp").iterdir())) == 3
    last = start("interrupts.end_with(0)")
    assert last.wait(30) == 0
    left = {path.name for path in (tmp_path / "tmp").iterdir()}
    assert len(left) == 2
    assert mine.name in left
    assert any(name.startswith(f"pipeline-{living.pid}-") for name in left)
    check_end(living, signal.SIGINT, UNCHANGED)


def test_the_unfinished_file_of_a_killed_process_is_removed(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    for number in (ended.pid, os.getppid()):
        (tmp_path / f".report.xml.{number}").touch()
    (tmp_path / ".report.xml.old").touch()
    write_whole(tmp_path / "report.xml", b"whole")
    assert {path.name for path in tmp_path.iterdir()} == {
        "report.xml",
        f".report.xml.{os.getppid()}",
        ".report.xml.old",
    }


def test_it_needs_no_folder_for_temporary_files(start: Start, tmp_path: Path) -> None:
    (tmp_path / "tmp").rmdir()
    process = start("print('there'); interrupts.end_with(0)")
    assert process.wait(30) == 0


def test_a_library_call_changes_no_handler() -> None:
    code = (
        "import os, signal, sys\n"
        "before = [signal.getsignal(n) for n in (2, 15)], os.environ.get('TMPDIR')\n"
        "import pipeline\n"
        "try: pipeline.run('nothing')\n"
        "except pipeline.InputError: pass\n"
        "assert ([signal.getsignal(n) for n in (2, 15)], os.environ.get('TMPDIR')) == before\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=HERE.parents[1])
