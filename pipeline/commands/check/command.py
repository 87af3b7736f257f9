"""The commands ``check SOURCE`` and ``convert --all``, and the options of ``verify``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.errors import InputError

if TYPE_CHECKING:
    from pipeline.commands.check.check import CheckReport
    from pipeline.spec.config import Config

Announce = Callable[[str], None]

# options of ``convert`` that are for one model only
_OF_ONE = (
    "weights", "option", "input", "dim", "exact_dims", "tolerance", "engine_tolerance", "profile",
    "shape", "plugin",
)  # fmt: skip


def all_options(sub: Any) -> None:
    """Adds the options for the whole zoo to ``convert``."""
    sub.add_argument(
        "--all", action="store_true", dest="whole_zoo",
        help="every model of the zoo, each in a process of its own, into --out DIR/NAME (default: "
        "artifacts/NAME); one table, and DIR/convert.xml for JUnit readers",
    )  # fmt: skip
    sub.add_argument(
        "--time-limit", type=_seconds, metavar="SECONDS", help="of --all: end a model after these"
    )


def verify_options(sub: Any) -> None:
    """Adds the options that ``verify`` alone has."""
    from pipeline.commands.source_options import engine_tolerance

    sub.add_argument(
        "--against", type=Path, metavar="OLD", help="regression check against another artifact"
    )
    sub.add_argument(
        "--torch", action="store_true", help="run the torch model again, not its stored outputs"
    )
    sub.add_argument("--weights", type=Path, metavar="FILE", help="for --torch")
    engine_tolerance(sub)


def convert_all(arguments: argparse.Namespace, announce: Announce) -> int:
    """``convert --all``: 0 if every model is converted, 1 if one failed."""
    from pipeline.commands.convert_all import REPORT, convert_all, results_table
    from pipeline.machine.target import find_target, require
    from pipeline.models import MODELS

    if arguments.model is not None:
        raise InputError(f"--all converts every model: leave {arguments.model} out, or --all")
    for name in _OF_ONE:
        if getattr(arguments, name):
            raise InputError(f"--{name.replace('_', '-')} is for one model: not with --all")
    require(find_target(arguments.target))
    parent: Path = arguments.out or Path("artifacts")
    results = convert_all(
        list(MODELS),
        parent,
        _passed_on(arguments),
        time_limit=arguments.time_limit,
        announce=announce,
    )
    if arguments.json:
        print(json.dumps([asdict(result) for result in results], indent=2))
    else:
        print(results_table(results))
        print(f"{parent / REPORT}: the same for JUnit readers")
    return 1 if any(result.state == "FAILED" for result in results) else 0


def _passed_on(arguments: argparse.Namespace) -> list[str]:
    """The words that every model's own ``convert`` gets."""
    words = ["--target", arguments.target, "--seed", str(arguments.seed)]
    if arguments.precision:
        words += ["--precision", arguments.precision]
    if arguments.memory_limit:
        words += ["--memory-limit", str(arguments.memory_limit)]
    for flag, values in (("--skip", arguments.skip), ("--pass", arguments.own)):
        for value in values:
            words += [flag, str(value)]
    return words + ["--force"] * arguments.force


def check(config: Config, arguments: argparse.Namespace, announce: Announce) -> int:
    """``check``: 0 if nothing stands in the way of a conversion, 1 if something does."""
    from pipeline.commands.check.check import check as checked

    report = checked(config, announce)
    if arguments.json:
        print(json.dumps({"ok": report.ok, **asdict(report)}, indent=2))
    else:
        print(check_text(report))
    return 0 if report.ok else 1


def check_text(report: CheckReport) -> str:
    """The report by its sections; what stands in the way is marked with an exclamation mark."""
    from pipeline.commands.check.check import SECTIONS

    lines = [f"{report.name}, for {report.target}"]
    for section in SECTIONS:
        lines += ["", section]
        for finding in report.findings:
            if finding.section == section:
                lines.append(f"{'!' if finding.blocks else ' '} {finding.what}")
                lines += [f"    at: {finding.where}"] if finding.where else []
                lines += [f"    do: {finding.do}"] if finding.do else []
    count = sum(finding.blocks for finding in report.findings)
    things = (
        "1 thing stands"
        if count == 1
        else f"{count or 'nothing'} {'things stand' if count else 'stands'}"
    )
    return "\n".join([*lines, "", f"{things} in the way"])


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds")
    return seconds
