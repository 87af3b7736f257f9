"""The GitHub Action and the Containerfile, as far as they run without GitHub or containers.

Not tested: the step that sets Python up, and a build of the image.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import onnx.parser
import pytest
import yaml
from onnx import save

ROOT = Path(__file__).resolve().parents[2]
ACTION: dict[str, Any] = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
NET = """<ir_version: 8, opset_import: ["" : 17]>
net (float[b, 4] x) => (float[b, 4] y) { y = Tanh(x) }"""


def step(name: str, **given: str) -> dict[str, str]:
    """The step with this name, and its variables, as the action sets them from its inputs."""
    (found,) = [one for one in ACTION["runs"]["steps"] if one.get("name") == name]
    values = {key: str(one.get("default", "")) for key, one in ACTION["inputs"].items()} | given
    return {
        "run": found["run"],
        **{
            key: re.sub(r"\$\{\{ inputs\.([\w-]+) \}\}", lambda m: values[m[1]], text)
            for key, text in found["env"].items()
        },
    }


def run_step(folder: Path, name: str, **given: str) -> subprocess.CompletedProcess[str]:
    """Runs a step with GitHub's options of bash, and `pipeline` from this clone."""
    bin_ = folder / "bin"
    bin_.mkdir(exist_ok=True)
    command = bin_ / "pipeline"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m pipeline "$@"\n')
    command.chmod(0o755)
    variables = step(name, **given)
    words = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", variables.pop("run")]
    inherited = {**os.environ, "PATH": f"{bin_}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        words, cwd=folder, env={**inherited, **variables}, capture_output=True, text=True
    )


@pytest.fixture
def net(tmp_path: Path) -> Path:
    save(onnx.parser.parse_model(NET), tmp_path / "net.onnx")
    return tmp_path


def test_check_goes_on_after_a_failure_and_fails_at_the_end(net: Path) -> None:
    lines = "missing.onnx --dim b=1:2\n\nnet.onnx --dim 'b=1:2:4'\n"
    done = run_step(net, "pipeline check", check=lines)
    assert "missing.onnx" in done.stderr
    assert done.stdout.startswith("net, for ")
    assert done.returncode == 123
    assert run_step(net, "pipeline check", check="net.onnx --dim b=1:2:4").returncode == 0


def test_verify_against_fails_if_the_new_artifact_is_worse(net: Path) -> None:
    convert = [sys.executable, "-m", "pipeline", "convert", "net.onnx", "--quick"]
    for name, sizes in (("old", "b=1:2:4"), ("new", "b=1:2:3")):
        words = [*convert, "--dim", sizes, "--out", name]
        subprocess.run(words, cwd=net, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)
    worse = run_step(net, "pipeline verify --against", against="new old")
    assert worse.returncode == 123, worse.stdout
    assert "REGRESSION dim narrowed: b in 1..4 is now b in 1..3" in worse.stdout
    same = run_step(net, "pipeline verify --against", against="old old")
    assert same.returncode == 0, same.stderr


def test_every_input_is_used() -> None:
    text = (ROOT / "action.yml").read_text(encoding="utf-8")
    assert set(re.findall(r"inputs\.([\w-]+)", text)) == ACTION["inputs"].keys()


def test_the_files_of_the_image_make_the_wheel(tmp_path: Path) -> None:
    text = (ROOT / "Containerfile").read_text(encoding="utf-8")
    source = tmp_path / "source"
    source.mkdir()
    for words in re.findall(r"^COPY (.*)$", text, re.MULTILINE):
        *names, to = words.split()
        for name in names:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, source / to, symlinks=True)
            else:
                shutil.copy(ROOT / name, source / to)
    (install,) = re.findall(r"-c (\S+) '\.\[([\w,]+)\]'", text)
    assert (source / install[0]).is_file()
    command = [sys.executable, "-m", "pip", "wheel", "--no-index", "--no-deps"]
    command += ["--no-build-isolation", "--wheel-dir", str(tmp_path), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    extras = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert all(re.search(rf"^{name} = \[", extras, re.MULTILINE) for name in install[1].split(","))
    assert list(tmp_path.glob("trt_pipeline-*.whl"))
