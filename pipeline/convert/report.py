"""The result of a conversion, and its verdict: few lines on a terminal, all of it elsewhere."""

from __future__ import annotations

import html
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote
from typing import Any

from pipeline.artifact.manifest import ComparisonInfo, Manifest
from pipeline.compare.problems import worst_of
from pipeline.convert.findings import comparison_failures
from pipeline.convert.shared import StoreUse
from pipeline.spec.dims import sizes_text
from pipeline.spec.findings import Note
from pipeline.spec.verdicts import Verdict
from pipeline.store.entry import STAGES

WIDTH = 80  # columns
_FAILURES = 10  # most failures that are listed
_HEAD = 10  # columns before the text of a line
# so that a path or a command can be searched and copied
_WORDS: Any = {"break_long_words": False, "break_on_hyphens": False}
_RUNS = {
    "exported": "exported.onnx", "rewritten": "model.onnx", "half": "half.onnx",
    "engine": "the engine",
}  # fmt: skip
# what the first line says was done, by the stage that ran alone
_DONE: Mapping[str, str] = {
    "": "converted", "export": "exported", "rewrite": "rewritten", "build": "built",
    "compare": "verified",
}  # fmt: skip
# notes on what is always so, or that another line says
_USUAL = (
    "random-sizes", "model-unchanged", "shape-inference-agrees", "source-is-onnx", "no-batch-dim",
)  # fmt: skip


@dataclass(frozen=True)
class Report:
    """The result of a conversion or of a stage. `print` shows its verdict, as a notebook does.

    Args:
        path: The artifact's folder.
        manifest: The content of its ``manifest.json``.
        unchanged: True if the artifact was up to date, so nothing was done.
        regressions: What got worse compared with another artifact.
        notes: The other findings of that comparison.
        stage: The stage that ran alone, such as ``build``; empty after a conversion.
        store: How the conversion used its store; None without one.
        ran: The stages that ran in a conversion.
        removed: What the artifact has no longer, and why.
    """

    path: Path
    manifest: Manifest = field(repr=False)
    unchanged: bool = False
    regressions: Sequence[Note] = ()
    notes: Sequence[Note] = ()
    stage: str = ""
    store: StoreUse | None = None
    ran: Sequence[str] = STAGES
    removed: Sequence[str] = ()

    @property
    def ok(self) -> bool:
        """True if nothing that was compared differs."""
        comparison = self.manifest.comparison
        return not self.regressions and (comparison is None or comparison.passed)

    @property
    def narrowed(self) -> tuple[str, ...]:
        """Which sizes the model does not accept, so that the ranges are narrower than asked for."""
        rules = self.manifest.export.refinements if self.manifest.export is not None else ()
        return tuple(dict.fromkeys(rule.text for rule in rules))

    def __str__(self) -> str:
        return verdict(self, whole=True)

    def _repr_html_(self) -> str:
        """The verdict as HTML, for notebooks."""
        first, _, rest = verdict(self, whole=True).partition("\n")
        colour = "#1a7f37" if self.ok else "#cf222e"
        head = f'<b style="color: {colour}">{html.escape(first)}</b>'
        return f'<pre style="white-space: pre-wrap">{head}\n{html.escape(rest)}</pre>'


def verdict(report: Report, *, whole: bool = False) -> str:
    """Returns what came out of a conversion, or of a stage alone.

    The lines have `WIDTH` columns if names allow it.

    The first line has the result, the model, and the place of the artifact. Then come the sizes,
    how closely the results agree, what was not done, and which sizes the model does not accept.
    Failures are listed one by one, and their texts are whole. The last line says what to do next.

    Args:
        report: The report of the conversion or the stage.
        whole: Whether to print every note and every failure, and all of each text. Otherwise there
            are at most eight lines beside the failures, and a longer text ends with dots.
    """
    shown = None if whole else _FAILURES
    one, two = (None, None) if whole else (1, 2)
    manifest, path = report.manifest, str(report.path)
    ran = [report.stage] if report.stage else report.ran
    seconds = sum(s.seconds for s in manifest.stages if s.name in ran)
    facts = f"{manifest.target.name}, {manifest.precision}, {seconds:.0f} s"
    done = "up to date" if report.unchanged else _DONE[report.stage]
    word = done if report.ok else "FAILED"
    lines = [
        f"{word}: {manifest.name} ({facts}) -> {path}",
        *_line("sizes", _sizes(manifest), most=one),
        *_line("compared", compared_text(manifest), most=two),
    ]
    if not manifest.engine_compared:
        why = f"the engine was not compared: {manifest.engine_compared_why}"
        lines += _line("not done", why, most=one)
    notes = notes_of(manifest)
    if whole:
        lines += [line for note in notes for line in _line("note", note, most=None)]
    elif notes:
        more = f" (and {len(notes) - 1} more)" if notes[1:] else ""
        lines += _line("note", notes[0], more)
    bad = [[note.text] for note in report.regressions]
    found = comparison_failures(manifest.comparison) if manifest.comparison else []
    bad += [[line.strip("! ") for line in finding.lines()] for finding in found]
    for first, *rest in bad[:shown]:
        lines += textwrap.wrap(f"- {first}", WIDTH, subsequent_indent="  ", **_WORDS)
        for text in rest:
            lines += textwrap.wrap(f"  {text}", WIDTH, subsequent_indent="      ", **_WORDS)
    if shown and bad[shown:]:
        lines.append(f"- and {len(bad) - _FAILURES} more")
    for text in report.removed:
        lines += _line("removed", text, most=two)
    lines += _line("narrowed", *narrowed_text(manifest), most=one)
    for text in report.store.lines() if report.store is not None else ():
        lines += _line("store", text, most=two)
    return "\n".join([*lines, f"{'next:':{_HEAD}}{_next(report, whole)}"])


