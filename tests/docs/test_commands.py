"""Runs the commands of README, docs/guide and docs/reference, and compares what pages show of it.

A page's commands run one after the other, as they stand. The folder has the files that the page
tells its reader to have. Commands that can't run here: `NOT_RUN` in tests/support/docs_blocks.py.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import docs_models
import pytest
from docs_blocks import RUN, SHOWN, Block, blocks_of
from docs_runner import Runner, check_shown

from pipeline.compare import random_sizes
from pipeline.convert.report import Report
from pipeline.models import MODELS

Artifacts = Callable[..., None]


@pytest.fixture
def runner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, request: pytest.FixtureRequest
) -> Runner:
    """Runs the pages of a test in `tmp_path`, with small models in place of large ones."""
    monkeypatch.chdir(tmp_path)
    for name, factory in docs_models.ZOO.items():
        monkeypatch.setitem(MODELS, name, factory)
    # other tests are about random sizes, which take seconds
    monkeypatch.setattr(random_sizes, "_SHARE", 0)
    monkeypatch.setattr(random_sizes, "_LEAST", 0)
    return Runner(capsys, RUN.get(request.node.name, ()))


@pytest.fixture
def artifacts(converted: Report, runner: Runner) -> Artifacts:
    """Copies a small artifact to these folders."""
    del runner  # its folder is the current one

    def copied(*places: str) -> None:
        for place in places:
            shutil.copytree(converted.path, place, dirs_exist_ok=True)

    return copied


def text_of(page: str, first: str) -> str:
    """The text of a page's only block that begins so."""
    (text,) = (block.text for block in blocks_of(page) if block.text.startswith(first))
    return text


def shown(page: str, first: str) -> Block:
    """The only block of text on a page that begins so."""
    (block,) = (b for b in blocks_of(page) if b.language == "text" and b.text.startswith(first))
    return block


@pytest.mark.slow
def test_a_model_in_a_file(runner: Runner, artifacts: Artifacts) -> None:
    Path("my_model.py").write_text(docs_models.CLASSIFIER)
    docs_models.write_onnx(Path("exported_elsewhere.onnx"), "mean.onnx")
    docs_models.write_onnx(Path("model.onnx"), "relu6.onnx")
    Path("relu6.py").write_text(text_of("docs/guide/write-a-pass.md", '"""Relu6'))
    artifacts("artifacts/raft", "artifacts/raft_small")
    runner.run_pages()
    (diff,) = (output for command, output in runner.ran.items() if "--only relu6" in command)
    assert "Clip" in diff
    assert Path("artifacts/factory/engine.plan").is_file() and Path("raft86.onnx").is_file()


@pytest.mark.slow
def test_a_model_of_ones_own(runner: Runner) -> None:
    import numpy as np

    files = {
        "my_model.py": docs_models.UP_AND_DOWN,
        "speech.py": docs_models.SPEECH,
        "detector.py": docs_models.DETECTOR,
    }
    for name, text in files.items():
        Path(name).write_text(text)
    docs_models.write_onnx(Path("exported_elsewhere.onnx"), "mean.onnx")
    for name in ("decoder.onnx", "quantised.onnx", "float.onnx"):
        docs_models.write_onnx(Path(name), name)
    audio = np.random.default_rng(0).standard_normal((3, 400)).astype(np.float32)
    np.savez("sample.npz", audio=audio, lengths=np.array([400, 250, 90]))
    runner.run_pages()
    assert Path("artifacts/encoder/inputs.npz").is_file()


@pytest.mark.slow
def test_caches_and_masks(runner: Runner) -> None:
    Path("lm.py").write_text(docs_models.DECODER)
    Path("net.py").write_text(docs_models.MASKED)
    runner.run_pages()


@pytest.mark.slow
def test_a_gpu_machine_and_a_comparison(runner: Runner, artifacts: Artifacts) -> None:
    artifacts("artifacts/raft", "artifacts/raft.old")
    runner.run_pages()
    assert Path("raft-report.html").is_file() and Path("raft-rtx/engine.plan").is_file()


@pytest.mark.slow
def test_engines_for_several_gpus(runner: Runner) -> None:
    runner.run_pages()


@pytest.mark.slow
def test_half_precision(runner: Runner) -> None:
    page = "docs/guide/half-precision.md"
    Path("model.py").write_text(text_of(page, "import torch"))
    runner.run_pages()


@pytest.mark.slow
def test_a_shared_store(runner: Runner) -> None:
    docs_models.write_onnx(Path("model.onnx"), "mean.onnx")
    runner.run_pages()
    assert Path("pulled/engine.plan").is_file()


@pytest.mark.slow
def test_the_examples_of_the_commands(runner: Runner, artifacts: Artifacts) -> None:
    """Each example has new artifacts, because one may change them for the next."""

    def before(command: str) -> None:
        shutil.rmtree("artifacts", ignore_errors=True)
        if "convert" not in command and "export" not in command:
            artifacts("artifacts/raft_small", "artifacts/raft_small_old")

    docs_models.write_onnx(Path("model.onnx"), "mean.onnx")
    point = {"sizes": {"h": 8}, "plain": {"median_ms": 0.5}, "graph": {"median_ms": 0.25}}
    Path("bench.json").write_text(json.dumps({"gpu": "some GPU", "points": [point]}))
    runner.before = before
    for block in blocks_of("docs/reference/command-line.md"):
        if block.language == "text":
            command = block.text.split("[OPTIONS]")[0]
            check_shown(block, runner.output(f"{command} --help", str(block)))
    runner.run_pages()


@pytest.mark.slow
def test_messages_of_a_failure(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    page = "docs/guide/when-it-fails.md"
    Path("net.py").write_text(docs_models.DIFFERENT)
    command = "pipeline convert net.py:net --input 'x:1x3x{h}x{w}' --dim h=5:9 --dim w=5:9"
    check_shown(shown(page, SHOWN[1]), runner.output(command, page, 1))
    Path("remembers").mkdir()
    monkeypatch.chdir("remembers")
    Path("net.py").write_text(docs_models.REMEMBERING)
    command = "pipeline convert net.py:net --input 'x:{b}x{w}' --dim b=1:5 --dim w=16:400"
    check_shown(shown(page, SHOWN[2]), runner.output(command, page, 1))
