"""The command ``refit ARTIFACT``."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.commands.actions import show_report
from pipeline.commands.options import plugins
from pipeline.machine.progress import Announce


def add_command(add: Callable[..., Any]) -> None:
    """Adds ``refit`` to the command line."""
    sub = add(
        "refit",
        refit,
        "Replace the weights of an artifact's engine, without building it again, and compare it.",
    )
    sub.add_argument("artifact", type=Path, metavar="ARTIFACT", help="Folder of the artifact")
    sub.add_argument(
        "--weights", type=Path, metavar="PATH", required=True,
        help="Take the new weights from a .pth, .pt or .safetensors file, or from a checkpoint's "
        "folder if the model accepts one. For an artifact of an .onnx file or a .pt2 program, pass "
        "that file with the new weights",
    )  # fmt: skip
    sub.add_argument(
        "--trust", action="store_true",
        help="Run the source that the artifact names. Pass it only if you trust that source. "
        "Models that come with pipeline need no --trust",
    )  # fmt: skip
    sub.add_argument(
        "--out", type=Path, metavar="DIR",
        help="Write the result to this folder (default: replace the artifact)",
    )  # fmt: skip
    plugins(sub)


def refit(arguments: argparse.Namespace, announce: Announce) -> int:
    """Runs ``refit``. Returns 0 if the comparison passed, 1 if it did not."""
    from pipeline.convert.refit import Refit
    from pipeline.convert.refit import refit as replace_weights

    how = Refit(out=arguments.out, trust=arguments.trust, plugins=tuple(arguments.plugin))
    report = replace_weights(arguments.artifact, arguments.weights, how, announce)
    return show_report(report, arguments)
