"""Finds the rewrite passes and plugins that installed packages offer, by name.

A package offers a file in its ``pyproject.toml``. The value is a module, whose file is used, or an
attribute that holds the path of a library:

    [project.entry-points."trt_pipeline.passes"]
    my_pass = "my_package.my_pass"

    [project.entry-points."trt_pipeline.plugins"]
    my_op = "my_package:LIBRARY"
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.errors import InputError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

PASSES, PLUGINS = "trt_pipeline.passes", "trt_pipeline.plugins"


def offered_names(group: str) -> list[str]:
    """The names that installed packages offer in a group, `PASSES` or `PLUGINS`."""
    return sorted({point.name for point in _offered(group)})


def offered_file(group: str, name: str) -> Path | None:
    """The file that an installed package offers under a name; None if there is none.

    Args:
        group: `PASSES` or `PLUGINS`.
        name: the name of the entry point.

    Raises:
        InputError: two packages offer different files, or the file can't be found.
    """
    points = {point.value: point for point in _offered(group) if point.name == name}
    if len(points) > 1:
        packages = " and ".join(sorted({p.dist.name for p in points.values() if p.dist}))
        raise InputError(f"{name}: {packages} both offer it ({group}). Pass the file instead")
    return next((_file(point) for point in points.values()), None)


def _offered(group: str) -> Sequence[EntryPoint]:
    from importlib.metadata import entry_points  # it imports much, and the help does not need it

    return tuple(entry_points(group=group))


def _file(point: EntryPoint) -> Path:
    try:
        if point.attr:
            return Path(point.load())
        spec = importlib.util.find_spec(point.module)
    except Exception as error:  # the package's own code runs
        raise InputError(f"{point.name}: {point.value}: {type(error).__name__}: {error}") from error
    if spec is None or spec.origin is None:
        raise InputError(f"{point.name}: the module {point.module} has no file")
    return Path(spec.origin)
