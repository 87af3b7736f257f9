"""``convert --all``: converts every model that comes with pipeline, one after the other.

Each model has its own process. torch keeps state between exports: a second LSTM gets a static time.
A crash also ends one model only. Unchanged models are skipped, so an interrupted run continues. The
JUnit file is written after each model.
"""

from __future__ import annotations

import argparse
import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from pipeline.artifact.manifest import Manifest, now
from pipeline.commands.output import show
from pipeline.commands.table import table
from pipeline.compare.run_names import in_precision
from pipeline.convert.driver import run
from pipeline.errors import InputError, PipelineError
from pipeline.machine import interrupts
from pipeline.machine.child import Child, ChildDied, ChildFailed, ChildLate
from pipeline.machine.files import write_whole
from pipeline.machine.progress import Announce
from pipeline.machine.resources import Stopwatch
from pipeline.machine.target import find_target, require
from pipeline.models import MODELS
from pipeline.spec.config import Config
from pipeline.store.entry import Entry

REPORT = "convert.xml"
HEAD = (
    "result", "seconds", "compared at", "largest error", "of the largest value", "tolerance",
    "engine",
)  # fmt: skip
_GRACE = 20.0  # seconds for an interrupted conversion to clean up
_NO_XML = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
# options of ``convert`` that fit one model only
_OF_ONE = (
    "weights", "option", "input", "inputs", "dim", "range", "rule", "exact_dims", "allow_narrow",
    "search_seconds", "dtype", "tolerance", "engine_tolerance", "reference", "profile", "recipe",
    "shape", "plugin",
)  # fmt: skip


@dataclass(frozen=True)
class ModelResult:
    """The result of one model.

    Args:
        model: The model's name.
        state: ``unchanged`` means that the artifact was up to date.
        seconds: The running time of the process.
        error: The error in one line; empty if the model did not fail.
        detail: The longer text of the error: all problems, a traceback, or the end of stderr of a
            process that died.
        points: The number of compared sets of sizes.
        left_out: The number of sets of sizes that were not compared, because of their memory.
        max_abs: The largest difference in the output that is nearest to its tolerance. None
            without floating-point outputs.
        max_rel: `max_abs` divided by the largest value of that output.
        rtol, atol: The tolerance of that output.
        plan_bytes: The size of the engine in bytes.
        pulled: The stages whose results came from the store.
        entry: The key of the artifact in the store; empty without a store.
        entry_file: The name of the entry's file in the store; empty without a store.
        not_pushed: Why the artifact is not in the store; empty if it is there.
    """

    model: str
    state: Literal["ok", "unchanged", "FAILED", "not reached"] = "not reached"
    seconds: float = 0.0
    error: str = ""
    detail: str = ""
    points: int | None = None
    left_out: int = 0
    max_abs: float | None = None
    max_rel: float | None = None
    rtol: float | None = None
    atol: float | None = None
    plan_bytes: int | None = None
    pulled: tuple[str, ...] = ()
    entry: str = ""
    entry_file: str = ""
    not_pushed: str = ""

    @property
    def case(self) -> str:
        """Its name in the JUnit file."""
        return self.model


def command(
    arguments: argparse.Namespace,
    config: Callable[[argparse.Namespace], Config],
    announce: Announce,
) -> int:
    """Runs ``convert --all``. Returns 0 if every model is converted, 1 if one failed.

    Args:
        arguments: The parsed command line.
        config: Makes a `Config` from the parsed command line of one model.
        announce: Called with each step that begins.

    Raises:
        InputError: A model or an option of one model is given together with ``--all``.
    """
    check_options(arguments)
    if len(getattr(arguments, "targets", ())) > 1:
        raise InputError("--target was given twice: several targets need --ray. Pass one")
    require(find_target(arguments.target))
    parent: Path = arguments.out or Path("artifacts")
    given = vars(arguments)
    configs = {
        name: config(argparse.Namespace(**{**given, "model": name, "out": parent / name}))
        for name in MODELS
    }
    results = convert_all(configs, parent, arguments.time_limit, announce)
    if arguments.json:
        show(json.dumps([asdict(result) for result in results], indent=2))
    else:
        show(results_table(results))
        show(f"{parent / REPORT} has the same results for JUnit readers")
    return 1 if any(result.state == "FAILED" for result in results) else 0


