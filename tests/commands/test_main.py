"""The command line: tables and JSON for results, progress, tracebacks, help."""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import json
import os
import pickle
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import onnx
import onnx.parser
import pytest
from helpers import HERE, Run, command, files_under, perturb, refused

from pipeline.artifact.artifact import Artifact
from pipeline.commands.parser import EXAMPLES, GROUPS, all_commands, command_parser
from pipeline.commands.progress import Progress
from pipeline.convert.report import Report
from pipeline.machine.progress import StageText
from pipeline.models import MODELS

COMMANDS = ("convert", "export", "rewrite", "build", "verify", "tune", "inspect", "models")


def test_convert_prints_tables_and_progress(cli: Run, tmp_path: Path) -> None:
    code, output, errors = cli(
        "convert", "tiny", "--out", "a", "--option", "channels=2", "--details"
    )
    assert code == 0, errors
    assert all(line.startswith("[") for line in errors.splitlines())
    for stage in ("export", "rewrite", "build", "compare", "package"):
        assert any(line.endswith(f"] {stage}") for line in errors.splitlines())
    for part in ("a: tiny, weights random, seed 0, target rtx-1.7", "well-formed", "tolerance:"):
        assert part in output
    assert "h=5,w=5" in output
    assert "dynamic h: not fixed in x axis 2; ran at 5, " in output
    assert Artifact.open(tmp_path / "a").manifest.model.options == {"channels": 2}
    code, output, errors = cli("convert", "tiny", "--out", "a", "--option", "channels=2")
    assert (code, errors) == (0, "")
    assert "Nothing changed, so nothing was done" in output


def test_default_place(cli: Run, tmp_path: Path) -> None:
    assert cli("export", "tiny")[0] == 0
    assert files_under(tmp_path / "artifacts") == [
        "tiny",
        "tiny/exported.onnx",
        "tiny/manifest.json",
    ]


def test_json_alone_is_on_stdout(cli: Run, artifact: Path) -> None:
    for words in (
        ("convert", "tiny", "--out", artifact, "--force", "--json"),
        ("convert", "tiny", "--out", artifact, "--json"),
        ("inspect", artifact, "--json"),
        ("verify", artifact, "--json"),
        ("rewrite", artifact, "--json"),
        ("build", artifact, "--json", "--profile", "h=8:16:24", "--profile", "h=8"),
        ("verify", artifact, "--torch", "--json", "--shape", "h=9"),
    ):
        code, output, _ = cli(*words)
        assert code == 0
        content = json.loads(output)
        assert content["ok"] is True
        assert content["path"] == str(artifact)
        stored = json.loads((artifact / "manifest.json").read_text())
        stored.pop("manifest_sha256")
        told = content["manifest"]
        told.pop("manifest_sha256")
        assert told == stored


def test_failed_comparison_ends_with_1(cli: Run, artifact: Path, converted: Report) -> None:
    before = (artifact / "manifest.json").read_bytes()
    code, output, errors = cli("convert", "skewed", "--out", artifact, "--force")
    assert code == 1
    assert output == ""
    assert f"error: model skewed: the comparison failed; {artifact} is unchanged\n" in errors
    # one item for each pair of runs, not for each of the sizes
    lines = [line for line in errors.splitlines() if line.startswith("! y of ")]
    assert len(lines) == 1
    assert lines[0].startswith("! y of exported differs from torch at ")
    assert "first at min (h=5,w=5): differs by up to " in lines[0]
    assert "Traceback" not in errors
    assert (artifact / "manifest.json").read_bytes() == before
    perturb(artifact)
    code, output, _ = cli("verify", artifact)
    assert code == 1
    assert "FAILED y of rewritten against torch at min (h=5,w=5): differs by up to 0." in output
    code, output, _ = cli("verify", artifact, "--json")
    assert code == 1
    assert json.loads(output)["ok"] is False
    code, output, _ = cli("verify", artifact, "--against", converted.path)
    assert code == 1
    assert "REGRESSION y at stored (h=5,w=5)" in output


def test_debug_shows_the_traceback(cli: Run) -> None:
    for words in (("--debug", "convert", "nothing"), ("convert", "nothing", "--debug")):
        code, output, errors = cli(*words)
        assert code == 2
        assert output == ""
        assert "Traceback (most recent call last)" in errors
        assert errors.splitlines()[-1].startswith("error: unknown model")


def test_detail_is_pointed_to_and_shown(cli: Run, artifact: Path) -> None:
    _, _, errors = cli("convert", "skewed", "--out", artifact, "--force")
    *_, line, kept = errors.splitlines()
    assert line.endswith("(--debug shows the full text)") and kept.startswith("kept: ")
    _, _, errors = cli("convert", "skewed", "--out", artifact, "--force", "--debug")
    assert "at max (h=40,w=40)" in errors


@pytest.mark.parametrize("verb", ["", *COMMANDS])
def test_help(cli: Run, verb: str) -> None:
    code, output, errors = cli(*([verb] if verb else []), "--help")
    assert code == 0
    assert errors == ""
    assert output.startswith("usage: pipeline")
    if not verb:
        assert all(name in output for name in COMMANDS)
    else:
        assert "--json" in output


