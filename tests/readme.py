"""The README's blocks, and its snippets run as they stand, each once for all tests."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

from raft_artifacts import ROOT

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
SNIPPETS = [text for language, text in BLOCKS if language == "python"]
COMMANDS = [line for kind, text in BLOCKS if kind == "sh" for line in text.splitlines()]
Snippet = Callable[[int], tuple[subprocess.CompletedProcess[str], Path]]  # the `snippet` fixture


def runner(folder: Callable[[str], Path]) -> Snippet:
    """Runs a snippet by its number, the first time only, in a folder of its own.

    Args:
        folder: makes it.
    """

    @cache
    def run(number: int) -> tuple[subprocess.CompletedProcess[str], Path]:
        place = folder(f"snippet{number}")
        line = [sys.executable, "-c", SNIPPETS[number]]
        return subprocess.run(line, cwd=place, capture_output=True, text=True, timeout=500), place

    return run