def check_options(arguments: argparse.Namespace) -> None:
    """Raises `InputError` for a model, or an option that fits one model only."""
    if arguments.model is not None:
        raise InputError(f"--all converts every model: remove {arguments.model}, or remove --all")
    for name in _OF_ONE:
        if getattr(arguments, name):
            raise InputError(
                f"--{name.replace('_', '-')} fits one model only: remove it, or remove --all"
            )


def convert_all(
    configs: dict[str, Config], parent: Path, time_limit: float | None, announce: Announce
) -> list[ModelResult]:
    """Converts models one after the other. A failure does not stop the others.

    Args:
        configs: The conversions by model name.
        parent: The folder for ``convert.xml``.
        time_limit: The limit for one model in seconds; None for no limit.
        announce: Called with each step that begins.

    Raises:
        InputError: The folder cannot be made.
        KeyboardInterrupt: The run was interrupted. Finished artifacts and the JUnit file stay.
    """
    make_parent(parent)
    # a model's own process may have replaced its artifact before this one knows
    interrupts.settle(f"each artifact in {parent} is the old one or the new one, and complete")
    results = {name: ModelResult(name) for name in configs}
    started = now()
    write_junit(parent / REPORT, list(results.values()), started)
    for number, (name, config) in enumerate(configs.items(), 1):
        announce(f"{name} ({number} of {len(configs)})")
        results[name] = convert_one(name, config, time_limit, announce)
        announce(f"{name}: {results[name].state}")
        write_junit(parent / REPORT, list(results.values()), started)
    return list(results.values())


def make_parent(parent: Path) -> None:
    """Makes the folder for ``convert.xml``. Raises `InputError` if it cannot be made."""
    try:
        parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--out {parent}: cannot make this folder: {error.strerror}") from error


def convert_one(
    name: str,
    config: Config,
    time_limit: float | None,
    announce: Announce,
    *,
    kept: bool = True,
) -> ModelResult:
    """Converts one model in a process of its own. A failure is a result, not an error.

    Args:
        name: The model's name, for the result and the announcements.
        config: The conversion.
        time_limit: The limit in seconds; None for no limit.
        announce: Called with each step that begins.
        kept: Whether the error names the files that a failed conversion leaves.
    """
    watch = Stopwatch()
    with watch(name):
        result = _convert(name, config, time_limit, announce, kept)
    return replace(result, seconds=watch.seconds[name])


def _convert(
    name: str, config: Config, time_limit: float | None, announce: Announce, kept: bool
) -> ModelResult:
    def said(text: str) -> None:
        announce(f"{name}: {text}")

    try:
        with Child(announce=said, time_limit=time_limit, grace=_GRACE) as child:
            report = child.call(run, config, said)
    except ChildLate as late:
        return ModelResult(name, "FAILED", error=late.how, detail=late.words)
    except ChildDied as died:
        line = f"the process of this model ended with {died.how}"
        return ModelResult(name, "FAILED", error=line, detail=died.words)
    except (PipelineError, ChildFailed, OSError, MemoryError) as error:
        text = error.message if isinstance(error, PipelineError) else str(error)
        files = getattr(error, "kept", "") if kept else ""
        text = f"{text}; kept: {files}" if files else text
        line = " ".join(text.split()) or type(error).__name__
        more = getattr(error, "detail", "") or getattr(error, "trace", "")
        return ModelResult(name, "FAILED", error=line, detail=more or line)
    result = ModelResult(name, "unchanged" if report.unchanged else "ok")
    if report.store is not None:
        result = replace(result, pulled=report.store.pulled, not_pushed=report.store.problem)
        if not report.store.problem:
            entry = Entry(report.manifest)
            result = replace(result, entry=entry.key, entry_file=entry.name)
    return _done(result, report.manifest)


