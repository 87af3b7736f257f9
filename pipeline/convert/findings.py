"""The findings of a check or of a failed conversion, and how errors become findings."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pipeline.artifact.manifest import ComparisonInfo
from pipeline.build.shape_inference import ORACLE
from pipeline.compare.problems import Problem, problems
from pipeline.compare.run_names import EXPORTED, REWRITTEN, in_precision
from pipeline.errors import ConstraintError, ExportError, PipelineError, SizeError
from pipeline.probe.eager import model_line
from pipeline.spec.dims import sizes_text
from pipeline.spec.findings import Note, NoteKind
from pipeline.spec.rules import Rule, RuleKind
from pipeline.spec.verdicts import CheckKind, VerdictKind

Section = Literal["dims", "nodes", "comparison"]
SECTIONS: tuple[Section, ...] = ("dims", "nodes", "comparison")

FindingKind = Literal[
    RuleKind,
    VerdictKind,
    CheckKind,
    NoteKind,
    "declared",  # a dim or a rule on sizes, as it was declared
    "tried",  # how many sets of sizes were run
    "narrowed",  # the sizes that the later findings hold for
    "left-out",  # a profile or a shape outside these sizes
    "guards",  # the sizes at which torch.export's guards hold
    "export",  # torch.export or the conversion to ONNX fails
    "fault",  # a node that the target cannot run, and no pass fixes
    "mended",  # nodes that a pass fixes
    "warning",  # a warning of a pass
    "rewrite",  # the rewrite fails
    "parser",  # the result of TensorRT's parser
    "compared",  # all runs agree, with the largest error
    "not-compared",  # sizes that were not compared
    "comparison",  # a run fails
    "note",  # any other note
    "skipped",  # a part of the check that did not run
]

_LONGEST = 400  # characters of a message


@dataclass(frozen=True)
class Finding:
    """One finding of a check.

    Args:
        section: The section of the report.
        what: What was found, in one line.
        kind: The topic; for a rule on sizes, the kind of the rule.
        where: The line of the model, or the node and its origin.
        do: What to do.
        blocks: True if a conversion would fail.
        dim: The dim of the finding, if any.
        node: The node of the finding, if any.
    """

    section: Section
    what: str
    kind: FindingKind
    where: str = ""
    do: str = ""
    blocks: bool = False
    dim: str = ""
    node: str = ""

    def lines(self) -> list[str]:
        """The finding as text. An exclamation mark shows a finding that blocks."""
        at = [f"    at: {self.where}"] if self.where else []
        do = [f"    do: {self.do}"] if self.do else []
        return [f"{'!' if self.blocks else ' '} {self.what}", *at, *do]


def shortened(text: str) -> str:
    """Returns a message as one line of at most 400 characters."""
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 4]} ..."


def rule_finding(rule: Rule) -> Finding:
    """Returns the finding for a rule of the model that blocks a conversion."""
    what, do = shortened(rule.text()), shortened(rule.advice())
    return Finding("dims", what, rule.kind, rule.line, do, blocks=True, dim=rule.dim)


def constraint_findings(error: ConstraintError) -> list[Finding]:
    """Returns one finding for each rule of an error, or one for an error without rules."""
    found = [rule_finding(rule) for rule in error.rules]
    return found or [Finding("dims", shortened(error.message), "export", blocks=True)]


def export_failures(error: PipelineError) -> list[Finding]:
    """Returns the findings of another export error, with the lines of the model if known."""
    text, place = error.message, ""
    if isinstance(error, ExportError):
        text, place = error.what, error.line
    cause = error.__cause__
    if cause is not None and not place:
        import torch

        stack = traceback.extract_tb(cause.__traceback__)
        place = model_line(stack, str(Path(torch.__file__).parent))
    section: Section = "dims" if isinstance(error, SizeError) else "nodes"
    do = error.do if isinstance(error, ExportError) else ""
    others = error.others if isinstance(error, ExportError) else ()
    return [
        Finding(section, shortened(text), "export", place, do, blocks=True),
        *(finding for other in others for finding in export_failures(other)),
    ]


def comparison_failures(comparison: ComparisonInfo) -> list[Finding]:
    """Returns the failures of a comparison; none if it passed.

    Failures of one kind, of one output and pair of runs, are one finding with the first sizes.
    """
    found: list[Finding] = []
    first: dict[object, Problem] = {}
    count: dict[object, int] = {}
    for problem in problems(comparison.points):
        result = problem.result
        key = (result.output, result.pair, result.kind, problem.causes)
        first.setdefault(key, problem)
        count[key] = count.get(key, 0) + problem.points
    located = {p.result.pair: p.result.output for p in first.values() if p.result.where}
    for seen, problem in first.items():
        result, point = problem.result, problem.point
        one, other = result.pair
        times = f"{count[seen]} of {len(comparison.points)} sets of sizes"
        first_at = f"first at {point.label} ({sizes_text(point.sizes)}): {result.what}"
        how = "cannot be compared with" if result.kind == "inconclusive" else "differs from"
        what = f"{result.output} of {other} {how} {one} at {times}, {first_at}"
        do = result.do or _mend(one, other, result.kind)
        if result.facts.get("advice") == "ties":
            do += f". If that does not help, {_mend(one, other, result.kind)}"
        same = located.get(result.pair, result.output)
        if result.kind == "differs" and same != result.output and not result.do:
            do = f"examine {same} first: both may differ for the same cause"
        found.append(Finding("comparison", what, result.kind, result.where, do, blocks=True))
    found += [finding for finding in note_findings(comparison) if finding.blocks]
    for check in comparison.checks:
        if not check.passed:
            at = sizes_text(check.sizes)
            what = f"{check.name} of {check.run}{at and f' at {at}'}: {check.text}"
            found.append(Finding("comparison", shortened(what), check.kind, blocks=True))
    return found


def note_findings(comparison: ComparisonInfo) -> list[Finding]:
    """Returns the notes. Equal notes at several sets of sizes become one finding."""
    alike: dict[object, list[Note]] = {}
    for note in comparison.notes:
        alike.setdefault(note.subject, []).append(note)
    found = []
    for notes in alike.values():
        more = f" (and at {len(notes) - 1} more sets of sizes)" if len(notes) > 1 else ""
        what = f"{notes[0].text}{more}"
        found.append(Finding("comparison", what, notes[0].kind, blocks=notes[0].fails))
    return found


def _mend(one: str, other: str, kind: VerdictKind) -> str:
    if other == ORACLE:
        return "examine the output's sizes in the model: TensorRT computes other sizes than torch"
    if kind == "not-finite":
        return "find the first node that gives such values (`pipeline locate`), or limit the inputs"
    if in_precision(other):
        return "build the engine with a wider --precision, or state a larger --engine-tolerance"
    if (one, other) == (EXPORTED, REWRITTEN):
        return "a pass changed the result: skip the pass with --skip, and report the fault"
    if one == "reference":
        return "check that the reference is of the same model, or state a larger --tolerance"
    return (
        "replace the named op in the model, write its translation (pipeline/export/ops), or "
        "declare only the sizes at which the runs agree"
    )


def findings_of(error: PipelineError) -> list[Finding]:
    """Returns the findings of an error of a stage; none if it is no error of an export."""
    if isinstance(error, ConstraintError):
        return constraint_findings(error)
    return export_failures(error) if isinstance(error, ExportError) else []


def list_findings(error: PipelineError) -> None:
    """Makes an error list its findings line by line, if it has several."""
    found = findings_of(error)
    if found[1:]:
        advice = error.advice if isinstance(error, ConstraintError) else ()
        error.more = "\n".join([blocked_text(error, found), *advice])


def blocked_text(error: PipelineError, stops: Sequence[Finding]) -> str:
    """Returns the lines of a conversion that findings block.

    Args:
        error: The error that ended it. Its message is left out if a finding says the same.
        stops: The findings that block, at least one.
    """
    text = f"{len(stops)} findings block" if stops[1:] else "1 finding blocks"
    own = " ".join(error.message.split())
    known = {finding.what for finding in findings_of(error)}
    if any(stop.what in known or stop.what.partition(": ")[0] in own for stop in stops):
        first, _, _ = own.partition(": ")
        text = f"{first}: {text}" if first.startswith("model ") else text
    else:
        text = f"{own}\n{text}"
    return "\n".join([f"{text} the conversion:", *(s for stop in stops for s in stop.lines())])
