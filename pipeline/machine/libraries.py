"""Installed packages: their names and versions, and imports that fail with a CPU build of torch.

torchvision and transformers are imported even if torchvision's compiled part does not fit torch.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.errors import InputError

if TYPE_CHECKING:
    import torch

# torchvision's compiled part registers these ops. Without it, `import torchvision` fails at their
# fake kernels ("operator torchvision::nms does not exist"). The schemas are torchvision's own.
_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_libraries: list[torch.library.Library] = []  # a library's ops live as long as the object


def import_torchvision() -> None:
    """Imports torchvision; if its compiled ops can't load, declares the two that the import needs.

    The declared ops have no kernel: a model that calls one fails at that call.
    """
    try:
        importlib.import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
        import torch

        for name in [m for m in sys.modules if m.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
        for schema in _SCHEMAS:
            library.define(schema)  # type: ignore[no-untyped-call]
        _libraries.append(library)
        importlib.import_module("torchvision")


def import_transformers() -> Any:
    """Returns the module transformers, which imports torchvision if that is installed.

    Raises:
        InputError: transformers is not installed.
    """
    if not importlib.util.find_spec("transformers"):
        raise InputError("transformers is not installed: pip install 'trt-pipeline[zoo]'")
    if importlib.util.find_spec("torchvision"):
        import_torchvision()
    return importlib.import_module("transformers")


def versions(packages: tuple[str, ...]) -> dict[str, str]:
    """Returns the installed versions by package, without packages that are not installed."""
    from importlib import metadata  # it imports much, and only the versions need it

    found = {}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def packages_by_import() -> Mapping[str, Sequence[str]]:
    """Returns the installed packages by the top-level name that a program imports.

    A list takes 0.2 s, so it is kept until a folder of the path changes.
    """
    return _listed(tuple((folder, _time_of(folder)) for folder in sys.path))


def _time_of(folder: str) -> int:
    try:
        return Path(folder).stat().st_mtime_ns  # an empty one is the current folder
    except OSError:
        return 0


@lru_cache(maxsize=8)  # a source's folder is on the path for a while
def _listed(_: tuple[tuple[str, int], ...]) -> Mapping[str, Sequence[str]]:
    from importlib import metadata

    return metadata.packages_distributions()
