"""Finds TensorRT's lean runtime, which a version-compatible plan holds a copy of.

The builder of 8.6.0 opens ``libnvinfer_lean.so.8.6.0``, by that name. The archives of TensorRT have
such a file. The wheels of TensorRT lack it: it is in the wheel tensorrt-lean, as
``libnvinfer_lean.so.8``.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from pipeline.errors import InputError
from pipeline.machine.target import Target

_PACKAGES = ("tensorrt_lean", "tensorrt_lean_libs")  # of the wheels up to 8.6, and from 10 on


def lean_library(target: Target, version: str, folder: Path) -> Mapping[str, str]:
    """Environment variables for the process that builds a version-compatible plan.

    Args:
        target: The TensorRT that builds.
        version: Its version, such as ``8.6.0``.
        folder: Gets links to the library of an installed wheel, with the long name and the short.
    """
    short, long = _names(target, version)
    specs = [importlib.util.find_spec(name) for name in _PACKAGES]
    places = [place for spec in specs if spec for place in spec.submodule_search_locations or ()]
    found = [file for place in places if (file := Path(place, short)).is_file()]
    if not found:
        return {}
    for name in (short, long):
        (folder / name).symlink_to(found[0])
    before = os.environ.get("LD_LIBRARY_PATH")
    return {"LD_LIBRARY_PATH": os.pathsep.join([str(folder), *filter(None, (before,))])}


def need_lean(target: Target, version: str) -> None:
    """Raises `InputError` if this process can't open the lean runtime."""
    if sys.platform != "linux":  # only the names on Linux are known here
        return
    _, name = _names(target, version)
    try:
        ctypes.CDLL(name)
    except OSError:
        raise InputError(
            f"target {target}: --version-compatible needs {name}, which is not installed here; "
            f"pip install 'tensorrt-lean=={version}'"
        ) from None


def _names(target: Target, version: str) -> tuple[str, str]:
    """The library's file names: with the major version, and with the whole one."""
    stem = "libnvinfer_lean.so."
    return f"{stem}{target.version[0]}", stem + ".".join(re.findall(r"\d+", version)[:3])
