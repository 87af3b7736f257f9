"""What a check found, and errors of the pipeline as findings."""

from __future__ import annotations

import re
import traceback
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pipeline.errors import PipelineError

Section = Literal["dims", "nodes", "comparison"]
SECTIONS: tuple[Section, ...] = ("dims", "nodes", "comparison")

_LONGEST = 400  # characters of a message
_FIXED = r"\w+ is baked in|\w+ must |\w+ can't be |the model runs at none"
_RULE = re.compile(rf"(?P<what>.*?); declare (?P<do>.*?)(?=; (?:{_FIXED})|\Z)", re.DOTALL)
_LINE = re.compile(r" \((?P<line>[^()]+:\d+ in .*)\)\Z", re.DOTALL)
# what torch.export says -> what can be done in the model
_ADVICE = (
    (r"takes \w+ to equal \w+", "give both the same dim"),
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
        where: the model's line, or the node and where it came from.
        do: what mends it.
        blocks: True if it stands in the way of a conversion.
        dim: the dim that it is about, if it is about one.
    """

    section: Section
    what: str
    where: str = ""
    do: str = ""
    blocks: bool = False
    dim: str = ""


def shortened(text: str) -> str:
    """A message as one line of bounded length."""
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 4]} ..."


def rule_findings(text: str, dims: Collection[str], *, blocks: bool = True) -> list[Finding]:
    """Rules as `pipeline.probe.rules.Rule` prints them, joined by ``; ``, one finding each."""
    found = []
    matches = list(_RULE.finditer(text))
    for match in matches:
        what = match["what"].removeprefix("; ")
        line = _LINE.search(what)
        place = line["line"] if line else ""
        what = what[: line.start()] if line else what
        first = re.match(r"\w+", what)
        dim = first[0] if first and first[0] in dims else ""
        do = f"declare {match['do']}"
        found.append(Finding("dims", shortened(what), place, shortened(do), blocks, dim))
    return found or [Finding("dims", shortened(text), blocks=blocks)]


def export_failure(error: PipelineError) -> Finding:
    """What else torch refuses, with the model's line where its traceback tells it."""
    place = ""
    text = str(error)
    cause = error.__cause__
    if cause is not None:
        import torch

        from pipeline.probe.eager import model_line

        stack = traceback.extract_tb(cause.__traceback__)
        place = model_line(stack, str(Path(torch.__file__).parent))
        text = text.replace(f" at {place}", "") if place else text
    whole = f"{text}\n{error.detail}"
    advice = next((words for pattern, words in _ADVICE if re.search(pattern, whole)), "")
    section: Section = "dims" if re.search(r"\baxis \d", text) else "nodes"
    return Finding(section, shortened(text), place, advice, blocks=True)
