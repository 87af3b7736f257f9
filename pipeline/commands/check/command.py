"""The command ``check SOURCE``, and the options of ``verify``."""

from __future__ import annotations

import argparse
import contextlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.commands.output import show
from pipeline.commands.source_options import engine_tolerance
from pipeline.errors import PipelineError
from pipeline.machine.progress import Announce

if TYPE_CHECKING:
    from pipeline.spec.config import Config


def verify_options(sub: Any) -> None:
    """Adds the options that only ``verify`` has."""

    sub.add_argument(
        "--against", type=Path, metavar="OLD",
        help="Also report what got worse compared with the artifact OLD",
    )  # fmt: skip
    sub.add_argument(
        "--torch", action="store_true",
        help="Run the torch model again, instead of reading its stored outputs",
    )  # fmt: skip
    sub.add_argument(
        "--weights", type=Path, metavar="FILE", help="With --torch: load weights from this file"
    )
    sub.add_argument(
        "--trust", action="store_true",
        help="With --torch: run the source that the artifact names. Pass it only if you trust that "
        "source. Models that come with pipeline need no --trust",
    )  # fmt: skip
    engine_tolerance(sub)


def add_everything(error: PipelineError, config: Config, announce: Announce) -> None:
    """Lists in an error all that stops the conversion, as ``check`` does.

    A conversion ends at the first thing that stops it.
    """
    from pipeline.commands.check.check import check as checked
    from pipeline.convert.findings import blocked_text

    announce("look for everything that stops the conversion")
    with contextlib.suppress(PipelineError):
        report = checked(config, announce)
        stops = [finding for finding in report.findings if finding.blocks]
        if stops:
            error.more = blocked_text(error, stops)


def check(config: Config, arguments: argparse.Namespace, announce: Announce) -> int:
    """Runs ``check``. Returns 0 if a conversion can start, 1 if a finding blocks it."""
    from pipeline.commands.check.check import check as checked

    report = checked(config, announce)
    if arguments.json:
        show(json.dumps({"ok": report.ok, **asdict(report)}, indent=2))
    else:
        show(str(report))
    return 0 if report.ok else 1
