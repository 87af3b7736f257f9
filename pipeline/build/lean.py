"""Finds TensorRT's lean runtime, which a version-compatible plan holds a copy of.

The builder opens ``libnvinfer_lean.so.N`` by that name. The archives of TensorRT have the file. The
wheels of TensorRT lack it: it is in the wheel tensorrt-lean.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from collections.abc import Mapping

from pipeline.errors import InputError
from pipeline.machine.target import Target

_PACKAGES = ("tensorrt_lean", "tensorrt_lean_libs")  # of the wheels up to 8.6, and from 10 on


def lean_folder() -> Mapping[str, str]:
    """Environment variables for the process that builds a version-compatible plan."""
    specs = [importlib.util.find_spec(name) for name in _PACKAGES]
    places = [place for spec in specs if spec for place in spec.submodule_search_locations or ()]
    if not places:
        return {}
    before = os.environ.get("LD_LIBRARY_PATH")
    return {"LD_LIBRARY_PATH": os.pathsep.join([*places, *filter(None, (before,))])}


def need_lean(target: Target, version: str) -> None:
    """Raises `InputError` if this process can't open the lean runtime."""
    if sys.platform != "linux":  # only the names on Linux are known here
        return
    name = f"libnvinfer_lean.so.{target.version[0]}"
    try:
        ctypes.CDLL(name)
    except OSError:
        raise InputError(
            f"target {target}: --version-compatible needs {name}, which is not installed here; "
            f"pip install 'tensorrt-lean=={version}'"
        ) from None
