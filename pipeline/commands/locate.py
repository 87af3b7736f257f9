"""The command ``locate ARTIFACT``."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.commands.options import plugins
from pipeline.commands.output import show
from pipeline.machine.progress import Announce


def add_command(add: Callable[..., Any]) -> None:
    """Adds ``locate`` to the command line."""
    sub = add(
        "locate",
        locate,
        "Find the first node at which an artifact's engine differs from ONNX Runtime.",
    )
    sub.add_argument("artifact", type=Path, metavar="ARTIFACT", help="Folder of the artifact")
    sub.add_argument(
        "--shape", default="", metavar="DIM=SIZE,...",
        help="Compare at these sizes. Dims that you leave out use their opt (default: the first "
        "profile's opt)",
    )  # fmt: skip
    plugins(sub)


def locate(arguments: argparse.Namespace, announce: Announce) -> int:
    """Runs ``locate``. Returns 0 if the engine agrees, 1 if it does not."""
    import json

    from pipeline.compare.divergence.engine import locate_engine

    agrees, text = locate_engine(
        arguments.artifact, arguments.shape, announce, tuple(arguments.plugin)
    )
    show(json.dumps({"agrees": agrees, "found": text}) if arguments.json else text)
    return 0 if agrees else 1
