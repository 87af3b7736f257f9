"""Whether two runs agree on an output, and what a check of one run found: kinds and facts.

Code decides on the kind and the facts. The text is for people and is never read back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from pipeline.spec.dims import sizes_text
from pipeline.spec.findings import Fact, Facts, Kind, shown
from pipeline.spec.tensors import MOST_DIFFERING

VerdictKind = Literal[
    "agrees",
    "differs",
    "values-differ",
    "shape-differs",
    "dtype-differs",
    "missing",
    "not-finite",
    "inconclusive",
    "near-zero",
    "no-elements",
    "sizes-refused",
]
VERDICTS: Mapping[VerdictKind, Kind] = {
    "agrees": Kind("Every element is within the tolerance.", ""),
    "differs": Kind(
        "An element of a floating-point output is beyond the tolerance.",
        "differs by up to {max_abs} at index [{index}]; the largest value is {largest}",
    ),
    "values-differ": Kind(
        "More integers or booleans differ than the tolerance allows.",
        "{count} of {of} {dtype} values differ",
    ),
    "shape-differs": Kind("The output has another shape.", "its shape is [{got}], not [{want}]"),
    "dtype-differs": Kind("The output has another dtype.", "its dtype is {got}, not {want}"),
    "missing": Kind("Only one of the two runs has the output.", "only {only} has this output"),
    "not-finite": Kind("A run has NaN or infinity.", "{whose} has NaN or infinity"),
    "inconclusive": Kind(
        "Every reference value is below atol, so zeros would pass too.",
        "cannot be judged: every value of {reference} is below atol={atol}, so zeros would pass",
    ),
    "near-zero": Kind(
        "Every reference value is below atol at these sizes, and other sizes were judged.", ""
    ),
    "no-elements": Kind("The output has no elements at these sizes: nothing was compared.", ""),
    "sizes-refused": Kind(
        "TensorRT's shape inference refuses the sizes.", "TensorRT refuses the sizes: {reason}"
    ),
}

# advice on a verdict, in addition to that of its kind
AdviceKind = Literal[
    "limit-inputs",
    "bad-weight",
    "fp16-overflow",
    "state-engine-tolerance",
    "beyond-rounding",
    "rounding-hides",
    "rounding-picks",
    "ties",
    "no-kernel",
]
ADVICE: Mapping[AdviceKind, str] = {
    "limit-inputs": (
        "If the input values cause this, limit them: --range NAME=LOW..HIGH, or low= and high= of "
        "the Input. For a mask, use --range NAME=prefix (1 is kept) or padding (1 is left out). "
        "If a size causes it, such as std over 1 element, declare a range without it"
    ),
    "bad-weight": "The weight {weight} itself has NaN or infinity: correct the weights",
    "fp16-overflow": (
        "fp16 overflows beyond 65504: build the engine with --precision {without_overflow}"
    ),
    "state-engine-tolerance": (
        "No tolerance is stated for {precision}: state one (engine_tolerance in the spec, or "
        "--engine-tolerance RTOL,ATOL)"
    ),
    "beyond-rounding": (
        "{precision} is too coarse for this output, or its conversion is wrong: build the engine "
        "with --precision {wider}. If you can accept the difference, allow it with "
        "--engine-tolerance RTOL,ATOL"
    ),
    "rounding-hides": (
        "Rounding to {precision} may change this output by more than its values: build the engine "
        "with --precision {wider}, or state a smaller atol with --engine-tolerance RTOL,ATOL"
    ),
    "rounding-picks": (
        "Rounding to {precision} changes which values are larger, so topk, argmax, sort or a "
        "comparison picks others: build the engine with --precision {wider}. Or return the values "
        "that are compared, such as scores, and pick in your program"
    ),
    "ties": (
        "topk, sort and argmax may take others of values that are equal within rounding. So this "
        "may be no fault. Compare with trained weights (--weights), or with inputs whose scores "
        "differ (--inputs FILE). Or return the scores, and choose in your program"
    ),
    "no-kernel": (
        "ONNX Runtime can't compute this type on a CPU. If the model calls .bfloat16() or .half(), "
        "or has an autocast, leave that out, and choose the type of the engine with --precision"
    ),
}
_TIES = (
    "If argmax, argsort, sort or topk gives this output, values may tie: their order is open. "
    "Return the values in place of the indices, or use argsort or sort with stable=True. For a "
    "topk, take the first k of torch.sort(x, descending=True, stable=True). Or compare with "
    "distinct values: --inputs FILE. If round or a cast gives it, a value may be at a step: return "
    "the value before the rounding, and round in your program"
)
_WIDER = "auto, which keeps in float32 what needs it, or with tf32"
_NO_OVERFLOW = "auto, bf16 or tf32"
_BY_RECIPE = "or keep more nodes in float32: add them to {recipe}, and pass it with --recipe"
_CLOSE = "If a comparison is close there, make the values that it compares an output"


@dataclass(frozen=True)
class Verdict:
    """Whether two runs agree on one output.

    Args:
        kind: One of `VERDICTS`.
        pair: The names of the reference and of the run.
        output: The output's name.
        max_abs: The largest absolute difference; None if there are no numbers to compare.
        max_rel: `max_abs` divided by the reference's largest value.
        facts: The numbers and names in the text; see `what`, `where` and `do`.
        text: What happened, where, and what to do; empty if the runs agree. A stored text stays as
            it was written.
    """

    kind: VerdictKind
    pair: tuple[str, str]
    output: str
    max_abs: float | None = None
    max_rel: float | None = None
    facts: Facts = field(default_factory=dict)
    text: str = ""

    def __post_init__(self) -> None:
        if not self.text:
            where = self.where[:1].upper() + self.where[1:]
            text = ". ".join(part for part in (self.what, where, self.do) if part)
            object.__setattr__(self, "text", text)

    @property
    def passed(self) -> bool:
        """True if the runs agree, or the sizes say nothing about an output that others judge, or
        there is nothing to compare."""
        return self.kind in ("agrees", "near-zero", "no-elements")

    @property
    def compared(self) -> bool:
        """True if there was something to compare."""
        return self.kind != "no-elements"

    def knowing(self, **facts: Fact) -> Verdict:
        """The verdict with more facts and a new text."""
        return replace(self, facts={**self.facts, **facts}, text="")

    @property
    def causes(self) -> tuple[tuple[str, str, str], ...]:
        """The causes of a bad verdict that do not depend on the pair or the sizes.

        There is one entry for each run with NaN or infinity, or one for an output that cannot be
        judged. Otherwise there is none.
        """
        if self.kind == "not-finite":
            runs = (self.facts.get("whose"), self.facts.get("others"))
            return tuple((self.output, self.kind, str(run)) for run in runs if run is not None)
        return ((self.output, self.kind, ""),) if self.kind == "inconclusive" else ()

    @property
    def what(self) -> str:
        """What happened, as text; empty if the runs agree."""
        facts = {**shown(self.facts), "max_abs": _number(self.max_abs), "reference": self.pair[0]}
        text = VERDICTS[self.kind].text.format_map(facts)
        text += f", and {facts['others']} has others" if "others" in facts else ""
        return text + (f" where {facts['clean']} has none" if "clean" in facts else "")

    @property
    def where(self) -> str:
        """The node where the runs begin to differ, as text; empty if it is unknown."""
        return str(self.facts.get("where", ""))

    @property
    def _precisions(self) -> dict[str, str]:
        """The precisions to build with instead, as text, by the names in `ADVICE`."""
        if "recipe" in self.facts:
            more = _BY_RECIPE.format_map(self.facts)
            return {"wider": f"tf32, {more}", "without_overflow": f"bf16 or tf32, {more}"}
        wider = _WIDER if self.facts.get("precision") != "tf32" else "fp32"
        return {"wider": wider, "without_overflow": _NO_OVERFLOW}

    @property
    def do(self) -> str:
        """What to do, as text; empty if there is no advice."""
        get = self.facts.get
        parts = []
        if self.kind == "values-differ" and get("advice") is None:
            parts.append(_CLOSE if get("dtype") == "bool" else _TIES)
        if self.kind == "inconclusive" and get("advice") is None:
            parts.append(f"Use a smaller atol, such as --tolerance {self.output}=RTOL,ATOL")
        for advice, text in ADVICE.items():
            if get("advice") == advice:
                parts.append(text.format_map({**self.facts, **self._precisions}))
        if self.kind == "values-differ":
            parts.append(_share(self.facts))
        if (worst := get("worst_abs")) is not None:
            parts.append(
                f"Over all sizes it differs by up to {worst:.2e}, {get('worst_rel'):.2e} of the "
                "largest value"
            )
        if (shape := get("locate")) is not None:
            option = f" --shape {sizes_text(shape)}" if isinstance(shape, Mapping) and shape else ""
            parts.append(f"`pipeline locate ARTIFACT{option}` finds where")
        return ". ".join(parts)


def _share(facts: Facts) -> str:
    """The advice on a share of integers or booleans that may differ."""
    allowed = float(str(facts.get("differing") or 0))
    share = int(str(facts["count"])) / int(str(facts["of"]))
    if share > MOST_DIFFERING:
        more = f", and {allowed:g} is allowed here" if allowed else ""
        return f"No tolerance helps: at most {MOST_DIFFERING:g} of the values may differ{more}"
    digits = 10.0 ** math.floor(math.log10(share))
    least = min(MOST_DIFFERING, max(0.001, round(math.ceil(share / digits) * digits, 9)))
    now = f"{allowed:g} now" if allowed else "none now"
    return (
        f"Or allow a larger share to differ ({now}, at most {MOST_DIFFERING:g}): "
        f"Tolerance(..., differing={least:g}), --tolerance RTOL,ATOL,{least:g}"
    )


RowChangeKind = Literal["same-sample", "other-samples", "position", "batch-size"]
ROW_CHANGES: Mapping[RowChangeKind, str] = {
    "same-sample": "the same sample in every row gives different rows",
    "other-samples": "a row changes with the samples in the other rows",
    "position": "a row changes with its position in the batch",
    "batch-size": "a row changes with the batch size",
}


@dataclass(frozen=True)
class RowChange:
    """A way in which the rows of a batch depend on each other.

    Args:
        kind: One of `ROW_CHANGES`.
        output: The output that changes most.
        max_abs: The largest absolute change; None if it is not finite.
        more: The number of other outputs that change too.
        in_model: Whether the reference does it too; then it is not a fault.
    """

    kind: RowChangeKind
    output: str
    max_abs: float | None
    more: int = 0
    in_model: bool = False

    @property
    def text(self) -> str:
        """The change and its output, as text."""
        more = f", and {self.more} more outputs" if self.more else ""
        return f"{ROW_CHANGES[self.kind]}: {self.output} by up to {_number(self.max_abs)}{more}"


CheckName = Literal[
    "determinism", "shuffled order", "unwritten outputs", "batch rows", "inputs at the edges"
]
CheckKind = Literal[
    "bit-identical",
    "within-tolerance",
    "beyond-tolerance",
    "differs-from-repeats",
    "all-written",
    "not-written",
    "rows-independent",
    "rows-as-in-model",
    "rows-depend",
    "right-at-edges",
    "wrong-at-an-edge",
    "run-failed",
]
_DIFFERS = "{tried}: {output} differs by up to {max_abs}, "
CHECKS: Mapping[CheckKind, Kind] = {
    "bit-identical": Kind("The same inputs give the same bits.", "{tried}: bit-identical"),
    "within-tolerance": Kind(
        "The same inputs give outputs that differ within the tolerance.",
        _DIFFERS + "within the tolerance",
    ),
    "beyond-tolerance": Kind(
        "The same inputs give outputs that differ beyond the tolerance.",
        _DIFFERS + "beyond the tolerance",
    ),
    "differs-from-repeats": Kind(
        "Repeated runs are bit-identical, but another order changes outputs.",
        _DIFFERS + "although repeated runs are bit-identical",
    ),
    "all-written": Kind(
        "The engine writes every element of its outputs.",
        "every element is written at each of {places}",
    ),
    "not-written": Kind(
        "The engine leaves elements of an output unwritten.",
        "{count} of {of} elements of {output} are not written",
    ),
    "rows-independent": Kind(
        "Each row of a batch is independent of the others.",
        "each row is independent of the others",
    ),
    "rows-as-in-model": Kind("Rows depend on each other as they do in the reference.", "{changes}"),
    "rows-depend": Kind("Rows depend on each other, and do not in the reference.", "{changes}"),
    "right-at-edges": Kind(
        "With inputs at the edges of their ranges, no output is wholly wrong.",
        "no output is wholly wrong for {count} kinds of inputs{left}",
    ),
    "wrong-at-an-edge": Kind(
        "With inputs at an edge of their ranges, an output is wholly wrong.",
        "with all {edge}, {output} is {got}, and {want} in {reference}{where}. {do}. If such "
        "inputs never come, state their ranges: --range NAME=LOW..HIGH",
    ),
    "run-failed": Kind("The run ended in an error.", "fails: {reason}"),
}
GOOD_CHECKS: frozenset[CheckKind] = frozenset(
    {
        "bit-identical",
        "within-tolerance",
        "all-written",
        "rows-independent",
        "rows-as-in-model",
        "right-at-edges",
    }
)


@dataclass(frozen=True)
class Check:
    """A check of one run that is not a comparison of its numbers with the reference.

    Args:
        name: The check: see `pipeline.compare.engine_checks` and `pipeline.compare.rows`.
        run: The run's name.
        kind: One of `CHECKS`.
        sizes: The sizes of the finding; empty if the check covers several sets of sizes.
        facts: The numbers and names in the text.
        rows: How the rows of a batch depend on each other.
        text: The finding, also if the check passed. A stored text stays as it was written.
    """

    name: CheckName
    run: str
    kind: CheckKind
    sizes: Mapping[str, int] = field(default_factory=dict)
    facts: Facts = field(default_factory=dict)
    rows: tuple[RowChange, ...] = ()
    text: str = ""

    def __post_init__(self) -> None:
        if not self.text:
            object.__setattr__(self, "text", self._text())

    @property
    def passed(self) -> bool:
        """True if the check found no fault."""
        return self.kind in GOOD_CHECKS

    def _text(self) -> str:
        count = self.facts.get("count")
        places = f"{count} size{'' if count == 1 else 's'}"
        tried = f"{self.facts.get('runs')} runs at each of {places}"
        if self.name == "shuffled order":
            tried = f"{places} in another order"
        changes = [row.text for row in self.rows if not row.in_model]
        meant = "; ".join(row.text for row in self.rows if row.in_model)
        changes += [f"as in the model: {meant}"] if meant else []
        return CHECKS[self.kind].text.format_map(
            {
                **shown(self.facts),
                "max_abs": _number(self.facts.get("max_abs")),
                "places": places,
                "tried": tried,
                "changes": "; ".join(changes),
            }
        )


def finite(value: float) -> float | None:
    """The number as a fact: None where it is not finite."""
    return float(value) if math.isfinite(value) else None


def _number(value: Fact) -> str:
    """A number with three digits; None stands for one that was not finite."""
    return f"{value:.3g}" if isinstance(value, int | float) else "infinity"
