"""Zoos for tests of the command line: models that convert, and models that fail."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import onnx.parser
import tiny
from readme_commands import ROOT

from pipeline.source.onnx.spec import onnx_spec
from pipeline.spec.dims import Dim
from pipeline.spec.model import ModelSpec

ZOO = {
    "first": "small_zoo:first",
    "skewed": "tiny:skewed",
    "crashing": "small_zoo:crashing",
    "last": "tiny:conv",
}
SLOW = {"slow": "small_zoo:slow", "last": "small_zoo:quick"}


def first() -> ModelSpec:
    """Converts."""
    return quick("first")


def quick(
    name: str = "last", graph: str = "(float[1, n] x) => (float[1, n] y) { y = Exp(x) }"
) -> ModelSpec:
    """Converts without torch, which takes seconds to import."""
    path = Path(f"{name}.onnx")
    text = f"{name} {graph}"
    onnx.save(onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 18]> {text}'), path)
    spec = onnx_spec(path, {"n": Dim("n", 2, 8, 32)}, name=name)
    return replace(spec, tolerance=tiny.TOLERANCE)


def crashing() -> ModelSpec:
    """Ends its process."""

    def build(_: Path | None) -> Any:
        os.abort()

    spec = tiny.of(lambda x: x, name="crashing")
    return ModelSpec(spec.name, build, spec.inputs, spec.outputs, spec.tolerance)


def unsized() -> ModelSpec:
    """Fails after its export, without torch: the size of its output depends on the data."""
    return quick("unsized", "(float[1, n] x) => (int64[2, m] y) { y = NonZero(x) }")


def aborting() -> ModelSpec:
    """Ends its process at once, without torch."""
    os.abort()


def slow() -> ModelSpec:
    """Takes an hour."""

    def build(_: Path | None) -> Any:
        time.sleep(3600)

    spec = tiny.of(lambda x: x, name="slow")
    return ModelSpec(spec.name, build, spec.inputs, spec.outputs, spec.tolerance)


def mounted(folder: Path, zoo: Mapping[str, str]) -> Path:
    """A folder for PYTHONPATH: its package ``pipeline`` has another zoo, and links to the rest."""
    package = folder / "pipeline"
    (package / "models").mkdir(parents=True)
    for each in (ROOT / "pipeline").iterdir():
        if each.name not in ("models", "__pycache__"):
            (package / each.name).symlink_to(each)
    (package / "models" / "__init__.py").write_text(f"MODELS = {dict(zoo)}\n")
    return folder
