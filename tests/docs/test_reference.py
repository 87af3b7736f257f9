"""docs/reference/command-line.md is what its generator prints."""

from __future__ import annotations

import os
import subprocess
import sys

from readme_commands import PAGES, ROOT

GENERATOR = "docs/reference/generate.py"


def test_the_command_lines_page_is_what_the_parser_gives() -> None:
    done = subprocess.run(
        [sys.executable, GENERATOR],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    page = "docs/reference/command-line.md"
    assert done.stdout == PAGES[page], f"make it again: python {GENERATOR} > {page}"
