"""Tells whose code a file holds: a user's, a model library's, or none that a message names."""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec
from pathlib import Path

_STANDARD = str(Path(os.__file__).parent) + os.sep
_PACKAGES = ("site-packages", "dist-packages")
_PIPELINE = str(Path(__file__).parents[1]) + os.sep
_ZOO = _PIPELINE + "models" + os.sep
_MADE = ("<frozen", "<eval_with_key", "<string")  # of Python, of torch.fx, of dataclasses


def is_standard(file: str) -> bool:
    """True for the standard library."""
    return file.startswith(_STANDARD) and not is_installed(file)


def is_installed(file: str) -> bool:
    """True for an installed package."""
    return any(f"{os.sep}{part}{os.sep}" in file for part in _PACKAGES)


def is_own(file: str) -> bool:
    """True for a user's code, also code of a shell, and for the models that come with pipeline."""
    if file.startswith(_MADE) or is_standard(file) or is_installed(file):
        return False
    return file.startswith(_ZOO) or not file.startswith(_PIPELINE)


@cache
def is_model_file(file: str) -> bool:
    """True for a user's code and for libraries of models, but not for torch."""
    if is_installed(file):
        return not file.startswith(_frameworks())
    return is_own(file)


@cache
def is_framework(file: str) -> bool:
    """True for torch, for what it computes with, and for this package without its models."""
    return file.startswith(_frameworks()) or (
        file.startswith(_PIPELINE) and not file.startswith(_ZOO)
    )


@cache
def _frameworks() -> tuple[str, ...]:
    """The folders of torch and of what it computes with."""
    specs = (find_spec(name) for name in ("torch", "sympy", "numpy", "onnxscript"))
    return tuple(str(Path(s.origin).parent) + os.sep for s in specs if s and s.origin)
