"""The command line with a zoo of its own: two models that convert, and some that don't."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import onnx
import onnx.parser
import tiny

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


def quick(name: str = "last") -> ModelSpec:
    """Converts without torch, which takes seconds to import."""
    path = Path(f"{name}.onnx")
    text = f"{name} (float[1, n] x) => (float[1, n] y) {{ y = Exp(x) }}"
    onnx.save(onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 18]> {text}'), path)
    return onnx_spec(path, {"n": Dim("n", 2, 8, 32)}, name=name, tolerance=tiny.TOLERANCE)


def crashing() -> ModelSpec:
    """Ends its process."""

    def build(_: Path | None) -> Any:
        os.abort()

    spec = tiny.of(lambda x: x, name="crashing")
    return ModelSpec(spec.name, build, spec.inputs, spec.outputs, spec.tolerance)


def slow() -> ModelSpec:
    """Takes an hour."""

    def build(_: Path | None) -> Any:
        time.sleep(3600)

    spec = tiny.of(lambda x: x, name="slow")
    return ModelSpec(spec.name, build, spec.inputs, spec.outputs, spec.tolerance)


def main() -> int:
    from pipeline.commands import convert_all
    from pipeline.commands.main import main as command_line
    from pipeline.models import MODELS

    MODELS.clear()
    MODELS.update(SLOW if os.environ.get("SMALL_ZOO") == "slow" else ZOO)
    convert_all.PROGRAM = (sys.executable, __file__)
    return command_line()


if __name__ == "__main__":
    sys.exit(main())
