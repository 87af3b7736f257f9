"""``pipeline view`` serves a graph with the real Netron."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from pipeline.commands.main import main


def served(source: Path, *more: str) -> bytes:
    """What the command serves as the model."""
    words = [sys.executable, "-m", "pipeline", "view", str(source), "--no-browser", "--json"]
    with subprocess.Popen([*words, *more], stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            url = json.loads(child.stdout.readline())["url"]
            name = "exported.onnx" if more else "model.onnx"
            with urllib.request.urlopen(f"{url}/data/{name}", timeout=30) as answer:
                content: bytes = answer.read()
            child.send_signal(signal.SIGINT)
            assert child.wait(30) == 130
        finally:
            child.kill()
    return content


def test_the_graphs_of_an_artifact(artifact: Path) -> None:
    assert served(artifact) == (artifact / "model.onnx").read_bytes()
    assert served(artifact, "--exported") == (artifact / "exported.onnx").read_bytes()


def test_without_netron(
    artifact: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "netron", None)
    assert main(["view", str(artifact)]) == 2
    assert "pip install netron" in capsys.readouterr().err


def test_a_file_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["view", str(tmp_path / "m.onnx")]) == 2
    assert "m.onnx: no such file" in capsys.readouterr().err