def _line(head: str, text: str, more: str = "", *, most: int | None = 1) -> list[str]:
    """A line with a head; a text that needs more than `most` lines ends with dots.

    Without `most`, all of the text is there, and no word is split.
    """
    if not text:
        return []
    room = WIDTH - _HEAD
    if most is None:
        wrapped = textwrap.wrap(text + more, room, **_WORDS)
    else:
        wrapped = textwrap.wrap(text + more, room, max_lines=most, placeholder=f" ...{more}")
    first, *rest = wrapped
    return [f"{head + ':':{_HEAD}}{first}", *(" " * _HEAD + line for line in rest)]


def _sizes(manifest: Manifest) -> str:
    dims = manifest.interface.dims.values()
    texts = [str(dim) for dim in dims]
    return ", ".join([*texts, *manifest.interface.rules]) or "all fixed"


def compared_text(manifest: Manifest) -> str:
    """Which runs were compared, at how many sets of sizes, and how closely they agree."""
    comparison = manifest.comparison
    if comparison is None:
        return ""
    done = [point for point in comparison.points if any(r.compared for r in point.results)]
    runs = dict.fromkeys(run for point in done for result in point.results for run in result.pair)
    results = [result for point in done for result in point.results]
    if not results:
        if any(point.results for point in comparison.points):
            return "nothing: no output has elements at the compared sizes"
        alone = any(note.kind == "model-unchanged" for note in comparison.notes)
        return "nothing: no node was rewritten, so there is one model only" if alone else "nothing"
    names = _and([_RUNS.get(run, run) for run in runs])
    if any(note.kind == "model-unchanged" for note in comparison.notes):
        names = names.replace("exported.onnx", "model.onnx (as exported)")
    text = f"{names} at {_count(len(done), 'set')} of sizes{_random(comparison)}"
    for said in filter(None, (_largest_error(results), _unequal(results))):
        text += f". {said}"
    left = [point for point in comparison.points if point.left_out is not None]
    if left:
        text += f". {len(left)} not compared, such as {sizes_text(left[0].sizes)}"
    return text


def _largest_error(results: Sequence[Verdict]) -> str:
    """The largest error, of a failed output first; empty if no error has a size."""
    equal = all(result.passed and not result.max_abs for result in results)
    worst = worst_of(results)
    if worst is None or (worst.passed and worst.max_rel is None):
        return ""
    if equal:
        return "All outputs are equal"
    if worst.max_rel is not None:
        return f"The largest error is {worst.max_rel:.1e} of {worst.output}'s largest value"
    size = "" if worst.max_abs is None else f", by up to {worst.max_abs:.3g}"
    return f"{worst.output} differs{size}"


def _unequal(results: Sequence[Verdict]) -> str:
    """The largest share of integers or booleans that differ, if the tolerance allows it."""
    shares = [
        (int(str(result.facts["count"])) / int(str(result.facts["of"])), result.output)
        for result in results
        if result.kind == "agrees" and "count" in result.facts
    ]
    share, name = max(shares, default=(0.0, ""))
    return f"Up to {share:.1%} of {name}'s values differ" if name else ""


def _random(comparison: ComparisonInfo) -> str:
    counts = [note.facts.get("count") for note in comparison.notes if note.kind == "random-sizes"]
    return f" and {counts[0]} random ones" if counts else ""


def notes_of(manifest: Manifest) -> list[str]:
    """The notes of all stages on what is not always so."""
    texts: list[str] = []
    texts += manifest.export.notes if manifest.export is not None else ()
    texts += manifest.rewrite.warnings if manifest.rewrite is not None else ()
    half = manifest.build.half if manifest.build is not None else None
    if half is not None and not half.half:
        why = "the search found none that may be" if half.runs else "its recipe says so"
        texts.append(f"no node of this {manifest.precision} engine is in half precision: {why}")
    if manifest.comparison is not None:
        found = manifest.comparison.notes
        texts += [note.text for note in found if not note.fails and note.kind not in _USUAL]
    return texts


def narrowed_text(manifest: Manifest) -> tuple[str, str]:
    """Which sizes the model does not take, and the model's line."""
    rules = manifest.export.refinements if manifest.export is not None else ()
    texts = dict.fromkeys(rule.text.partition(": ")[0] for rule in rules)
    lines = [found[1] for rule in rules if (found := re.search(r"([^/\s]+:\d+) in ", rule.line))]
    return "; ".join(texts), f" ({lines[0]})" if lines else ""


def _next(report: Report, whole: bool) -> str:
    place = quote(str(report.path))
    details = f"`pipeline inspect {place}` shows the details"
    if report.ok and not report.manifest.engine_compared:
        details = details if whole else "--details shows more"
        return f"`pipeline verify {place}` on the GPU. {details}"
    return details


def _and(words: Sequence[str]) -> str:
    return f"{', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else "".join(words)


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"
