"""A module called ``_x`` is private to its room, and a name called ``_x`` to its module."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import pipeline

ROOT = Path(pipeline.__file__).parent


def imported(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """The module and name of each import from the project."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("pipeline"):
            yield from ((node.module or "", alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names if alias.name[:8] == "pipeline")


def trespasses(file: str, source: str) -> list[str]:
    """Imports in `file` (relative to pipeline/) that are private to another room or module."""
    found = []
    for module, name in imported(ast.parse(source)):
        parts = f"{module}.{name}".split(".")[1:]
        private = [place for place, part in enumerate(parts) if part.startswith("_")]
        inside = private and (ROOT / Path(*parts[: private[0] + 1])).with_suffix(".py").is_file()
        if private and not (inside and parts[0] == file.partition("/")[0]):
            found.append(f"{file} imports {module}.{name}")
    return found


def files() -> list[str]:
    links = [ROOT / name for name in ("passes", "plugins", "models")]
    every = [*ROOT.rglob("*.py"), *(file for link in links for file in link.rglob("*.py"))]
    return sorted({file.relative_to(ROOT).as_posix() for file in every})


def test_nothing_private_is_imported_from_outside() -> None:
    assert len(files()) > 250
    assert [line for file in files() for line in trespasses(file, (ROOT / file).read_text())] == []


@pytest.mark.parametrize(
    ("file", "line", "right"),
    [
        ("passes/lower_opset.py", "from pipeline.passes.lowering._site import Site", True),
        ("rewrite/rewrite.py", "from pipeline.passes.lowering._site import Site", False),
        ("passes/fold_if.py", "from pipeline.passes.infra import _walk", False),
        ("models/vit.py", "from pipeline.models import _seeded", True),
        ("source/find.py", "import pipeline.models._seeded", False),
    ],
)
def test_trespasses_are_noticed(file: str, line: str, right: bool) -> None:
    assert bool(trespasses(file, line)) is not right