def test_without_a_command_it_prints_the_help(cli: Run) -> None:
    assert cli() == cli("--help")


def test_version(cli: Run) -> None:
    code, output, errors = cli("--version")
    assert (code, errors) == (0, "")
    found = dict(line.split() for line in output.splitlines())
    assert found["trt-pipeline"] == importlib.metadata.version("trt-pipeline")
    assert found["onnx"] == importlib.metadata.version("onnx")


def test_models(cli: Run) -> None:
    code, output, errors = cli("models")
    assert (code, errors) == (0, "")
    assert "raft_small" in output
    assert "updates=12" in output
    code, output, _ = cli("models", "--json")
    assert code == 0
    options = {"updates": 12, "correlation": "volume", "update": "split"}
    assert json.loads(output)["raft"]["options"] == options


def test_inspect(cli: Run, artifact: Path) -> None:
    code, output, errors = cli("inspect", artifact)
    assert (code, errors) == (0, "")
    for part in ("profile default: h 5..18..40", "y: float32 [1, 4, h, w]", "engine: NOT compared"):
        assert part in output


def test_inspect_fails_where_the_comparison_did(cli: Run, artifact: Path) -> None:
    perturb(artifact)
    assert cli("verify", artifact)[0] == 1
    code, output, errors = cli("inspect", artifact)
    assert (code, errors) == (1, "")
    assert "FAILED y of rewritten" in output
    assert output.endswith("\n\nthe comparison FAILED: 15 problems\n")
    code, output, _ = cli("inspect", artifact, "--json")
    assert code == 1
    assert json.loads(output)["ok"] is False


def test_inspect_of_what_was_not_compared_yet(cli: Run) -> None:
    assert cli("export", "tiny", "--out", "a")[0] == 0
    code, output, _ = cli("inspect", "a")
    assert code == 0
    assert output.endswith("nothing compared yet\n")


@pytest.mark.parametrize("words", [["models"], ["inspect"], ["models", "--help"]])
def test_reader_that_went_away(converted: Report, words: list[str]) -> None:
    if words == ["inspect"]:
        words = [*words, str(converted.path)]
    read, write = os.pipe()
    os.close(read)
    process = command(*words, stdout=write)
    os.close(write)
    _, errors = process.communicate(timeout=60)
    assert errors == ""
    assert process.returncode in (0, 1)


def test_as_a_module_and_as_a_program() -> None:
    for line in (
        [sys.executable, "-m", "pipeline", "models", "--json"],
        [sys.executable, "-m", "pipeline", "convert", "nothing"],
    ):
        done = subprocess.run(
            line,
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": str(HERE.parent)},
            timeout=60,
            check=False,
        )
        if "models" in line:
            assert done.returncode == 0
            assert set(json.loads(done.stdout)) == set(MODELS)
        else:
            refused((done.returncode, done.stdout, done.stderr), "unknown model 'nothing'")


def test_progress_shows_while_a_model_prints(capsys: pytest.CaptureFixture[str]) -> None:
    """A model's prints are hidden with sys.stderr, and the progress is not."""
    progress = Progress()
    with contextlib.redirect_stderr(io.StringIO()):
        progress("export: trying sizes")
    assert capsys.readouterr().err.endswith("] export: trying sizes\n")


def test_steps_as_lines_of_json(cli: Run) -> None:
    code, output, errors = cli("convert", "tiny", "--out", "a", "--json", "--quick")
    assert code == 0, errors
    steps = [json.loads(line) for line in errors.splitlines()]
    assert {"export", "rewrite", "build", "compare", "package"} <= {s["step"] for s in steps}
    seconds = [step["seconds"] for step in steps]
    assert seconds == sorted(seconds) and seconds[-1] > 0
    assert json.loads(output)["manifest"]["name"] == "tiny"


def test_the_seconds_of_the_last_run(capsys: pytest.CaptureFixture[str]) -> None:
    text = pickle.loads(pickle.dumps(StageText("build", 116.7)))  # as a child process sends it
    Progress()(text)
    assert capsys.readouterr().err.endswith("] build (last time 117 s)\n")
    Progress(as_json=True)(text)
    told = json.loads(capsys.readouterr().err)
    assert (told["step"], told["last_seconds"]) == ("build", 117)


def test_a_stage_with_the_seconds_of_the_last_run_stays_on_a_terminal() -> None:
    progress = Progress()
    progress._bar = bar = Mock(task_ids=[])
    progress(StageText("build", 117.0))
    progress("export: trying sizes")
    (shown,) = bar.console.print.call_args_list
    assert shown.args[0].endswith("] build (last time 117 s)")


def test_a_pipe_hears_at_once_that_libraries_load() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pipeline", "check", "nothing"],
        capture_output=True,
        text=True,
        check=False,
        cwd=HERE.parent,
    )
    first, last = done.stderr.splitlines()
    assert re.fullmatch(r"\[ +0\.[1-9] s\] load libraries", first)
    assert last.startswith("error: unknown model 'nothing'")


