"""Which TensorRT a conversion is for, and whether it is installed here.

The only place that knows how the flavours of TensorRT differ in name and in how they are
imported. Polygraphy reads ``POLYGRAPHY_USE_TENSORRT_RTX`` once, when it is imported; `use`
sets it, and is called before any import of Polygraphy.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import re
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Literal

from pipeline.errors import InputError, TargetMissing

Flavour = Literal["tensorrt", "tensorrt_rtx"]


@dataclass(frozen=True)
class Target:
    """A TensorRT that results can be for.

    Args:
        name: as the user writes it.
        flavour: the Python module's name.
        version: leading numbers of the versions that it covers.
        strongly_typed: precision stands in the ONNX graph only; there are no precision flags.
        max_opset: the highest ONNX opset that its parser reads as the standard says.
        get: how to install it.
    """

    name: str
    flavour: Flavour
    version: tuple[int, ...]
    strongly_typed: bool
    max_opset: int
    get: str

    def __str__(self) -> str:
        return self.name


# 8.6 documents opset 17, and reads newer ones silently wrong (onnx-tensorrt 8.6 ModelImporter:
# axes as inputs of Reduce*-18). 10 and later read 18 right; GridSample-20 is wrong up to 11.1
# (NVIDIA/TensorRT#4646), so no target goes beyond 19 here.
TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        Target("rtx-1.7", "tensorrt_rtx", (1, 7), True, 19, "pip install 'tensorrt-rtx~=1.7.0'"),
        Target("tensorrt-8.6", "tensorrt", (8, 6), False, 17, "pip install 'tensorrt==8.6.*'"),
        Target("tensorrt-10", "tensorrt", (10,), False, 19, "pip install 'tensorrt==10.*'"),
        Target("tensorrt-11", "tensorrt", (11,), True, 19, "pip install 'tensorrt==11.*'"),
    )
}
DEFAULT_TARGET = "rtx-1.7"
_ELSEWHERE = (
    ", or build on a machine that has it: `pipeline export`, `pipeline rewrite` and "
    "`pipeline verify --torch` need none (docs/guide/gpu-machine.md)"
)


def find_target(name: str) -> Target:
    """The target of that name.

    Raises:
        InputError: there is none; the known ones are listed.
    """
    if name not in TARGETS:
        raise InputError(f"unknown target {name!r}; known: {', '.join(TARGETS)}")
    return TARGETS[name]


def installed_version(target: Target) -> str | None:
    """Version of the target's TensorRT as installed here (by its package's metadata), or None."""
    try:
        return importlib.metadata.version(target.flavour)
    except importlib.metadata.PackageNotFoundError:
        pass
    # TensorRT unpacked from an archive has a module but no package metadata
    try:
        module = importlib.import_module(target.flavour)
    except ImportError:
        return None
    return str(module.__version__)


def require(target: Target) -> str:
    """The installed version of the target's TensorRT.

    Raises:
        TargetMissing: it is not installed, or in another version.
    """
    version = installed_version(target)
    if version is None:
        raise TargetMissing(
            f"target {target}: {target.flavour} is not installed here; {target.get}{_ELSEWHERE}"
        )
    numbers = tuple(int(n) for n in re.findall(r"\d+", version)[: len(target.version)])
    if numbers != target.version:
        raise TargetMissing(
            f"target {target}: {target.flavour} {version} is installed here, not "
            f"{'.'.join(map(str, target.version))}; {target.get}{_ELSEWHERE}"
        )
    return version


def bind_polygraphy(target: Target) -> None:
    """Makes Polygraphy use the target's flavour, if it was not imported for another one before.

    ONNX Runtime and the comparisons work either way; `use` insists.
    """
    if "polygraphy.config" not in sys.modules:
        os.environ["POLYGRAPHY_USE_TENSORRT_RTX"] = _flag(target)


def use(target: Target) -> ModuleType:
    """Imports the target's TensorRT and makes Polygraphy use the same one.

    Raises:
        TargetMissing: see `require`; also where it is installed but can't be imported.
        InputError: Polygraphy is already tied to the other flavour in this process.
    """
    require(target)
    bind_polygraphy(target)
    config = importlib.import_module("polygraphy.config")
    if bool(config.USE_TENSORRT_RTX) is not (target.flavour == "tensorrt_rtx"):
        raise InputError(
            f"target {target}: Polygraphy was imported for the other flavour of TensorRT in this "
            "process; start a new one"
        )
    try:
        return importlib.import_module(target.flavour)
    except (ImportError, OSError) as error:
        raise TargetMissing(
            f"target {target}: {target.flavour} is installed but does not import: {error}"
        ) from error


def _flag(target: Target) -> str:
    return "1" if target.flavour == "tensorrt_rtx" else "0"


@dataclass(frozen=True)
class Versions:
    """A range of versions of one flavour of TensorRT: ``since <= version < below``.

    Args:
        basis: how it is known: ``measured`` on a version in the range, ``read`` in its source or
            in reports of others, or ``assumed`` (the parser is built from the same source).
    """

    flavour: Flavour
    since: tuple[int, ...] = ()
    below: tuple[int, ...] | None = None
    basis: Literal["measured", "read", "assumed"] = "measured"

    def covers(self, target: Target) -> bool:
        return (
            target.flavour == self.flavour
            and target.version >= self.since
            and (self.below is None or target.version < self.below)
        )

    def __str__(self) -> str:
        since = f" from {_dotted(self.since)}" if self.since else ""
        below = f" below {_dotted(self.below)}" if self.below else ""
        basis = "" if self.basis == "measured" else f" ({self.basis})"
        return f"{self.flavour}{since}{below}{basis}"


# the ranges that most passes share; below 10 is measured on 8.6.0 (`cases/measured.json`); the
# parsers of RTX 1.7 and of TensorRT 10 and 11 are built from one source, and 10 and 11 could not
# be tried here
BELOW_10 = Versions("tensorrt", below=(10,))


FROM_10 = Versions("tensorrt", since=(10,), basis="assumed")


RTX = Versions("tensorrt_rtx")


EVERY = (RTX, FROM_10, BELOW_10)


# for what no machine without a GPU can show
EVERY_READ = (
    Versions("tensorrt_rtx", basis="read"),
    Versions("tensorrt", basis="read"),
)


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
