"""``pipeline view`` serves a graph with the real Netron."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipeline.commands.main import main


def served(
    source: Path, *more: str, number: signal.Signals = signal.SIGINT
) -> tuple[bytes, int, str]:
    """What the command serves as the model, and its end after a signal: exit code and stderr."""
    words = [sys.executable, "-m", "pipeline", "view", str(source), "--no-browser", "--json"]
    pipe = subprocess.PIPE
    with subprocess.Popen([*words, *more], stdout=pipe, stderr=pipe, text=True) as child:
        try:
            assert child.stdout is not None
            url = json.loads(child.stdout.readline())["url"]
            name = "exported.onnx" if more else "model.onnx"
            with urllib.request.urlopen(f"{url}/data/{name}", timeout=30) as answer:
                content: bytes = answer.read()
            child.send_signal(number)
            _, errors = child.communicate(timeout=30)
        finally:
            child.kill()
    return content, child.returncode, errors


@pytest.mark.skipif(sys.platform == "win32", reason="cannot send these signals")
def test_the_graphs_of_an_artifact(artifact: Path) -> None:
    """Ctrl-C is the usual end; to be stopped by another program is not."""
    content, code, errors = served(artifact)
    assert content == (artifact / "model.onnx").read_bytes()
    assert code == 0 and "error" not in errors and "interrupted" not in errors
    content, code, errors = served(artifact, "--exported", number=signal.SIGTERM)
    assert content == (artifact / "exported.onnx").read_bytes()
    assert code == 130 and "error: interrupted" in errors


def test_ctrl_c_without_a_handler(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    fake = SimpleNamespace(start=lambda *_, **__: ("localhost", 8080), wait=interrupted)
    monkeypatch.setitem(sys.modules, "netron", fake)
    assert main(["view", str(artifact)]) == 0


def test_without_netron(
    artifact: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "netron", None)
    assert main(["view", str(artifact)]) == 2
    assert "pip install netron" in capsys.readouterr().err


def test_a_file_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["view", str(tmp_path / "m.onnx")]) == 2
    assert "m.onnx: no such file" in capsys.readouterr().err
