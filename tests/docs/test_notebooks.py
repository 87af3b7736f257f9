"""The notebooks run from top to bottom without a GPU, and show what their text says."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from readme_commands import ROOT

FOLDER = ROOT / "docs" / "notebooks"

# what the outputs of each notebook must hold
SHOWN = {
    "first-conversion": [
        "No findings block a conversion",
        "{'b': 4, 'h': 128, 'w': 128} compared",
        "model baked: 2 findings block the conversion:\n! h must be 64",
    ],
    "half-precision": [
        "! output of half differs from torch at 5 of 5 sets of sizes",
        "at: first overflow in half precision: the Mul node",
        "1 island of float32",
    ],
    "onnx-file": [
        "fixed: decompose_instance_norm",
        'y = Clip (instance_norm, "node_minimum/low", clone)',
        "['relu6', ",
    ],
}


def text_of(notebook: nbformat.NotebookNode) -> str:
    """All that the cells printed, and their values."""
    parts = []
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            parts += [output.get("text", ""), output.get("data", {}).get("text/html", "")]
    return "".join(parts)


def test_every_notebook_is_tested() -> None:
    assert sorted(p.stem for p in FOLDER.glob("*.ipynb")) == sorted(SHOWN)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SHOWN))
def test_a_notebook_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    path = FOLDER / f"{name}.ipynb"
    notebook, stored = nbformat.read(path, 4), text_of(nbformat.read(path, 4))
    client = NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()  # clears the outputs, and raises at the first cell that fails
    text = text_of(notebook)
    for words in SHOWN[name]:
        assert words in text
        assert words in stored, "store it again"
