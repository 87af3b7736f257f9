"""An export is the same to the byte in every process: Python orders sets by a random seed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import HERE
from readme_commands import ROOT


@pytest.mark.slow
def test_the_export_does_not_depend_on_the_hash_seed(tmp_path: Path) -> None:
    """torch 2.13 writes the ranges of two multiples in the order of a set: seeds 0 and 2 differ."""
    path = os.pathsep.join(map(str, (ROOT, HERE)))
    files = []
    for seed in ("0", "2"):
        out = tmp_path / seed
        line = [sys.executable, "-m", "pipeline", "export", "tiny:conv", "--out", str(out)]
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": seed}
        subprocess.run(line, env=environment, check=True, capture_output=True)
        files.append((out / "exported.onnx").read_bytes())
    assert b"range_constraints" in files[0] and files[0] == files[1]
