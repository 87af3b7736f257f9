"""The tests on a machine without torch, such as a GPU machine: only the tests that can run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import onnx
import onnx.parser

HERE = Path(__file__).resolve().parents[1]
WITHOUT_TORCH = """
import sys
for name in ("torch", "torchvision", "transformers"):
    sys.modules[name] = None
import pytest
sys.exit(pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", "-m", "gpu", sys.argv[1]]))
"""


def test_every_gpu_test_is_collected_without_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, str(HERE)],
        cwd=HERE.parent, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    marked = {
        path.relative_to(HERE.parent).as_posix()
        for path in HERE.rglob("test_*.py")
        if "pytest.mark.gpu" in path.read_text() and path != Path(__file__).resolve()
    }
    collected = {line.partition("::")[0] for line in done.stdout.splitlines() if "::" in line}
    assert "tests/gpu/test_verify_gpu.py" in marked
    assert marked <= collected
    # the others are named, with the reason
    assert "test files left out: not installed here" in done.stdout
    assert "tests/models/test_raft.py: needs torch" in done.stdout


CONVERT = """
import sys
for name in ("torch", "torchvision", "transformers"):
    sys.modules[name] = None
from pipeline.commands.main import main
sys.exit(main(sys.argv[1:]))
"""


def test_an_onnx_file_is_converted_without_torch(tmp_path: Path) -> None:
    text = """<ir_version: 8, opset_import: ["" : 17]>
    g (float[b,4] x) => (float[b,8] y) { t = Tanh(x)  y = Concat<axis=1>(t, x) }"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "net.onnx")
    for words in (
        ("convert", "net.onnx", "--dim", "b=1:2:5", "--out", "a", "--details"),
        ("verify", "a"),
        ("inspect", "a"),
    ):
        done = subprocess.run(
            [sys.executable, "-c", CONVERT, *words],
            cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        assert "batch rows of exported at b=2: each row is independent of the others" in done.stdout
