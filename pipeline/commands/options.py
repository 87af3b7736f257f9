"""Options that several commands share."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.errors import InputError
from pipeline.machine.target import TARGETS
from pipeline.plugins import PLUGINS
from pipeline.spec.effort import Effort
from pipeline.spec.plan_flags import NO_FLAGS, PlanFlags
from pipeline.spec.precision import AUTO, PRECISIONS

if TYPE_CHECKING:
    from pipeline.commands.bench.measure import Method

_AUTO = (
    ". auto: compute in fp16 where the tolerance allows, and search for the nodes that must stay "
    "in float32"
)


def sizes(sub: Any) -> None:
    """Adds the options on the compared sizes and their memory."""
    sub.add_argument(
        "--shape", action="append", default=[], metavar="DIM=SIZE,...",
        help="Also compare at these sizes. Dims that you leave out use their opt. Repeat for more",
    )  # fmt: skip
    sub.add_argument(
        "--memory-limit", type=size, metavar="SIZE",
        help="Do not compare sizes whose estimated memory is larger, e.g. 16GiB (default: half of "
        "the free memory, at most 6 GiB)",
    )  # fmt: skip


def profiles(sub: Any, *, artifact: bool, builds: bool) -> None:
    """Adds the options on the engine.

    Args:
        sub: The command.
        artifact: Whether the defaults come from the artifact.
        builds: Whether the command builds, so that it can search for a recipe and apply it.
    """
    ranges, precision = ("the artifact's",) * 2 if artifact else ("the source's", "fp32")
    sub.add_argument(
        "--profile", action="append", default=[], metavar="DIM=MIN:OPT:MAX,...",
        help=f"Add an optimisation profile. Repeat for more (default: {ranges})",
    )  # fmt: skip
    sub.add_argument(
        "--precision", choices=(*PRECISIONS, AUTO) if builds else PRECISIONS,
        help=f"Set the engine's precision{_AUTO if builds else ''} (default: {precision})",
    )  # fmt: skip
    if artifact and builds:
        sub.add_argument(
            "--target", metavar="TARGET",
            help="Build an engine for another TensorRT, beside the artifact's own: "
            f"{', '.join(TARGETS)}",
        )  # fmt: skip
    if builds:
        sub.add_argument(
            "--recipe", type=Path, metavar="FILE",
            help="Write half precision as this recipe says, such as the half.recipe of an artifact "
            "(default: the rules of --precision)",
        )  # fmt: skip
        sub.add_argument(
            "--gpu", action="append", default=[], metavar="SM,...",
            help="Build for these GPUs only, such as sm86,sm120. Only TensorRT-RTX can choose "
            "(default: every GPU that it supports except sm75)",
        )  # fmt: skip
        _flags(sub, artifact)


_FLAGS = {
    "version-compatible": "Let newer versions of TensorRT, of the same major version, load the "
    "engine. It then holds code that runs on the CPU, and can be slower",
    "hardware-compatible": "Let all GPUs of compute capability 8.0 and later load the engine. It "
    "can be slower. For TensorRT-RTX, see --gpu",
    "refit": "Let `pipeline refit` replace the engine's weights",
}


def _flags(sub: Any, artifact: bool) -> None:
    """Adds the flags of the plan; `chosen_flags` reads them."""
    for name, text in _FLAGS.items():
        if artifact:
            sub.add_argument(
                f"--{name}", action=argparse.BooleanOptionalAction, default=None,
                help=f"{text} (default: as before)",
            )  # fmt: skip
        else:
            sub.add_argument(f"--{name}", action="store_true", help=text)


def chosen_flags(arguments: argparse.Namespace, before: PlanFlags = NO_FLAGS) -> PlanFlags:
    """Returns the parsed flags of the plan. Those that were not given are as before."""
    names = [name.replace("-", "_") for name in _FLAGS]
    given = {name: getattr(arguments, name, None) for name in names}
    return replace(before, **{name: on for name, on in given.items() if on is not None})


def host_code(sub: Any) -> None:
    """Adds ``--host-code``."""
    sub.add_argument(
        "--host-code", action="store_true",
        help="Let a version-compatible engine run the code that it holds on the CPU. Pass it only "
        "if you trust the engine's author",
    )  # fmt: skip


def effort(sub: Any) -> None:
    """Adds the options on the builder's effort; `chosen_effort` reads them."""
    sub.add_argument(
        "--optimization-level", type=int, metavar="0..5",
        help="Set TensorRT's builder optimisation level (default: TensorRT's own, 3)",
    )  # fmt: skip
    sub.add_argument(
        "--timing-cache", type=Path, metavar="FILE",
        help="Share the builder's timings with other builds (default: the artifact's own cache)",
    )  # fmt: skip


