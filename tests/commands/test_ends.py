"""The ends of a command: its exit code and its last line are true, whatever happens."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
import tiny
from helpers import HERE, Run, files_under, refused

from pipeline.artifact.artifact import Artifact
from pipeline.convert.driver import run
from pipeline.errors import PipelineError
from pipeline.graph.session import run_onnx
from pipeline.spec.config import Config

MODEL = """
import sys, torch

class Stop(BaseException):
    pass

class Net(torch.nn.Module):
    def forward(self, x):
        {forward}
        return x * 2

def make():
    {build}
    return Net()

{after}
"""
CODE = {  # where the model ends the program: its code, the exit code, a part of the message
    "forward": ({"forward": "sys.exit(0)"}, 1, "SystemExit: 0 was raised at", "in forward"),
    "forward, an own kind": ({"forward": "raise Stop()"}, 1, "Stop was raised at", "in forward"),
    "export": (
        {"forward": "torch.compiler.is_exporting() and sys.exit(0)"},
        1,
        "SystemExit: 0 was raised at",
        "in forward",
    ),
    "build": ({"build": "sys.exit(0)"}, 2, "SystemExit: 0"),
    "import": ({"after": "sys.exit(0)"}, 2, "its import raises SystemExit: 0"),
}


@pytest.mark.parametrize("command", ["convert", "check"])
@pytest.mark.parametrize("where", CODE)
def test_a_model_that_ends_the_program(cli: Run, tmp_path: Path, command: str, where: str) -> None:
    code, expected, *parts = CODE[where]
    text = MODEL.format(**{"forward": "pass", "build": "pass", "after": "", **code})
    (tmp_path / "net.py").write_text(text)
    place = ["--out", "a"] if command == "convert" else []
    ended, output, errors = cli(
        command, "net.py:make", "--input", "x:1x{n}", "--dim", "n=2:4", *place
    )
    assert ended == expected
    assert output == ""
    lines = [line for line in errors.splitlines() if not line.startswith("[")]
    assert len(lines) == 1
    assert all(part in lines[0] for part in ("error: ", "net.py", *parts)), lines
    assert files_under(tmp_path / "a") == []


def test_a_library_call_of_such_a_model_raises_a_pipeline_error(tmp_path: Path) -> None:
    spec = tiny.of(lambda _: sys.exit(0))
    with pytest.raises(PipelineError, match=r"SystemExit: 0 was raised at .*test_ends\.py"):
        run(Config(spec, out=tmp_path / "a"))


def program(*words: object, shell: str) -> subprocess.CompletedProcess[str]:
    """Runs the program. `shell` redirects its files."""
    line: Sequence[str] = [sys.executable, "-m", "pipeline", *map(str, words)]
    return subprocess.run(
        ["sh", "-c", f'exec "$@" {shell}', "sh", *line],
        env={**os.environ, "PYTHONPATH": str(HERE.parents[1])},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_a_full_disk_behind_stdout(artifact: Path) -> None:
    before = Artifact.open(artifact).manifest
    full = (
        "error: cannot print the result to stdout: no space left. Free disk space, then run again"
    )
    done = program("inspect", artifact, shell=">/dev/full")
    assert (done.returncode, done.stderr) == (1, f"{full}. Existing artifacts are unchanged\n")
    assert Artifact.open(artifact).manifest == before
    done = program("verify", artifact, shell=">/dev/full")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"{full}. The new artifact in {artifact} is complete"
    assert Artifact.open(artifact).manifest != before
    done = program("inspect", artifact.parent / "none", shell=">/dev/full")
    refused((done.returncode, done.stdout, done.stderr), "none")


def test_a_full_disk_behind_stderr(artifact: Path) -> None:
    done = program("verify", artifact, shell="2>/dev/full")
    assert done.returncode == 0
    assert program("inspect", artifact.parent / "none", shell="2>/dev/full").returncode == 2


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", "<&- >&- 2>&-"])
def test_closed_standard_files(artifact: Path, closed: str) -> None:
    done = program("verify", artifact, shell=closed)
    assert done.returncode == 0
    assert "Traceback" not in done.stderr
    assert ("error" in done.stderr) is False
    assert (done.stdout == "") is (">&- " in f"{closed} ".replace("2>&-", ""))
    Artifact.open(artifact)
    assert program("inspect", artifact.parent / "none", shell=closed).returncode == 2


LONG = "n" * 300


@pytest.mark.parametrize(
    "words",
    [
        ["convert", "tiny", "--out", LONG],
        ["inspect", LONG],
        ["rewrite", LONG],
        ["rewrite", f"{LONG}.onnx"],
        ["convert", f"{LONG}.onnx"],
        ["convert", f"{LONG}.pt2"],
        ["convert", f"{LONG}.py:make"],
        ["convert", "tiny", "--weights", LONG],
        ["convert", "tiny", "--plugin", LONG],
        ["convert", "--all", "--out", LONG],
    ],
)
def test_a_name_that_is_too_long(cli: Run, tmp_path: Path, words: list[str]) -> None:
    code, output, errors = cli(*words)
    said = [line for line in errors.splitlines(keepends=True) if not line.startswith("[")]
    refused((code, output, "".join(said)), LONG)
    assert files_under(tmp_path) == []


def test_short_memory_is_not_blamed_on_a_node(cli: Run, tmp_path: Path) -> None:
    """The graph asks for 4 PiB, more than a process can address."""
    text = """<ir_version: 8, opset_import: ["" : 18]> g (float[1, n] x) => (float[1, n] y) {
        size = Constant <value_ints = [33554432, 33554432]> ()
        large = ConstantOfShape (size)
        sum = ReduceSum (large)
        y = Add (x, sum)
    }"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "large.onnx")
    code, output, _ = cli("check", "large.onnx", "--dim", "n=2:8:32")
    assert code == 1
    assert "the run: ONNX Runtime is out of memory" in output
    assert "bad_alloc" not in output
    with pytest.raises(MemoryError):
        next(run_onnx(tmp_path / "large.onnx", [{"x": np.zeros((1, 2), np.float32)}]))


def test_short_memory_is_not_blamed_on_a_pass(cli: Run, tmp_path: Path) -> None:
    text = """<ir_version: 8, opset_import: ["" : 18]> g (float[1, n] x) => (float[1, n] y) {
        y = Relu (x)
    }"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "m.onnx")
    (tmp_path / "mine.py").write_text("def run(graph):\n    bytearray(1 << 62)\n")
    code, output, errors = cli("rewrite", "m.onnx", "--pass", "mine.py", "--out", "o.onnx")
    assert (code, output) == (1, "")
    last = errors.splitlines()[-1]
    assert last.startswith("error: out of memory. ")
    assert last.endswith("Existing artifacts are unchanged")