def _done(result: ModelResult, manifest: Manifest) -> ModelResult:
    """Fills in the facts from the manifest of a finished conversion."""
    assert manifest.comparison is not None
    assert manifest.build is not None
    points = manifest.comparison.points
    own, of_engine = manifest.tolerances(), manifest.engine_tolerances()
    compared = sum(point.compared for point in points)
    plan_bytes = manifest.build.plan_bytes
    result = replace(
        result, points=compared, left_out=len(points) - compared, plan_bytes=plan_bytes
    )
    worst = -1.0
    for found in (one for point in points for one in point.results):
        far, of_largest = found.max_abs, found.max_rel
        if far is None or of_largest is None:
            continue
        tolerance = (of_engine if in_precision(found.pair[1]) else own)[found.output]
        allowed = max(tolerance.atol, tolerance.rtol * (far / of_largest if of_largest else 0.0))
        if far > allowed * worst:
            worst = far / allowed if allowed else 0.0
            result = replace(
                result, max_abs=far, max_rel=of_largest, rtol=tolerance.rtol, atol=tolerance.atol
            )
    return result


def results_table(results: Sequence[ModelResult]) -> str:
    """Returns a row for each model, and a line for each failure."""
    rows: list[Sequence[str]] = [("model", *HEAD)]
    rows += [(result.model, *cells(result)) for result in results]
    return "\n".join([table(rows), *failures(results)])


def cells(r: ModelResult) -> tuple[str, ...]:
    """Returns the cells of a result, in the order of `HEAD`."""
    left = f" of {(r.points or 0) + r.left_out}" if r.left_out else ""
    return (
        r.state,
        f"{r.seconds:.1f}" if r.state != "not reached" else "-",
        f"{r.points}{left} sizes" if r.points is not None else "-",
        f"{r.max_abs:.2e}" if r.max_abs is not None else "-",
        f"{r.max_rel:.2e}" if r.max_rel is not None else "-",
        f"rtol {r.rtol:g} or atol {r.atol:g}" if r.rtol is not None else "-",
        f"{r.plan_bytes / 2**20:.1f} MiB" if r.plan_bytes is not None else "-",
    )


def failures(results: Sequence[ModelResult]) -> list[str]:
    """Returns a line for each failure."""
    return [f"FAILED {r.case}: {r.error}" for r in results if r.state == "FAILED"]


def write_junit(path: Path, results: Sequence[ModelResult], started: str) -> None:
    """Writes the results as JUnit XML in one step, so that a reader never sees half a file.

    A failed model is a failure. A model that was not reached is skipped.

    Raises:
        PipelineError: The file cannot be written.
    """
    states = [r.state for r in results]
    root = ET.Element("testsuites")
    suite = ET.SubElement(
        root,
        "testsuite",
        name="pipeline convert",
        tests=str(len(results)),
        failures=str(states.count("FAILED")),
        errors="0",
        skipped=str(states.count("not reached")),
        time=f"{sum(r.seconds for r in results):.3f}",
        timestamp=started.partition("+")[0],
    )
    for r in results:
        case = ET.SubElement(
            suite, "testcase", classname="pipeline.convert", name=r.case, time=f"{r.seconds:.3f}"
        )
        if r.state == "FAILED":
            failure = ET.SubElement(case, "failure", message=_xml(r.error), type="conversion")
            failure.text = _xml(r.detail)
        elif r.state == "not reached":
            ET.SubElement(case, "skipped", message="not reached")
        else:
            error = "" if r.max_abs is None else f", largest error {r.max_abs:.3g}"
            text = f"{r.state}: compared at {r.points} sizes{error}"
            ET.SubElement(case, "system-out").text = text
    ET.indent(root)
    try:
        write_whole(path, ET.tostring(root, encoding="UTF-8", xml_declaration=True))
    except OSError as error:
        raise PipelineError(f"cannot write {path}: {error.strerror}") from error


def _xml(text: str) -> str:
    """Replaces the characters that XML 1.0 forbids."""
    return _NO_XML.sub("?", text)
