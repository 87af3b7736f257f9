"""The recordings of the terminal in the docs."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
CASTS = ROOT / "docs" / "guide" / "terminal"


@pytest.fixture(scope="module")
def terminal() -> ModuleType:
    spec = importlib.util.spec_from_file_location("terminal", ROOT / "docs" / "terminal.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def recorded(name: str) -> str:
    head, *events = map(json.loads, (CASTS / f"{name}.cast").read_text().splitlines())
    assert (head["version"], head["width"]) == (2, 80)
    seconds = [event[0] for event in events]
    assert seconds == sorted(seconds)
    return "".join(event[2] for event in events)


def test_every_command_has_a_recording_and_a_picture(terminal: ModuleType) -> None:
    for name, command in terminal.COMMANDS.items():
        assert recorded(name).startswith(f"$ {command}\r\n")
        assert (CASTS / f"{name}.svg").read_text().startswith("<svg")
    assert "converted: net (" in recorded("convert")
    assert "2 findings block the conversion" in recorded("refused")


@pytest.mark.skipif(sys.platform == "win32", reason="has no pseudo-terminal")
@pytest.mark.parametrize("name", ["help", "convert-help", "wrong-word"])
def test_a_recording_is_up_to_date(name: str, terminal: ModuleType) -> None:
    now = "".join(text for _, text in terminal.run(terminal.COMMANDS[name], "dumb"))
    assert recorded(name) == now, f"run python docs/terminal.py {name}"
