"""Options that several commands share."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from pipeline.plugins import PLUGINS
from pipeline.spec.effort import Effort
from pipeline.spec.precision import PRECISIONS


def sizes(sub: Any) -> None:
    """Where to compare, and with how much memory."""
    sub.add_argument(
        "--shape", action="append", default=[], metavar="DIM=SIZE,...",
        help="also compare at these sizes; dims left out take their opt",
    )  # fmt: skip
    sub.add_argument(
        "--memory-limit", type=_bytes, metavar="SIZE",
        help="leave sizes out whose run needs more by its estimate, e.g. 16GiB "
        "(default: half of the free memory, at most 6 GiB)",
    )  # fmt: skip


def profiles(sub: Any) -> None:
    """What the engine is built for."""
    sub.add_argument(
        "--profile", action="append", default=[], metavar="DIM=MIN:OPT:MAX,...",
        help="an optimisation profile; give it several times for several (default: the source's; "
        "of an artifact, those it has, from its last build)",
    )  # fmt: skip
    sub.add_argument(
        "--precision", choices=PRECISIONS,
        help="default: fp32; of an artifact, the one it has, from its last build",
    )  # fmt: skip


def effort(sub: Any) -> None:
    """How hard the builder tries; `chosen_effort` reads it."""
    sub.add_argument(
        "--optimization-level", type=int, metavar="0..5",
        help="how hard TensorRT's builder tries (default: its own, 3)",
    )  # fmt: skip
    sub.add_argument(
        "--timing-cache", type=Path, metavar="FILE",
        help="share the builder's timings with other builds (default: the artifact's own)",
    )  # fmt: skip


def chosen_effort(arguments: argparse.Namespace) -> Effort:
    """What `effort`'s options say; the default for a command without them."""
    level = getattr(arguments, "optimization_level", None)
    return Effort(level, getattr(arguments, "timing_cache", None))


def plugins(sub: Any) -> None:
    """What TensorRT loads."""
    sub.add_argument(
        "--plugin", action="append", default=[], metavar="NAME|FILE",
        help=f"a plugin for TensorRT: {', '.join(PLUGINS)}, a library, or a Python file",
    )  # fmt: skip


def whole_zoo(sub: Any) -> None:
    """Every model of the zoo: ``convert --all``."""
    sub.add_argument(
        "--all", action="store_true", dest="whole_zoo",
        help="every model of the zoo, each in a process of its own, into --out DIR/NAME (default: "
        "artifacts/NAME); one table, and DIR/convert.xml for JUnit readers",
    )  # fmt: skip
    sub.add_argument(
        "--time-limit", type=_seconds, metavar="SECONDS", help="of --all: end a model after these"
    )


def _bytes(text: str) -> int:
    """``16GiB``, ``500MB`` or a number of bytes."""
    units = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}
    units |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
    number = text.rstrip("KMGIBkmgib")
    try:
        size = int(float(number) * units[text[len(number) :].upper()])
    except (ValueError, KeyError, OverflowError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no size such as 16GiB") from error
    if size <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} must be positive")
    return size


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds")
    return seconds
