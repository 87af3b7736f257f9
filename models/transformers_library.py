"""Imports transformers, which imports torchvision if that is installed."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from pipeline.errors import InputError
from pipeline.machine.libraries import import_torchvision


def import_transformers() -> Any:
    """Returns the module transformers; works with a CPU build of torch.

    Raises:
        InputError: transformers is not installed.
    """
    if not importlib.util.find_spec("transformers"):
        raise InputError("transformers is not installed: pip install 'trt-pipeline[zoo]'")
    if importlib.util.find_spec("torchvision"):
        import_torchvision()
    return importlib.import_module("transformers")
