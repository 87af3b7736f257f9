"""The versions of TensorRT that a conversion can be for, and whether they are installed here.

Only this module knows how the flavours of TensorRT differ in name and import. Polygraphy reads
``POLYGRAPHY_USE_TENSORRT_RTX`` once, when it is imported. `use` sets it, so call `use` before any
import of Polygraphy.
"""

from __future__ import annotations

import importlib
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
    """A TensorRT that a conversion can be for.

    Args:
        name: the name that the user writes.
        flavour: the Python module's name.
        version: the leading numbers of the versions that the target covers.
        strongly_typed: whether only the ONNX graph sets the precision, without precision flags.
        max_opset: the highest ONNX opset that the parser reads according to the standard.
        get: the command that installs it.
    """

    name: str
    flavour: Flavour
    version: tuple[int, ...]
    strongly_typed: bool
    max_opset: int
    get: str

    def __str__(self) -> str:
        return self.name

    @property
    def has_bf16(self) -> bool:
        """Whether it computes in bfloat16: TensorRT from version 9 on, and TensorRT-RTX."""
        return self.flavour == "tensorrt_rtx" or self.version >= (9,)


# 8.6 documents opset 17, and silently misreads newer ones (onnx-tensorrt 8.6 ModelImporter: axes
# as inputs of Reduce*-18). 10 and later read 18 correctly. GridSample-20 is wrong up to 11.1
# (NVIDIA/TensorRT#4646), so no target goes beyond 19.
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
    "`pipeline verify --torch` need no TensorRT (docs/guide/gpu-machine.md)"
)


def find_target(name: str) -> Target:
    """Returns the target of that name.

    Raises:
        InputError: the name is unknown; the message lists the known ones.
    """
    if name not in TARGETS:
        raise InputError(f"unknown target {name!r}; known: {', '.join(TARGETS)}")
    return TARGETS[name]


def installed_version(target: Target) -> str | None:
    """The installed version of the target's TensorRT (by its package's metadata), or None."""
    from importlib import metadata  # it imports much, and the help needs the targets only

    try:
        return metadata.version(target.flavour)
    except metadata.PackageNotFoundError:
        pass
    # TensorRT unpacked from an archive has a module but no package metadata
    try:
        module = importlib.import_module(target.flavour)
    except ImportError:
        return None
    return str(module.__version__)


def require(target: Target) -> str:
    """Returns the installed version of the target's TensorRT.

    Raises:
        TargetMissing: TensorRT is not installed, or in another version.
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
    """Makes Polygraphy use the target's flavour, unless Polygraphy is already imported.

    ONNX Runtime and the comparisons work with either flavour; `use` raises if it is the wrong one.
    """
    if "polygraphy.config" not in sys.modules:
        os.environ["POLYGRAPHY_USE_TENSORRT_RTX"] = _flag(target)


def use(target: Target) -> ModuleType:
    """Imports the target's TensorRT and makes Polygraphy use the same one.

    Raises:
        TargetMissing: see `require`; or TensorRT is installed but can't be imported.
        InputError: Polygraphy was already imported for the other flavour in this process.
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
            f"target {target}: {target.flavour} is installed but can't be imported: {error}"
        ) from error


def _flag(target: Target) -> str:
    return "1" if target.flavour == "tensorrt_rtx" else "0"


@dataclass(frozen=True)
class Versions:
    """A range of versions of one flavour of TensorRT: ``since <= version < below``.

    Args:
        basis: how the range is known: ``measured`` on a version in the range, ``read`` in the
            source or in reports, or ``assumed`` (the parser is built from the same source).
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


# The ranges that most passes share. Below 10, 8.6.0 was measured (`cases/measured.json`). TensorRT
# 10 and 11 could not be tested; their parsers are built from the same source as RTX 1.7's.
BELOW_10 = Versions("tensorrt", below=(10,))


FROM_10 = Versions("tensorrt", since=(10,), basis="assumed")


RTX = Versions("tensorrt_rtx")


EVERY = (RTX, FROM_10, BELOW_10)


# for facts that only a machine with a GPU can show
EVERY_READ = (
    Versions("tensorrt_rtx", basis="read"),
    Versions("tensorrt", basis="read"),
)


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
