"""Importing torchvision beside a torch that its compiled part does not fit (a CPU build)."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# Its compiled part registers these; without it `import torchvision` fails at their fake
# kernels ("operator torchvision::nms does not exist"). The schemas are torchvision's own.
_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_libraries: list[torch.library.Library] = []  # a library's ops live as long as the object


def import_torchvision() -> None:
    """Imports torchvision; where its compiled ops can't load, declares the two it stumbles over.

    The ops stay without a kernel: a model that calls them fails where it does.
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


def versions(packages: tuple[str, ...]) -> dict[str, str]:
    """Installed versions by package; packages that are not installed are left out."""
    found = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