def chosen_effort(arguments: argparse.Namespace) -> Effort:
    """Returns the parsed options of `effort`; the default for a command without them."""
    level = getattr(arguments, "optimization_level", None)
    return Effort(level, getattr(arguments, "timing_cache", None))


def timing(sub: Any, purpose: str) -> None:
    """Adds the artifact, and the options of commands that time its engine; `method` reads them."""
    sub.add_argument("artifact", type=Path, metavar="ARTIFACT", help="Folder of the artifact")
    sub.add_argument(
        "--shape", action="append", default=[], metavar="DIM=SIZE,...",
        help=f"{purpose} at these sizes. Dims that you leave out use their opt. Repeat for more "
        "(default: min, opt and max of every profile)",
    )  # fmt: skip
    sub.add_argument(
        "--repeat", type=int, default=30, metavar="N",
        help="Time at least N calls at each size, for at least one second (default: 30)",
    )  # fmt: skip


def method(arguments: argparse.Namespace) -> Method:
    """Returns how often calls are repeated. Raises `InputError` if they are not."""
    from pipeline.commands.bench.measure import Method

    if arguments.repeat < 1:
        raise InputError(f"--repeat {arguments.repeat} is too small. Pass 1 or more")
    return Method(repeat=arguments.repeat)


def plugins(sub: Any) -> None:
    """Adds the option on plugins."""
    sub.add_argument(
        "--plugin", action="append", default=[], metavar="NAME|FILE",
        help=f"Load a plugin into TensorRT: {', '.join(PLUGINS)}, a shared library, or a Python "
        "file. Repeat for more",
    )  # fmt: skip


def whole_zoo(sub: Any) -> None:
    """Adds the options of ``convert --all``."""
    sub.add_argument(
        "--all", action="store_true", dest="whole_zoo",
        help="Convert every model that comes with pipeline, each in its own process, to --out "
        "DIR/NAME. Print one table, and write DIR/convert.xml for JUnit readers",
    )  # fmt: skip
    sub.add_argument(
        "--time-limit", type=_seconds, metavar="SECONDS",
        help="With --all: stop a model after this many seconds (default: no limit)",
    )  # fmt: skip
    sub.add_argument(
        "--ray", metavar="ADDRESS",
        help="With --all and --store: convert on the nodes of this Ray cluster: auto, local, "
        "HOST:PORT or ray://HOST:PORT. Repeat --target and --gpu to convert for each of them",
    )  # fmt: skip


class Each(argparse.Action):
    """An option with one value that a matrix may repeat: ``targets`` has all of them."""

    def __call__(self, parser: object, namespace: argparse.Namespace, values: Any, *_: Any) -> None:
        del parser
        setattr(namespace, self.dest, values)
        many = f"{self.dest}s"
        setattr(namespace, many, (*getattr(namespace, many, ()), values))


def size(text: str) -> int:
    """Reads ``16GiB``, ``500MB`` or a number of bytes."""
    units = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}
    units |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
    number = text.rstrip("KMGIBkmgib")
    try:
        size = int(float(number) * units[text[len(number) :].upper()])
    except (ValueError, KeyError, OverflowError) as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a size; write for example 16GiB"
        ) from error
    if size <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not positive; write for example 16GiB")
    return size


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of seconds")
    return seconds
