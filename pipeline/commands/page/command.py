"""The command ``report ARTIFACT``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.commands.output import show


def add_command(add: Callable[..., Any]) -> None:
    """Adds ``report`` to the command line."""
    sub = add(
        "report",
        report,
        "Write what is known of an artifact as one HTML file, which loads nothing from elsewhere.",
    )
    sub.add_argument("artifact", type=Path, metavar="ARTIFACT", help="Folder of the artifact")
    sub.add_argument(
        "--out", type=Path, metavar="FILE",
        help="Write to this file (default: NAME-report.html in the current folder)",
    )  # fmt: skip
    sub.add_argument(
        "--bench", type=Path, metavar="FILE",
        help="Also show the latencies in this file of pipeline bench --out",
    )  # fmt: skip


def report(arguments: argparse.Namespace, announce: Callable[[str], None]) -> int:
    """Runs ``report``. Returns 0: the file is written, whatever the comparison says."""
    from pipeline.artifact.artifact import Artifact
    from pipeline.commands.page.page import write_page

    del announce
    artifact = Artifact.open(arguments.artifact)
    file = write_page(artifact, arguments.out, arguments.bench)
    show(json.dumps({"file": str(file)}) if arguments.json else f"report: {file}")
    return 0
