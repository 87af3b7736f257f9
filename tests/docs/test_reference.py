"""Generated pages are up to date."""

from __future__ import annotations

import ast
import re
from dataclasses import fields
from typing import get_args

import pytest
from readme_commands import PAGES, ROOT

import pipeline
from pipeline.artifact.manifest import SCHEMA, Manifest
from pipeline.convert.options import Verify
from pipeline.machine.python_file import run_python_file
from pipeline.spec.config import Config
from pipeline.spec.rules import RULE_KINDS, RuleKind

GENERATOR = "docs/reference/generate.py"


@pytest.mark.parametrize("name", ["command-line.md", "findings.md"])
def test_a_generated_page_is_up_to_date(name: str) -> None:
    script = run_python_file(ROOT / GENERATOR, "generate_reference")
    assert script.PAGES[name]() == PAGES[f"docs/reference/{name}"], f"run python {GENERATOR}"


def test_the_page_of_the_artifact_names_every_key_and_the_schema() -> None:
    page = PAGES["docs/reference/artifact.md"]
    table = page.partition("## What is in the manifest?")[2].partition("\n## ")[0]
    firsts = [line.split("|")[1] for line in table.splitlines() if line.startswith("|")]
    keys = {key for first in firsts for key in re.findall(r"`(\w+)`", first)}
    assert keys == {"schema", "manifest_sha256", *(f.name for f in fields(Manifest))}
    assert f"version of this format: {SCHEMA};" in table


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


def test_every_kind_of_rule_has_a_meaning() -> None:
    assert set(RULE_KINDS) == set(get_args(RuleKind))


def test_the_floors_are_those_of_the_import_contract() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    layers = re.search(r"^layers = \[(.*?)^\]", project, re.DOTALL | re.MULTILINE)
    page = (ROOT / "docs" / "design" / "floors.md").read_text()
    drawn = re.search(r"^```\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert layers and drawn
    names = re.findall(r'"([^"]+)"', layers[1])
    assert [line.split("  ")[0] for line in drawn[1].splitlines()] == names


def test_the_page_of_the_package_names_every_field_and_attribute() -> None:
    page = (ROOT / "docs" / "reference" / "python.md").read_text()
    config = page.partition("## Config")[2].partition("## Report")[0]
    assert [f.name for f in fields(Config) if f"`{f.name}`" not in config] == []
    verify = page.partition("## verify")[2].partition("## Config")[0]
    assert [f.name for f in fields(Verify) if f.name not in verify] == []
    assert [name for name in pipeline.__all__ if name not in page] == []
