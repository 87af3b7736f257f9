"""The whole zoo, one model after the other, each in a process of its own.

torch keeps state between exports (an LSTM exported after another one has a static time), and a
library that crashes must end one model only. What is unchanged is not done again, so a run that
was interrupted goes on where it was. The JUnit file is written anew after each model.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TextIO

from pipeline.artifact.manifest import now
from pipeline.commands.table import table
from pipeline.compare.run_names import in_precision
from pipeline.errors import InputError, PipelineError
from pipeline.machine.resources import Stopwatch

Announce = Callable[[str], None]
State = Literal["ok", "unchanged", "FAILED", "not reached"]

PROGRAM: tuple[str, ...] = (sys.executable, "-m", "pipeline")
REPORT = "convert.xml"
_GRACE = 20.0  # seconds that a process which is told to end has for cleaning up
_TAIL = 4000  # characters of stderr that the JUnit file keeps
_ERROR = "error: "
_STILL = "... still running"  # see `pipeline.commands.main.Progress`
_STAMP = re.compile(r"^\[ *[\d.]+ s\] ")
_NO_XML = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclass(frozen=True)
class Result:
    """What became of one model.

    Args:
        model: its name in the zoo.
        state: ``unchanged`` means that the artifact was there already.
        seconds: how long its process ran.
        error: the error's line, where it failed.
        detail: the end of what it wrote to stderr, where it failed.
        points: sizes at which it was compared.
        left_out: sizes that were not compared (memory).
        max_abs: the largest difference of all comparisons, in the output nearest to its
            tolerance; None where there are no floating-point numbers.
        max_rel: the same over the largest value of that output.
        rtol, atol: the tolerance of that output.
        plan_bytes: size of the engine.
    """

    model: str
    state: State = "not reached"
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


def convert_all(
    models: Sequence[str],
    parent: Path,
    options: Sequence[str] = (),
    *,
    time_limit: float | None = None,
    announce: Announce,
) -> list[Result]:
    """Converts models of the zoo into ``<parent>/<name>``; one that fails stops no other.

    Args:
        models: names.
        parent: the folder of the artifacts; ``convert.xml`` is written into it.
        options: further words for each ``pipeline convert``.
        time_limit: seconds that one model may take.
        announce: is told in words what begins.

    Raises:
        KeyboardInterrupt: interrupted; what was finished stays, and stands in the JUnit file.
    """
    try:
        parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{parent}: no folder for the artifacts: {error.strerror}") from error
    results = {name: Result(name) for name in models}
    started = now()
    write_junit(parent / REPORT, list(results.values()), started)
    for number, name in enumerate(models, 1):
        announce(f"{name} ({number} of {len(models)})")

        def said(text: str, name: str = name) -> None:
            announce(f"{name}: {text}")

        results[name] = _convert(name, parent / name, options, time_limit, said)
        announce(f"{name}: {results[name].state}")
        write_junit(parent / REPORT, list(results.values()), started)
    return list(results.values())


def _convert(
    name: str, place: Path, options: Sequence[str], time_limit: float | None, announce: Announce
) -> Result:
    words = [*PROGRAM, "convert", name, "--json", "--debug", "--out", str(place), *options]
    watch = Stopwatch()
    errors: list[str] = []
    late = False
    with tempfile.TemporaryFile("w+") as output, watch(name), _running(words, output) as process:
        assert process.stderr is not None
        reader = threading.Thread(
            target=_forward, args=(process.stderr, errors, announce), daemon=True
        )
        reader.start()
        try:
            code = process.wait(time_limit)
        except subprocess.TimeoutExpired:
            late = True
            _end(process)
            code = process.wait()
        reader.join(_GRACE)
        output.seek(0)
        text = output.read()
    seconds = watch.seconds[name]
    if code == 0:
        try:
            return _told(name, seconds, json.loads(text))
        except (ValueError, KeyError, TypeError) as error:
            return Result(name, "FAILED", seconds, f"its report can't be read: {error!r}", text)
    line = next((e for e in reversed(errors) if e.startswith(_ERROR)), "").removeprefix(_ERROR)
    if late:
        line = f"took longer than the time limit of {time_limit:g} s"
    elif not line or code < 0:
        line = f"its process ended with {_ending(code)}{f': {line}' if line else ''}"
    return Result(name, "FAILED", seconds, line, "\n".join(errors)[-_TAIL:])


@contextmanager
def _running(words: Sequence[str], output: TextIO) -> Iterator[subprocess.Popen[str]]:
    """A process that is told to end, and waited for, whatever ends the block."""
    process = subprocess.Popen(
        words,
        stdout=output,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,  # Ctrl-C comes to us alone: it is told to end once, not twice
    )
    try:
        yield process
    finally:
        _end(process)
        if process.stderr is not None and process.poll() is not None:
            with suppress(OSError):
                process.stderr.close()


def _end(process: subprocess.Popen[str]) -> None:
    """SIGTERM, on which a conversion cleans up as on Ctrl-C; SIGKILL where that does not help."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _forward(stream: TextIO, lines: list[str], announce: Announce) -> None:
    """Keeps a process's lines, and tells those that say what begins."""
    with suppress(ValueError, OSError):  # closed while it is read: the process was ended
        for line in stream:
            lines.append(line.rstrip("\n"))
            if _STAMP.match(line) and not line.rstrip().endswith(_STILL):  # we say that ourselves
                announce(_STAMP.sub("", line).rstrip())


