"""Generated pages are up to date."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys

import pytest
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


@pytest.mark.parametrize("name", ["strangers", "patterns"])
def test_a_measured_page_begins_as_its_script_writes_it(name: str) -> None:
    tree = ast.parse((ROOT / "benchmarks" / name / f"{name}.py").read_text())
    (head,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "HEAD"
    )
    text = (ROOT / "docs" / "results" / f"{name}.md").read_text()
    for part in head.replace("{points}", "{example}").split("{example}"):
        assert part in text, f"{name}.md: write the HEAD of benchmarks/{name}/{name}.py into it"


def test_the_floors_are_those_of_the_import_contract() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    layers = re.search(r"^layers = \[(.*?)^\]", project, re.DOTALL | re.MULTILINE)
    page = (ROOT / "docs" / "design" / "floors.md").read_text()
    drawn = re.search(r"^```\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert layers and drawn
    names = re.findall(r'"([^"]+)"', layers[1])
    assert [line.split("  ")[0] for line in drawn[1].splitlines()] == names
