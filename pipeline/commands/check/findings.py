"""What a check found, and errors of the pipeline as findings."""

from __future__ import annotations

import re
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pipeline.errors import ConstraintError, ExportError, PipelineError, SizeError
from pipeline.probe.eager import model_line
from pipeline.spec.findings import NoteKind
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
    "narrowed",  # which sizes the rest of the check is about
    "left-out",  # a profile or a shape outside of these sizes
    "guards",  # what torch.export's guards were checked at
    "export",  # torch.export or the conversion to ONNX fails
    "fault",  # a node that the target can't run, and no pass mends
    "mended",  # nodes that a pass mends
    "warning",  # a warning of a pass
    "rewrite",  # the rewrite fails
    "parser",  # what TensorRT's parser says
    "compared",  # how far the runs agree
    "not-compared",  # sizes that were not compared
    "comparison",  # a run fails
    "note",  # anything else that was noted
    "skipped",  # a part of the check that was left out
]

_LONGEST = 400  # characters of a message
# what torch.export says, in torch's own text -> what can be done in the model
_ADVICE = (
    (
        r"extract specialized integer",
        "a number must not be made of a tensor's values: take sizes from x.shape as they are, and "
        "other numbers when the module is made",
    ),
    (
        r"data-dependent|GuardOnDataDependent|Could not guard|unbacked|Eq\(u\d",
        "which way the model takes must not be up to the data: compute both and choose with "
        "torch.where, use torch.cond, or make the choice when the module is made",
    ),
    (
        r"No ONNX function|No decompositions|Failed to (?:decompose|convert)|not supported",
        "write the op's translation (pipeline/export/ops), or replace it in the model",
    ),
)


@dataclass(frozen=True)
class Finding:
    """One thing that was found.

    Args:
        section: the part of the report that it belongs to.
        what: in one line.
        kind: what it is about; for a rule on sizes, the kind of the rule.
        where: the model's line, or the node and where it came from.
        do: what mends it.
        blocks: True if it stands in the way of a conversion.
        dim: the dim that it is about, if it is about one.
        node: the node that it is about, if it is about one.
    """

    section: Section
    what: str
    kind: FindingKind
    where: str = ""
    do: str = ""
    blocks: bool = False
    dim: str = ""
    node: str = ""


def shortened(text: str) -> str:
    """A message as one line of bounded length."""
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 4]} ..."


def rule_finding(rule: Rule) -> Finding:
    """A rule of the model that stands in the way of a conversion."""
    what, do = shortened(rule.text()), shortened(rule.advice())
    return Finding("dims", what, rule.kind, rule.line, do, blocks=True, dim=rule.dim)


def constraint_findings(error: ConstraintError) -> list[Finding]:
    """One finding for each rule that an error carries; the error itself where it carries none."""
    found = [rule_finding(rule) for rule in error.rules]
    return found or [Finding("dims", shortened(str(error)), "export", blocks=True)]


def export_failure(error: PipelineError) -> Finding:
    """What else torch refuses, with the model's line where its traceback tells it."""
    text, place = str(error), ""
    if isinstance(error, ExportError):
        text, place = error.what, error.line
    cause = error.__cause__
    if cause is not None and not place:
        import torch

        stack = traceback.extract_tb(cause.__traceback__)
        place = model_line(stack, str(Path(torch.__file__).parent))
    whole = f"{text}\n{error.detail}"
    advice = next((words for pattern, words in _ADVICE if re.search(pattern, whole)), "")
    section: Section = "dims" if isinstance(error, SizeError) else "nodes"
    return Finding(section, shortened(text), "export", place, advice, blocks=True)
