"""Runs the programs of README and docs, and the longest commands of README, unchanged.

test_commands.py runs the other commands, and test_blocks.py finds blocks that no test runs.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import onnx
import onnx.parser
import pytest
from readme_commands import COMMANDS, PAGES, ROOT, SNIPPETS, Done, blocks, run_make

from pipeline.artifact.artifact import Artifact
from pipeline.machine.target import TARGETS
from pipeline.rewrite.choose import all_passes
from pipeline.rewrite.rewrite import rewrite


def test_first_block_is_the_two_commands() -> None:
    assert COMMANDS[:2] == ["make convert MODEL=raft", "make test"]


def test_the_readme_is_short() -> None:
    assert len(PAGES["README.md"].splitlines()) <= 120


@pytest.mark.slow
def test_make_convert_and_then_nothing_to_do(raft_artifact: Callable[[], Artifact]) -> None:
    artifact = raft_artifact()
    assert artifact.manifest.comparison is not None and artifact.manifest.comparison.passed
    again = run_make(*shlex.split(COMMANDS[0])[1:])
    assert again.returncode == 0
    assert "Nothing changed, so nothing was done" in again.stdout


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(SNIPPETS)))
def test_snippets_run_as_they_stand(number: int, snippet: Callable[[int], Done]) -> None:
    done = snippet(number)
    assert done.code == 0, done.errors
    (place,) = (done.folder / "artifacts").iterdir()
    assert str(place.relative_to(done.folder)) in done.output
    assert Artifact.open(place).plan.is_file()


@pytest.mark.slow
def test_the_foreign_model_converts_as_it_stands(foreign: Callable[[], Done]) -> None:
    done = foreign()
    assert done.code == 0, done.errors
    (place,) = (done.folder / "artifacts").iterdir()
    manifest = Artifact.open(place).manifest
    assert {d.name: (d.min, d.max) for d in manifest.interface.dims.values()} == {
        "batch": (1, 16), "h": (64, 320), "w": (64, 320),
    }  # fmt: skip
    assert manifest.comparison is not None and manifest.comparison.passed
    assert all(point.compared for point in manifest.comparison.points)


def test_every_command_is_in_the_table() -> None:
    page = PAGES["docs/reference/command-line.md"]
    listed = set(re.findall(r"^\| `(\w+)[ `]", page, re.MULTILINE))
    shown = subprocess.run(
        [sys.executable, "-m", "pipeline", "--help"], capture_output=True, text=True, cwd=ROOT
    ).stdout
    commands = set(re.findall(r"^    (\w+)  ", shown, re.MULTILINE))
    assert commands and commands <= listed


def test_make_help_lists_every_target() -> None:
    done = run_make("help")
    for target in ("setup", "convert", "test", "lint", "bench", "clean"):
        assert re.search(rf"^{target} ", done.stdout, re.MULTILINE)


def test_the_pass_of_the_guide_works(tmp_path: Path) -> None:
    (code,) = (text for _, text in blocks("docs/guide/write-a-pass.md") if "def run" in text)
    assert len(code.strip().splitlines()) <= 20
    path = tmp_path / "relu6.py"
    path.write_text(code)
    source = tmp_path / "m.onnx"
    graph = "g (float[n,3] x) => (float[n,3] y) <float six = {6.0}> { r = Relu(x) y = Min(r, six) }"
    onnx.save(onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 18]> {graph}'), source)
    result = rewrite(source, tmp_path / "o.onnx", TARGETS["rtx-1.7"], all_passes([path]))
    assert [c.detail for p in result.passes if p.name == "relu6" for c in p.rewritten]
    assert "Clip" in {n.op_type for n in onnx.load(tmp_path / "o.onnx").graph.node}
