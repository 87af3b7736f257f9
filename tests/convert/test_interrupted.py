"""Killed conversions, and two at once."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import onnx
import onnx.parser
import pytest
from helpers import HERE, command, files_under
from kills import campaign

from pipeline.artifact.artifact import Artifact
from pipeline.convert.driver import run
from pipeline.spec.config import Config


@pytest.mark.parametrize(
    ("number", "moment"),
    [
        (signal.SIGKILL, "export"),
        (signal.SIGKILL, "build"),
        (signal.SIGKILL, "package"),
        (signal.SIGINT, "compare"),
    ],
)
def test_killed_conversion_leaves_the_old_artifact(
    artifact: Path, number: signal.Signals, moment: str
) -> None:
    before = Artifact.open(artifact).manifest
    source: list[object] = ["tiny"]
    if moment != "export":  # up to this stage without torch, whose import takes seconds
        source = [artifact.parent.parent / "relu.onnx", "--dim", "n=2:8:32"]
        text = "g (float[1, n] x) => (float[1, n] y) { y = Relu(x) }"
        model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 18]> {text}')
        onnx.save(model, str(source[0]))
    words = ("convert", *source, "--out", artifact, "--force")
    process = command(*words, stdout=subprocess.DEVNULL)
    assert process.stderr is not None
    for line in process.stderr:
        if line.partition(" (last time ")[0].rstrip().endswith(moment):
            os.kill(process.pid, number)
            break
    errors = process.stderr.read()
    code = process.wait(timeout=60)
    if number == signal.SIGINT:
        assert code == 130
        assert errors.count("error: ") == 1
        assert "error: interrupted; existing artifacts are unchanged\n" in errors
        assert "Traceback" not in errors
        assert [path.name for path in artifact.parent.iterdir()] == [artifact.name]
    elif moment != "package":
        assert code == -number
    after = Artifact.open(artifact)
    assert after.extra == ()
    if moment != "package":  # the new folder may just have been moved there
        assert after.manifest == before


def test_kills_at_random_moments(tmp_path: Path) -> None:
    """The short form of ``python tests/support/kills.py``."""
    done = list(campaign(tmp_path, 3, seed=8))
    assert [kill for kill in done if kill.problems] == []
    assert sum(kill.effective for kill in done) >= 2


AFTER_THE_SWAP = """
import sys, time
from pipeline.__main__ import run
from pipeline.commands import report

def slow(*_):
    print("reports", file=sys.stderr, flush=True)
    time.sleep(60)

report.report_text = slow
run()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_after_the_swap_says_that_the_artifact_is_new(
    artifact: Path, number: signal.Signals
) -> None:
    before = Artifact.open(artifact).manifest
    process = subprocess.Popen(
        [sys.executable, "-c", AFTER_THE_SWAP, "verify", str(artifact)],
        env={**os.environ, "PYTHONPATH": str(HERE.parents[1])},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if line == "reports\n":
            process.send_signal(number)
            break
    errors = process.stderr.read()
    assert process.wait(30) == 130
    assert errors == f"error: interrupted; the new artifact in {artifact} is complete\n"
    assert Artifact.open(artifact).manifest != before
    assert files_under(artifact.parent)[0] == artifact.name


@pytest.mark.usefixtures("zoo")
def test_the_next_run_clears_what_a_killed_one_left(artifact: Path) -> None:
    shutil.copytree(artifact, artifact.parent / ".tiny.tmp-1-0123abcd")
    run(Config("tiny", out=artifact, shapes=("h=6",)))
    assert files_under(artifact.parent)[0] == "tiny"


def test_two_conversions_into_one_place(tmp_path: Path) -> None:
    place = tmp_path / "a"
    first = command("convert", "tiny", "--out", place)
    assert first.stderr is not None
    while not first.stderr.readline().rstrip().endswith("] export"):
        assert first.poll() is None
    # it holds the lock now
    second = command("convert", "tiny", "--out", place, "--option", "channels=2")
    _, errors = second.communicate(timeout=60)
    assert second.returncode == 2
    held = f"error: {place}: another conversion is writing to it (pid {first.pid})"
    assert errors.splitlines()[-1].startswith(held)
    _, errors = first.communicate(timeout=60)
    assert first.returncode == 0, errors
    assert Artifact.open(place).manifest.model.options == {"channels": 4}
