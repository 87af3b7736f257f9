"""A function imports a module of the project only to keep the start of the program fast.

Ruff's PLC0415 would refuse every import in a function, also of heavy libraries.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import pipeline

ROOT = Path(pipeline.__file__).parent
HEAVY = {
    "cuda", "fsspec", "matplotlib", "onnx", "onnx_graphsurgeon", "onnx_ir", "onnxruntime",
    "onnxscript", "opentelemetry", "polygraphy", "prometheus_client", "ray", "safetensors", "sympy",
    "tensorrt", "tensorrt_rtx", "torch", "torchvision", "transformers", "tritonclient",
}  # fmt: skip
# own modules that take a tenth of a second, so the command line imports them when it needs them
SLOW = {"pipeline.artifact.manifest", "pipeline.runtime.engine"}
# it takes half as long as the rest of the help, which does not need it
NUMPY = {"numpy"}
METADATA = {"importlib.metadata"}


def _files() -> Iterator[tuple[str, Path]]:
    links = [ROOT / name for name in ("passes", "plugins", "models")]
    for file in {*ROOT.rglob("*.py"), *(file for link in links for file in link.rglob("*.py"))}:
        parts = file.relative_to(ROOT.parent).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), file


MODULES = dict(_files())


def _targets(node: ast.stmt) -> Iterator[str]:
    """The modules that an import statement imports."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module:
        for alias in node.names:
            inner = f"{node.module}.{alias.name}"
            yield inner if inner in MODULES else node.module


def _at_the_top(body: list[ast.stmt]) -> Iterator[str]:
    """The modules that a module imports when it is imported."""
    for node in body:
        if isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.unparse(node.test):
            yield from _at_the_top([*node.body, *node.orelse])
        elif isinstance(node, ast.Try):
            yield from _at_the_top([*node.body, *(n for h in node.handlers for n in h.body)])
        else:
            yield from _targets(node)


@cache
def _imports_of(module: str) -> tuple[str, ...]:
    return tuple(_at_the_top(ast.parse(MODULES[module].read_text()).body))


@cache
def imported_by(module: str) -> frozenset[str]:
    """The project modules and heavy libraries that importing a module imports."""
    seen: set[str] = set()
    todo = [module]
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        if name in MODULES:
            seen.add(name)
            todo += _imports_of(name)
            parent = name.rpartition(".")[0]
            todo += (
                [] if parent in ("", "pipeline") else [parent]
            )  # which every module has imported
        elif name.partition(".")[0] in HEAVY | NUMPY:
            seen.add(name.partition(".")[0])
    return frozenset(seen)


def needless(module: str, tree: ast.AST) -> list[str]:
    """Imports of project modules in functions that could be at the top."""
    here = imported_by(module)
    excused = HEAVY | SLOW | NUMPY if module.startswith("pipeline.commands") else HEAVY
    found = []
    for function in ast.walk(tree):
        if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        for node in ast.walk(function):
            if not isinstance(node, (ast.Import, ast.ImportFrom)):
                continue
            for target in _targets(node):
                if target in MODULES:
                    new = imported_by(target) - here
                    if not new & excused and module not in imported_by(target):
                        found.append(f"{module}, line {node.lineno}: {target}")
    return found


def test_own_modules_are_imported_at_the_top_unless_they_are_heavy() -> None:
    assert len(MODULES) > 250
    every = (needless(name, ast.parse(file.read_text())) for name, file in MODULES.items())
    assert sorted({line for lines in every for line in lines}) == []


@pytest.mark.parametrize(
    ("line", "right"),
    [
        ("from pipeline.spec.dims import Dim", False),
        ("from pipeline.spec import dims", False),
        ("from pipeline.export.trace import trace", True),  # imports torch
        ("import torch", True),
    ],
)
def test_a_needless_import_is_noticed(line: str, right: bool) -> None:
    tree = ast.parse(f"def function():\n    {line}\n")
    assert (needless("pipeline.machine.target", tree) == []) is right


@pytest.mark.parametrize(
    ("words", "libraries"),
    [
        (["-c", "import pipeline, sys; print(*sys.modules)"], HEAVY | NUMPY),
        (["-X", "importtime", "-m", "pipeline"], HEAVY | SLOW | NUMPY | METADATA),
        (["-X", "importtime", "-m", "pipeline", "--help"], HEAVY | SLOW | NUMPY | METADATA),
        (["-X", "importtime", "-m", "pipeline", "convert", "--help"], HEAVY | SLOW | NUMPY),
    ],
)
def test_the_start_loads_no_heavy_library(words: list[str], libraries: set[str]) -> None:
    done = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, check=True, cwd=ROOT.parent
    )
    loaded = set((done.stdout if words[0] == "-c" else done.stderr).split())
    assert "pipeline" in loaded
    assert loaded & libraries == set()


def test_every_public_name_is_there_and_listed() -> None:
    names = {getattr(pipeline, name).__name__.split(".")[-1] for name in pipeline.__all__}
    assert names == set(pipeline.__all__)
    assert set(pipeline.__all__) <= set(dir(pipeline))
    assert not hasattr(pipeline, "engine")
