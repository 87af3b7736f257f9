"""Runs the long commands of README and docs beside the other tests, which mostly use one core.

The commands that collected tests need start with the tests, one after the other. A test that needs
a command waits for it (the `beside` fixture).
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
# The pages with tested blocks.
# A ```python block is a whole program and runs. A ```py block is a part of a program.
PAGES = {
    page.relative_to(ROOT).as_posix(): page.read_text()
    for page in (
        ROOT / "README.md",
        *sorted((ROOT / "docs" / "guide").glob("*.md")),
        *sorted((ROOT / "docs" / "reference").glob("*.md")),
        ROOT / "docs" / "index.md",
    )
}


def blocks(page: str) -> list[tuple[str, str]]:
    """The language and the text of each code block with a language in one of `PAGES`."""
    return re.findall(r"^```(\w+)\n(.*?)^```", PAGES[page], re.DOTALL | re.MULTILINE)


BLOCKS = [block for page in PAGES for block in blocks(page)]
SNIPPETS = [text for language, text in BLOCKS if language == "python"]
COMMANDS = [
    line
    for language, text in BLOCKS
    if language == "sh"
    for line in text.replace("\\\n", " ").splitlines()
]
_LIMIT = 1200  # seconds


@dataclass(frozen=True)
class Command:
    """A command line, its folder, and its variables."""

    line: Sequence[str]
    folder: Path
    variables: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Done:
    """The result of a command, and its folder."""

    code: int
    output: str
    errors: str
    folder: Path


def make(*words: str) -> list[str]:
    """The command line of make, in the environment of the tests.

    It drops the ARGS of `make test`, which are for pytest.
    """
    return ["make", "--no-print-directory", f"VENV={sys.prefix}", "ARGS=", *words]


def run_make(*words: str) -> subprocess.CompletedProcess[str]:
    """Runs make in the repository."""
    with _alone(ROOT):
        return subprocess.run(make(*words), cwd=ROOT, capture_output=True, text=True)


def raft(_: Path) -> Command:
    """`make convert MODEL=raft`."""
    return Command(make(*shlex.split(COMMANDS[0])[1:]), ROOT)


def snippet(number: int) -> Callable[[Path], Command]:
    """One of the Python snippets of the pages, unchanged."""
    return lambda folder: Command([sys.executable, "-c", SNIPPETS[number]], folder)


def foreign(folder: Path) -> Command:
    """The README's conversion of timm's model. timm is not in the tests' environment."""
    (block,) = (text for kind, text in blocks("README.md") if kind == "sh" and "timm" in text)
    packages = folder.with_name("packages")
    block = block.replace("pip install", f"pip install --target {packages}")
    block = block.replace(".venv/bin/python", sys.executable)
    path = os.pathsep.join([str(ROOT), str(packages)])
    return Command(["sh", "-ec", block], folder, {"PYTHONPATH": path})


KNOWN: dict[str, Callable[[Path], Command]] = {  # in this order
    "raft": raft,
    **{f"snippet{n}": snippet(n) for n in range(len(SNIPPETS))},
    "foreign": foreign,
}


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Waits until no other test process runs a command in the folder."""
    name = hashlib.sha256(str(folder).encode()).hexdigest()[:16]
    with Path(tempfile.gettempdir(), f"beside-{name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class Beside:
    """Runs each command of `KNOWN` once, in a thread. Call `close` at the end."""

    def __init__(self) -> None:
        self._place = tempfile.TemporaryDirectory(prefix="beside-")
        self._pool = ThreadPoolExecutor(1)
        self._futures: dict[str, Future[Done]] = {}
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._closed = False

    def start(self, names: Iterable[str]) -> None:
        """Starts the named commands of `KNOWN`, in the order of `KNOWN`."""
        wanted = set(names)
        for name in KNOWN:
            if name in wanted and name not in self._futures:
                self._futures[name] = self._pool.submit(self._run, name)

    def done(self, name: str) -> Done:
        """Waits for a command. Starts it first if it has not been started."""
        self.start([name])
        return self._futures[name].result()

    def close(self) -> None:
        """Ends running commands, and removes their folders."""
        with self._lock:
            self._closed = True
            if self._process is not None:
                os.killpg(self._process.pid, signal.SIGKILL)
        self._pool.shutdown(cancel_futures=True)
        self._place.cleanup()

    def _run(self, name: str) -> Done:
        folder = Path(self._place.name, name, "here")
        folder.mkdir(parents=True)
        command = KNOWN[name](folder)
        with _alone(command.folder) if command.folder == ROOT else nullcontext():
            return self._started(command, folder)

    def _started(self, command: Command, folder: Path) -> Done:
        with self._lock:
            if self._closed:
                raise RuntimeError("the tests have ended")
            process = self._process = subprocess.Popen(
                command.line,
                cwd=command.folder,
                env={**os.environ, **command.variables},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        try:
            output, errors = process.communicate(timeout=_LIMIT)
        finally:
            with self._lock:
                self._process = None
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
        return Done(process.returncode, output, errors, folder)