def test_a_file_called_pipeline_does_not_break_the_command(tmp_path: Path) -> None:
    (tmp_path / "pipeline.py").write_text("raise ValueError('another file')")
    program = Path(sys.executable).with_name("pipeline")
    for words in ([str(program)], [sys.executable, "-P", "-m", "pipeline"]):
        done = subprocess.run(
            [*words, "--version"], capture_output=True, text=True, cwd=tmp_path, check=False
        )
        assert done.returncode == 0 and "trt-pipeline" in done.stdout, done.stderr


TERMINAL = """
import os, pty, sys
pid, fd = pty.fork()
if pid == 0:
    os.environ.update(TERM=sys.argv[1], COLUMNS="80")
    os.execv(sys.executable, [sys.executable, "-m", "pipeline", *sys.argv[2:]])
told = b""
while True:
    try:
        part = os.read(fd, 65536)
    except OSError:
        break
    if not part:
        break
    told += part
sys.stdout.buffer.write(told)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="has no pseudo-terminal")
@pytest.mark.parametrize("terminal", ["xterm-256color", "dumb"])
def test_a_terminal_shows_the_step_that_runs(tmp_path: Path, terminal: str) -> None:
    """A line that moves, stages that stay, and the result whole; plain lines on a dumb one."""
    pytest.importorskip("rich")
    graph = "g (float[n,3] x) => (float[n,3] y) { y = Relu(x) }"
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 18]> {graph}')
    onnx.save(model, tmp_path / "m.onnx")
    words = ["convert", "m.onnx", "--dim", "n=1:4", "--out", "a", "--quick"]
    done = subprocess.run(
        [sys.executable, "-c", TERMINAL, terminal, *words],
        capture_output=True, cwd=tmp_path, timeout=300, check=False,
    )  # fmt: skip
    text = done.stdout.decode()
    assert done.returncode == 0, text
    moves = "\x1b[2K" in text
    assert moves == (terminal != "dumb")
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    stages = re.findall(r"^\[ +[0-9.]+ s\] (\w+)\r?$", shown.replace("\r[", "\n["), re.MULTILINE)
    known = ["export", "rewrite", "build", "compare"]
    assert [stage for stage in stages if stage in known] == known
    assert "exported at min (n=1), 1 of 4" in shown
    assert "load libraries" in shown
    result = shown.replace("\r\n", "\n").rpartition("converted: m (")[2].splitlines()
    assert result[0].endswith("-> a") and result[-1].endswith("--details shows more")


def test_the_steps_of_an_export_are_announced(cli: Run) -> None:
    _, _, errors = cli("export", "tiny", "--out", "a")
    steps = [line.partition("] ")[2] for line in errors.splitlines()]
    assert steps[:2] == ["export", "export: import torch"]
    assert len(set(steps)) == len(steps)
    assert {"export: trying sizes", "export: torch.export"} <= set(steps)


def test_every_command_has_examples_that_can_be_parsed() -> None:
    parser = command_parser()
    assert EXAMPLES.keys() == all_commands(parser).keys()
    assert len(EXAMPLES["convert"]) == 3
    for name, texts in EXAMPLES.items():
        for text in texts:
            words = shlex.split(text)
            assert text.startswith(f"pipeline {name} ") or text == f"pipeline {name}"
            parser.parse_args(words[1:])


def test_the_help_has_groups_and_ends_with_examples(cli: Run) -> None:
    code, output, _ = cli("convert", "--help")
    assert code == 0
    titles = [line[:-1] for line in output.splitlines() if line.endswith(":") and line[0] != " "]
    assert titles == ["positional arguments", *GROUPS, "other options", "examples"]
    assert output.splitlines()[0] == "usage: pipeline convert [OPTIONS] SOURCE"
    assert output.rstrip().endswith(EXAMPLES["convert"][-1])
    for sub in all_commands(command_parser()).values():
        shown = [a for g in sub._action_groups for a in g._group_actions]
        assert len(shown) == len(sub._actions) and set(shown) == set(sub._actions)
    options = {a.dest for sub in all_commands(command_parser()).values() for a in sub._actions}
    assert {name for names in GROUPS.values() for name in names} <= options


COMPLETED = """
source completion
_complete() {
    COMP_WORDS=("$@"); COMP_CWORD=$(( $# - 1 )); COMPREPLY=()
    $(complete -p pipeline | sed 's/.*-F \\([^ ]*\\).*/\\1/')
    echo "${COMPREPLY[*]}"
}
_complete pipeline con
_complete pipeline convert --prec
_complete pipeline report arti
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_a_shell_completes_commands_options_and_files(cli: Run, tmp_path: Path) -> None:
    pytest.importorskip("shtab")
    code, script, errors = cli("--completion", "bash")
    assert code == 0 and not errors
    (tmp_path / "completion").write_text(script)
    (tmp_path / "artifacts").mkdir()
    done = subprocess.run(
        ["bash", "-c", COMPLETED], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    assert done.stdout.splitlines() == ["convert", "--precision", "artifacts"], done.stderr
    refused(cli("--completion", "fish"), "invalid choice: 'fish'")


def test_completion_names_what_is_missing(cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    refused(cli("--completion", "zsh"), "pip install shtab")
