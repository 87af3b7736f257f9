"""The command ``view``, which shows a graph in Netron."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.commands.output import show
from pipeline.errors import InputError
from pipeline.machine.interrupts import usual_end
from pipeline.spec.file_names import EXPORTED, MODEL


def add_command(add: Callable[..., Any]) -> None:
    """Adds ``view`` to the command line."""
    sub = add("view", view, "Show the ONNX graph of an artifact, or an ONNX file, in Netron.")
    sub.add_argument("source", type=Path, metavar="ARTIFACT|FILE.onnx", help="What to show")
    sub.add_argument(
        "--exported", action="store_true",
        help=f"Show the artifact's {EXPORTED}, as it was before the rewrite",
    )  # fmt: skip
    sub.add_argument(
        "--no-browser", action="store_true", help="Print the address, and open no browser"
    )


def view(arguments: argparse.Namespace, announce: Callable[[str], None]) -> int:
    """Runs ``view`` until Ctrl-C, its usual end."""
    del announce
    try:
        import netron
    except ImportError as error:
        raise InputError("view needs Netron, which is not installed: pip install netron") from error
    file: Path = arguments.source
    if file.is_dir():
        from pipeline.artifact.artifact import Artifact

        file = Artifact.open(file, built=False).path / (EXPORTED if arguments.exported else MODEL)
    if not file.is_file():
        raise InputError(f"{file}: no such file")
    with usual_end():
        with contextlib.redirect_stdout(sys.stderr):  # Netron prints its own line
            host, port = netron.start(str(file), browse=not arguments.no_browser)
        url = f"http://{host}:{port}"
        show(json.dumps({"url": url}) if arguments.json else f"{file} is at {url}. Ctrl-C ends it")
        sys.stdout.flush()  # a pipe's reader needs the address now
        netron.wait()
    return 0
