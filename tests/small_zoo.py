"""The command line with a zoo of its own: two models that convert, and some that don't."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import tiny

from pipeline.spec import ModelSpec

ZOO = {
    "first": "small_zoo:first",
    "skewed": "tiny:skewed",
    "crashing": "small_zoo:crashing",
    "last": "tiny:conv",
}
SLOW = {"slow": "small_zoo:slow", "last": "tiny:conv"}


def first() -> ModelSpec:
    """Converts."""
    return tiny.of(lambda x: x * 2 + 1, name="first")


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
    from pipeline import convert_all
    from pipeline.cli import main as command_line
    from pipeline.models import MODELS

    MODELS.clear()
    MODELS.update(SLOW if os.environ.get("SMALL_ZOO") == "slow" else ZOO)
    convert_all.PROGRAM = (sys.executable, __file__)
    return command_line()


if __name__ == "__main__":
    sys.exit(main())
