"""The command ``tune ARTIFACT``."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.commands.options import method, plugins, timing
from pipeline.commands.output import show
from pipeline.commands.table import table
from pipeline.errors import InputError
from pipeline.machine.progress import Announce
from pipeline.spec.dims import sizes_text
from pipeline.spec.file_names import TUNING

if TYPE_CHECKING:
    from pipeline.commands.tune.tune import Tuning

_WIDTH = 60  # characters of a reason in the table


def add_command(add: Callable[..., Any]) -> None:
    """Adds ``tune`` to the command line."""
    sub = add(
        "tune",
        tune,
        "Try other builds of an artifact's engine on this machine's GPU, and keep the fastest one "
        "whose results are right.",
    )
    timing(sub, "Be fast")
    sub.add_argument(
        "--minutes", type=float, default=30.0, metavar="N",
        help="Begin no build after N minutes, stop one that still runs, and keep the best so far "
        "(default: 30)",
    )  # fmt: skip
    plugins(sub)


def tune(arguments: argparse.Namespace, announce: Announce) -> int:
    """Runs ``tune``. Returns 0 if a right engine was kept, 1 if none was right."""
    from pipeline.commands.tune import tune as tuning

    how = method(arguments)
    if not 0 < arguments.minutes < math.inf:
        raise InputError(f"--minutes {arguments.minutes:g} is not a positive number of minutes")
    done = tuning.tune(
        arguments.artifact,
        shapes=arguments.shape,
        minutes=arguments.minutes,
        method=how,
        plugins=arguments.plugin,
        announce=announce,
    )
    show(done.to_json().rstrip() if arguments.json else report_text(done, arguments.artifact))
    return 0 if done.ok else 1


def report_text(done: Tuning, place: Path) -> str:
    """The table, and below it what was kept."""
    right = [trial for trial in done.trials if trial.times]
    version = f" {done.version}" if done.version else ""
    head = f"{done.name}, {done.precision}, {done.target}{version} on {done.gpu}"
    sizes = [sizes_text(time.sizes) or "fixed" for time in right[0].times] if right else []
    rows = [("build", *(f"ms, {text}" for text in sizes), "build s", "what differs")]
    for trial in done.trials:
        mark = "* " if trial.name == done.kept else "  "
        times = [f"{time.ms:.3f}{'' if time.graph else ' (no graph)'}" for time in trial.times]
        seconds = "-" if trial.build_s is None else f"{trial.build_s:.0f}"
        rows.append(
            (f"{mark}{trial.name}", *(times or ["-"] * len(sizes)), seconds,
             f"not kept: {trial.why}"[:_WIDTH] if trial.why else trial.text)
        )  # fmt: skip
    lines = [head, "milliseconds of one call on the GPU, with a CUDA graph where there is one", ""]
    lines += [table(rows), "", _outcome(done, place)]
    if not done.complete:
        lines.append("the time was over before everything was tried. To try more: --minutes")
    return "\n".join(lines)


def _outcome(done: Tuning, place: Path) -> str:
    if not done.kept:
        return f"no engine was right, so {place} is unchanged. {TUNING} was not written"
    kept = next(trial for trial in done.trials if trial.name == done.kept)
    first = done.trials[0]
    if kept is first or not first.times:
        return f"kept: {done.kept}. {place / TUNING} has the table"
    shares = [a.ms / b.ms for a, b in zip(first.times, kept.times, strict=True)]
    factor = math.exp(sum(map(math.log, shares)) / len(shares))
    return (
        f"kept: {done.kept}, {factor:.2f} times as fast as the engine before. "
        f"{place / TUNING} has the table"
    )
