"""The command ``bench ARTIFACT``."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.commands.options import host_code, method, plugins, timing
from pipeline.commands.output import show
from pipeline.errors import InputError

Announce = Callable[[str], None]


def add_command(add: Callable[..., Any]) -> None:
    """Adds ``bench`` to the command line."""
    sub = add(
        "bench",
        bench,
        "Measure the speed and memory of an artifact's engine on this machine's GPU.",
    )
    timing(sub, "Measure")
    sub.add_argument(
        "--graph", action=argparse.BooleanOptionalAction, default=True,
        help="Also measure with a CUDA graph (default: --graph)",
    )  # fmt: skip
    plugins(sub)
    host_code(sub)
    sub.add_argument(
        "--out", type=Path, metavar="FILE", help="Also write the JSON report to this file"
    )


def bench(arguments: argparse.Namespace, announce: Announce) -> int:
    """Runs ``bench``. Returns 0 if every size was measured, 1 if one was not."""
    from pipeline.commands.bench import bench as measuring

    how = method(arguments)
    out: Path | None = arguments.out
    if out is not None and not out.absolute().parent.is_dir():
        raise InputError(
            f"--out {out}: the folder {out.absolute().parent} does not exist. Create it first"
        )
    report = measuring.bench(
        arguments.artifact,
        shapes=arguments.shape,
        method=how,
        graph=arguments.graph,
        announce=announce,
        plugins=arguments.plugin,
        host_code=arguments.host_code,
    )
    if out is not None:
        out.write_text(f"{measuring.report_json(report)}\n", encoding="utf-8")
    show(measuring.report_json(report) if arguments.json else measuring.report_text(report))
    return 0 if report.ok else 1