def _ending(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    return f"{signal.strsignal(-code) or 'signal'} ({signal.Signals(-code).name})"


def _told(name: str, seconds: float, report: Mapping[str, Any]) -> Result:
    """The result out of what ``pipeline convert --json`` printed."""
    manifest = report["manifest"]
    points = manifest["comparison"]["points"]
    own = {o["name"]: o["tolerance"] or manifest["tolerance"] for o in manifest["outputs"]}
    of_engine = manifest["engine_tolerance"].get(manifest["precision"])
    share, worst = -1.0, dict[str, float]()
    for result in (r for point in points for r in point["results"]):
        far, of_largest = result["max_abs"], result["max_rel"]
        if far is None or of_largest is None:
            continue
        tolerance = (in_precision(result["pair"][1]) and of_engine) or own[result["output"]]
        largest = far / of_largest if of_largest else 0.0
        allowed = max(tolerance["atol"], tolerance["rtol"] * largest)
        if far <= allowed * share:
            continue
        share = far / allowed if allowed else 0.0
        worst = {"max_abs": far, "max_rel": of_largest}
        worst |= {"rtol": tolerance["rtol"], "atol": tolerance["atol"]}
    compared = sum(point["left_out"] is None for point in points)
    return Result(
        name,
        "unchanged" if report["unchanged"] else "ok",
        seconds,
        points=compared,
        left_out=len(points) - compared,
        plan_bytes=manifest["build"]["plan_bytes"],
        **worst,  # type: ignore[arg-type]
    )


def results_table(results: Sequence[Result]) -> str:
    """One row a model; what failed is told below."""
    head = (
        "model", "result", "seconds", "compared at", "largest error", "of the largest value",
        "tolerance", "engine",
    )  # fmt: skip
    rows = [head]
    for r in results:
        left = f" of {(r.points or 0) + r.left_out}" if r.left_out else ""
        rows.append(
            (
                r.model,
                r.state,
                f"{r.seconds:.1f}" if r.state != "not reached" else "-",
                f"{r.points}{left} sizes" if r.points is not None else "-",
                f"{r.max_abs:.2e}" if r.max_abs is not None else "-",
                f"{r.max_rel:.2e}" if r.max_rel is not None else "-",
                f"rtol {r.rtol:g} or atol {r.atol:g}" if r.rtol is not None else "-",
                f"{r.plan_bytes / 2**20:.1f} MiB" if r.plan_bytes is not None else "-",
            )
        )
    lines = [table(rows)]
    lines += [f"FAILED {r.model}: {r.error}" for r in results if r.state == "FAILED"]
    return "\n".join(lines)


def write_junit(path: Path, results: Sequence[Result], started: str) -> None:
    """Writes the results as JUnit XML, in one step: a reader finds the old file or the new one.

    A model that failed is a failure, one that was not reached is skipped.
    """
    suite = ET.Element(
        "testsuite",
        name="pipeline convert",
        tests=str(len(results)),
        failures=str(sum(r.state == "FAILED" for r in results)),
        errors="0",
        skipped=str(sum(r.state == "not reached" for r in results)),
        time=f"{sum(r.seconds for r in results):.3f}",
        timestamp=started.partition("+")[0],
    )
    for r in results:
        case = ET.SubElement(
            suite, "testcase", classname="pipeline.convert", name=r.model, time=f"{r.seconds:.3f}"
        )
        if r.state == "FAILED":
            failure = ET.SubElement(case, "failure", message=_xml(r.error), type="conversion")
            failure.text = _xml(r.detail)
        elif r.state == "not reached":
            ET.SubElement(case, "skipped", message="not reached")
        else:
            ET.SubElement(case, "system-out").text = _xml(_words(r))
    root = ET.Element("testsuites")
    root.append(suite)
    ET.indent(root)
    text = ET.tostring(root, encoding="unicode", xml_declaration=False)
    spare = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        spare.write_text(f'<?xml version="1.0" encoding="UTF-8"?>\n{text}\n', encoding="utf-8")
        spare.replace(path)
    except OSError as error:
        raise PipelineError(f"{path}: can't be written: {error.strerror}") from error
    finally:
        spare.unlink(missing_ok=True)


def _words(result: Result) -> str:
    error = "" if result.max_abs is None else f", largest error {result.max_abs:.3g}"
    return f"{result.state}: compared at {result.points} sizes{error}"


def _xml(text: str) -> str:
    """Text without the characters that XML 1.0 forbids."""
    return _NO_XML.sub("?", text)
