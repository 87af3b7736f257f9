"""The artifacts of RAFT, made by the README's own command; later calls find them unchanged."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from pipeline.artifact import Artifact

ROOT = Path(__file__).parents[1]


def make(*words: str) -> subprocess.CompletedProcess[str]:
    """Runs make in the repository, in the environment that the tests run in."""
    return subprocess.run(
        ["make", "--no-print-directory", f"VENV={sys.prefix}", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )


def make_artifact(model: str) -> Artifact:
    """The artifact that `make convert MODEL=model` leaves."""
    done = make("convert", f"MODEL={model}")
    assert done.returncode == 0, done.stderr
    return Artifact.open(ROOT / "artifacts" / model)
