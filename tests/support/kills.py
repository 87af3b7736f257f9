"""Sends signals to real conversions at random moments, and checks what each one leaves.

As a script: ``python tests/support/kills.py --count 100 --seed 1`` prints each kill as JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from helpers import HERE, let_children_heed_signals

from pipeline.artifact.artifact import Artifact
from pipeline.errors import PipelineError

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
LIMIT = 5.0  # seconds from the signal to the end
_ORPHANS = 5.0  # seconds; a child that just started notices the death of its parent later
_STAGES = ("export", "rewrite", "build", "compare", "package")
_CAUGHT = re.compile(r"^SigCgt:\s*(\w+)$", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Kill:
    """One signal to one conversion.

    Args:
        number: The signal's name.
        stage: The last stage that had begun; ``start`` before the first one.
        offset: Seconds from the beginning of that stage to the signal.
        effective: True if the conversion still ran.
        code: Its exit code; negative for a signal.
        seconds: From the signal to its end.
        replaced: True if the artifact is another one than before.
        problems: What was wrong, a sentence each.
    """

    number: str
    stage: str
    offset: float
    effective: bool
    code: int
    seconds: float
    replaced: bool
    problems: tuple[str, ...]


class Conversion:
    """A conversion in a process and session of its own, with the times of its stages."""

    def __init__(self, place: Path, temporary: Path, words: Sequence[str]) -> None:
        line = [sys.executable, "-m", "pipeline", "convert", *words, "--out", str(place)]
        self.process = subprocess.Popen(
            [*line, "--force"],
            env={**os.environ, "PYTHONPATH": str(HERE.parents[1]), "TMPDIR": str(temporary)},
            text=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self.begun: dict[str, float] = {}
        self.lines: list[str] = []
        while not self._catches_sigterm() and self.process.poll() is None:
            time.sleep(0.001)
        self.begun["start"] = time.monotonic()
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _catches_sigterm(self) -> bool:
        with contextlib.suppress(OSError):
            status = Path(f"/proc/{self.process.pid}/status").read_text()
            found = _CAUGHT.search(status)
            return bool(found and int(found[1], 16) >> (signal.SIGTERM - 1) & 1)
        return False

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._news:
                self.lines.append(line)
                word = line.rpartition("] ")[2].partition(" (last time ")[0].strip()
                if word in _STAGES:
                    self.begun[word] = time.monotonic()
                self._news.notify_all()

    def wait_for(self, stage: str, offset: float) -> None:
        """Waits until some seconds after the beginning of a stage, or until the end."""
        with self._news:
            self._news.wait_for(lambda: stage in self.begun or not self._reader.is_alive(), 120)
        rest = self.begun.get(stage, 0.0) + offset - time.monotonic()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(max(rest, 0.0))

    def end(self) -> int:
        """Waits for the end. Returns the exit code."""
        try:
            return self.process.wait(120)
        finally:
            self._reader.join()

    def living(self) -> list[str]:
        """The names of the processes that it started and that still run."""
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                name, _, rest = stat.read_text().rpartition(")")
                state, _, _, session = rest.split()[:4]
                if session == str(self.process.pid) and state not in "ZX":
                    found.append(name)
        return found


def campaign(
    folder: Path, count: int, seed: int, words: Sequence[str] = ("linear",)
) -> Iterator[Kill]:
    """Converts, and kills conversions into the same place at random moments.

    The signals come in turn. A moment is a random stage, and a random part of its time. At the end
    a last conversion has to clear what SIGKILL left.

    Args:
        folder: An empty folder.
        count: The number of kills.
        seed: The seed of the moments.
        words: The model and its options.

    Raises:
        AssertionError: A conversion without a signal failed, or did not clear what was left.
    """
    place, temporary = folder / "artifacts" / "killed", folder / "tmp"
    temporary.mkdir()
    times = _undisturbed(place, temporary, words)
    moments = random.Random(seed)
    forgiven: set[str] = set()
    for turn in range(count):
        number = SIGNALS[turn % len(SIGNALS)]
        stage = moments.choice(list(times))
        kill = _kill(place, temporary, words, (number, stage, moments.uniform(0, times[stage])))
        new = _leftovers(place, temporary) - forgiven
        if number == signal.SIGKILL:
            forgiven |= new
        elif new:
            kill = dataclasses.replace(
                kill, problems=(*kill.problems, f"it left {', '.join(sorted(new))}")
            )
        yield kill
    _undisturbed(place, temporary, words)


def _undisturbed(place: Path, temporary: Path, words: Sequence[str]) -> dict[str, float]:
    """Runs a whole conversion. Returns the seconds of each stage."""
    run = Conversion(place, temporary, words)
    code = run.end()
    ended = time.monotonic()
    assert code == 0, "".join(run.lines)
    assert Artifact.open(place).extra == ()
    assert _leftovers(place, temporary) == set()
    moments = [*run.begun.values(), ended]
    return {s: b - a for s, a, b in zip(run.begun, moments, moments[1:], strict=False)}


def _leftovers(place: Path, temporary: Path) -> set[str]:
    beside = {path.name for path in place.parent.iterdir()} - {place.name}
    return beside | {path.name for path in temporary.iterdir()}


def _kill(
    place: Path,
    temporary: Path,
    words: Sequence[str],
    moment: tuple[signal.Signals, str, float],
) -> Kill:
    number, stage, offset = moment
    before = Artifact.open(place).manifest
    run = Conversion(place, temporary, words)
    run.wait_for(stage, offset)
    effective = run.process.poll() is None
    sent = time.monotonic()
    run.process.send_signal(number)
    code = run.end()
    seconds = time.monotonic() - sent
    said = "".join(run.lines)
    problems = []
    end = time.monotonic() + (_ORPHANS if number == signal.SIGKILL else 0.0)
    while run.living() and time.monotonic() < end:
        time.sleep(0.02)
    if seconds > LIMIT:
        problems.append(f"it ended {seconds:.1f} s after the signal")
    if left := run.living():
        problems.append(f"processes live on: {left}")
    if "Traceback" in said:
        problems.append(f"a traceback: {said}")
    replaced = False
    try:
        after = Artifact.open(place)
        replaced = after.manifest != before
        if after.extra:
            problems.append(f"files that do not belong to the artifact: {after.extra}")
    except PipelineError as error:
        problems.append(f"the artifact is broken: {error}")
    problems += _untrue(number, code, said, replaced)
    return Kill(
        number.name, stage, round(offset, 3), effective, code, round(seconds, 3), replaced,
        tuple(problems),
    )  # fmt: skip


def _untrue(number: signal.Signals, code: int, said: str, replaced: bool) -> list[str]:
    """What is wrong with the exit code and the last line."""
    if code == 0:  # it was done before the signal
        return [] if replaced else ["exit code 0, and the artifact is the old one"]
    if number == signal.SIGKILL:
        return [] if code == -number else [f"exit code {code}"]
    if code != 130:
        return [f"exit code {code}: {said}"]
    state = "the new artifact in .* is complete" if replaced else "existing artifacts are unchanged"
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    if len(errors) != 1 or not re.fullmatch(f"error: interrupted; {state}", errors[0]):
        return [f"replaced is {replaced}, but it said {errors}"]
    return []


def main() -> int:
    """Prints each kill, and a line with the counts. Returns 1 if one had a problem."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    let_children_heed_signals()
    with tempfile.TemporaryDirectory() as name:
        kills = []
        for kill in campaign(Path(name), arguments.count, arguments.seed):
            kills.append(kill)
            print(json.dumps(dataclasses.asdict(kill)), flush=True)
    bad = sum(bool(kill.problems) for kill in kills)
    print(f"{sum(kill.effective for kill in kills)} effective kills, {bad} with problems")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
