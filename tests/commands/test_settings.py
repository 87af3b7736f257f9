"""Options of models in pipeline.toml."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers import Run, refused

from pipeline.artifact.artifact import Artifact
from pipeline.commands.parser import read_arguments

MODEL = """
import torch

def net(channels=3):
    return torch.nn.Conv2d(3, channels, 3, padding=1).eval()
"""
SETTINGS = """
[mine]
source = "net.py:net"
input = "input:{b}x3x{h}x{w}"
dim = ["b=1:2", "h=8:32", "w=8:32"]
option = ["channels=5"]
quick = true
details = false
seed = 3

[raft_small]
precision = "tf32"

[broken]
source = "net.py:net"
dims = ["b=1:2"]

[narrow]
source = "net.py:net"
precision = "fp17"

[number]
seed = [[1]]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(MODEL)
    (tmp_path / "pipeline.toml").write_text(SETTINGS)
    return tmp_path


def test_a_model_of_the_file_converts(cli: Run, folder: Path) -> None:
    code, _, errors = cli("convert", "mine", "--out", "a")
    assert code == 0, errors
    manifest = Artifact.open(folder / "a").manifest
    assert manifest.model.source == "net.py:net" and manifest.model.options == {"channels": 5}
    assert {d.name: (d.min, d.max) for d in manifest.interface.dims.values()} == {
        "b": (1, 2), "h": (8, 32), "w": (8, 32),
    }  # fmt: skip
    code, output, errors = cli("check", "mine")
    assert code == 0, errors + output


def test_the_command_line_wins(folder: Path) -> None:
    assert folder.is_dir()
    read = read_arguments(["convert", "mine", "--seed", "7", "--precision", "fp16"])
    assert (read.seed, read.precision, read.quick, read.details) == (7, "fp16", True, False)
    assert read.model == "net.py:net" and read_arguments(["convert", "mine"]).seed == 3


def test_a_model_that_comes_with_pipeline_gets_options(folder: Path) -> None:
    assert folder.is_dir()
    read = read_arguments(["export", "raft_small"])
    assert (read.model, read.precision) == ("raft_small", "tf32")
    assert read_arguments(["convert", "raft"]).precision is None


def test_mistakes_are_named(cli: Run, folder: Path) -> None:
    refused(cli("convert", "broken"), "[broken] dims: pipeline convert has no option --dims",
            "did you mean dim?")  # fmt: skip
    refused(cli("convert", "number"), "[number] seed: expected texts or numbers")
    refused(cli("convert", "narrow"), "pipeline.toml: [narrow] precision: 'fp17' is none of these:")
    (folder / "pipeline.toml").write_text("[mine\n")
    refused(cli("check", "mine"), "pipeline.toml: cannot be read")
    (folder / "pipeline.toml").write_text('mine = "net.py:net"\n')
    refused(cli("check", "mine"), "[mine] is no table")


@pytest.mark.parametrize("words", [("--dim", "h=16:24"), ("--dim=h=16:24",)])
def test_the_command_line_wins_for_each_name(folder: Path, words: tuple[str, ...]) -> None:
    found = read_arguments(["convert", "mine", *words, "--option", "channels=7", "--seed", "4"])
    assert folder and sorted(found.dim) == ["b=1:2", "h=16:24", "w=8:32"]
    assert found.option == ["channels=7"] and found.seed == 4


def test_a_wrong_word_in_the_file_says_what_to_write(cli: Run, folder: Path) -> None:
    (folder / "pipeline.toml").write_text('[mine]\nsource = "net.py:net"\nquick = "yes"\n')
    code, _, errors = cli("convert", "mine")
    assert code == 2 and "[mine] quick: expected true or false, not 'yes'" in errors
    code, _, errors = cli("convert", "mime")
    assert code == 2 and "unknown model 'mime' (did you mean mine?); known: mine, linear," in errors


def test_tolerances_and_output_names_are_replaced_too(folder: Path) -> None:
    table = '[mine]\ntolerance = ["1e-3,1e-4", "y=1e-5,1e-6"]\noutput-name = ["a", "b"]\n'
    (folder / "pipeline.toml").write_text(table)
    found = read_arguments(["convert", "mine", "--tolerance", "y=0,1", "--output-name", "c"])
    assert len(found.tolerance) == 2 and found.output_name == ["c"]
    found = read_arguments(["convert", "mine", "--tolerance", "1e-2,1e-3"])
    assert len(found.tolerance) == 2 and found.output_name == ["a", "b"]
