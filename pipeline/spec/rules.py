"""The rules of a model on its sizes. Each rule has a kind, fields and a text.

A `Rule` comes from torch.export's errors and guards, or from running the model at many sizes.
Code decides by a rule's kind and fields. `Rule.text` and `Rule.advice` are for people only.
This module imports neither torch nor onnx, because a runtime reads rules in a manifest.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from pipeline.errors import FAULT_ADVICE, InputError
from pipeline.spec.dims import Dim, SizeRule, sizes_text

RuleKind = Literal[
    "fixed",
    "range",
    "multiple",
    "band",
    "equal",
    "relation",
    "expression",
    "guard",
    "dependent",
    "irregular",
    "unsettled",
    "baked-in",
    "example-size",
    "nowhere",
]
RULE_KINDS: Mapping[RuleKind, str] = {
    "fixed": "Only one size of the dim is possible.",
    "range": "Only a smaller range is possible.",
    "multiple": "The sizes have larger steps, perhaps with an offset.",
    "band": "The remainder of the size decides, such as h % 28 < 4.",
    "equal": "Two dims must be equal.",
    "relation": "A comparison of dims must hold, such as h*w <= 4096 or h != 100.",
    "expression": "The dim must be an expression of other dims, or of any number.",
    "guard": "A guard of torch.export must hold, and no Dim can express it.",
    "dependent": "Two dims depend on each other, and no formula was found.",
    "irregular": "Some sizes fail, and no pattern was found.",
    "unsettled": "Some sizes fail, and the time ran out before a pattern was found.",
    "baked-in": "The model makes a Python number of the size.",
    "example-size": "torch.export keeps the example's size, but the model runs at others.",
    "nowhere": "The model runs at no size that was tried.",
}
# why the pipeline can't narrow the dim, so that you must declare another
Obstacle = Literal[
    "",
    "zero",  # only the size 0 is left, and no Dim is always 0
    "empty",  # no size is left in the range
    "padding-offset",  # padding gives multiples only
    "padding-empty",  # no size of the declared dim is padded to a good one
    "opt",  # the range leaves out the opt
    "equal",  # two dims can't be equal in one export, and can always be
]

_LISTED = 6  # sizes in a list
# errors of a run that random integers may cause
_BY_VALUES = re.compile("index out of range|out of bounds|ZeroDivision|division by zero", re.I)


@dataclass(frozen=True)
class Refusal:
    """Sizes at which the model fails.

    Args:
        sizes: The size of every dim, by its name.
        error: The first line of the model's error.
        line: ``file:line in function: code`` of the model; empty if it is unknown.
        fault: The name of the error's class, if it is a mistake in code (`CODE_FAULTS`).
    """

    sizes: Mapping[str, int]
    error: str
    line: str = ""
    fault: str = ""


@dataclass(frozen=True)
class PaddedDim:
    """A dim that the spec's padding enlarges before the model sees it.

    Args:
        dim: The dim as declared.
        multiple: The multiple that its sizes are padded to.
        refined: The sizes of `dim` whose padded sizes keep the rule; None if there are none.
    """

    dim: Dim
    multiple: int
    refined: Dim | None = None


@dataclass(frozen=True)
class Rule:
    """One rule of a model on its sizes.

    Args:
        kind: What the model demands.
        dim: The name of the dim that the rule restricts.
        others: The names of the other dims in the rule.
        refined: The narrower dim that keeps the rule; None if no Dim can express the rule.
        suggested: The dim to declare if `obstacle` prevents the use of `refined`.
        obstacle: Why the pipeline can't narrow the dim.
        size_rule: The rule as in `ModelSpec.rules` (``h*w <= 10000``); empty if there is no such
            text.
        formula: The guard of the kind ``guard``, or the expression of the kind ``expression``.
        ends: The smallest and the largest size, if they are part of the text.
        multiple: The step between sizes, if it is part of the text.
        offset: The remainder of the sizes by `multiple`.
        failed: A run that failed.
        line: ``file:line in function: code`` of the model; empty if it is unknown.
        runs: Sizes of the dim that break the rule, but ran. For an irregular rule: all that ran.
        fails: Sizes of the dim that failed.
        counts: The number of sets of sizes that failed, and the number that were tried.
        example: Sizes that ran.
        branch: A size outside of the rule at which the model takes another branch.
        opt: The declared opt, if the rule excludes it.
        padded: The padding of the dim, if the rule is on its padded size.
        untraced: True if the rule is one side of a branch, and what the model does on the other
            side can't be known.
        too_large: True if the model has a number at other sizes that ONNX can't hold.
    """

    kind: RuleKind
    dim: str
    others: tuple[str, ...] = ()
    refined: Dim | None = None
    suggested: Dim | None = None
    obstacle: Obstacle = ""
    size_rule: str = ""
    formula: str = ""
    ends: tuple[int, int] | None = None
    multiple: int = 1
    offset: int = 0
    failed: Refusal | None = None
    line: str = ""
    runs: tuple[int, ...] = ()
    fails: tuple[int, ...] = ()
    counts: tuple[int, int] = (0, 0)
    example: Mapping[str, int] = field(default_factory=dict)
    branch: int | None = None
    opt: int | None = None
    padded: PaddedDim | None = None
    untraced: bool = False
    too_large: bool = False

    def __str__(self) -> str:
        """The problem, its line in the model, and what to do."""
        place = f" ({self.line})" if self.line else ""
        return f"{self.text()}{place}; {self.advice()}"

    @property
    def one_dim(self) -> bool:
        """True if one Dim can replace all dims of the rule."""
        if self.obstacle == "equal":
            return True
        return self.kind == "equal" or (self.kind == "dependent" and bool(self.size_rule))

    @property
    def dims(self) -> tuple[str, ...]:
        """The names of all dims in the rule."""
        return (self.dim, *self.others)

    def text(self, subject: str = "the model") -> str:
        """The problem in one line.

        Args:
            subject: What ran: ``the model`` or ``the file``.
        """
        if self._fault and self.failed is not None:
            return f"{subject} raises {self._fault}: {self.failed.error}"
        what = self._demand(subject)
        if self.kind == "fixed" and self.failed is None:
            what += f": {subject} fixes it"
        if self.branch is not None:
            what += f" in one export: {subject} takes another branch at {self._name}={self.branch}"
        if self.obstacle == "equal":
            what += f" in one export: {subject} takes another branch where they are equal"
        if self.too_large:
            what += ": a number of sizes is too large for ONNX"
        if self.untraced:
            what += f" (torch can't trace all that {subject} does at other sizes)"
        if self.runs and self.kind in ("fixed", "range", "multiple"):
            what += f" ({subject} also runs at {self._name}={listed(self.runs)})"
        if self.failed is not None:
            sizes = self.failed.sizes
            own = {name: size for name, size in sizes.items() if name in self.dims}
            at = sizes_text(sizes if self.kind in ("nowhere", "expression") else own or sizes)
            what += f": {subject} fails at {at}: {self.failed.error}"
        return what

    def advice(self) -> str:
        """What to do: a phrase that starts with ``declare``, or to correct the model."""
        return FAULT_ADVICE if self._fault else f"declare {self.declaration()}"

    @property
    def by_values(self) -> bool:
        """True if the values of integer inputs may have caused the failure."""
        return self.failed is not None and _BY_VALUES.search(self.failed.error) is not None

    def declaration(self) -> str:
        """What to declare in place of the dim, or which rule to add."""
        if self.obstacle:
            return self._around()
        if self.refined is None:
            return self._inexpressible()
        if self.padded is not None:
            return self._for_padding(self.padded, self.refined)
        if self.kind == "band":
            return f'{dim_text(self.refined)}, or rules=("{self.size_rule}",)'
        if self.refined.static:
            return (
                f"the number {self.refined.min} in place of {self._plain}, or pass --allow-narrow "
                "(allow_narrow=True)"
            )
        return dim_text(self.refined)

    @staticmethod
    def _for_padding(padded: PaddedDim, refined: Dim) -> str:
        name, step = padded.dim.name, refined.multiple_of
        if step > padded.multiple or padded.refined is None:
            return f'Padding({{"{name}": {step}}})'
        return dim_text(padded.refined)

    def applied(self) -> AppliedRule:
        """The rule in the form that a manifest stores."""
        return AppliedRule(self.kind, self.dim, self.others, self.size_rule, self.line, self.text())

    @property
    def _fault(self) -> str:
        """The class of the error, if the model raises it at all sizes and no size is to blame."""
        return self.failed.fault if self.kind == "nowhere" and self.failed is not None else ""

    @property
    def _plain(self) -> str:
        """The dim's name as you declare it."""
        return self.padded.dim.name if self.padded else self.dim

    @property
    def _name(self) -> str:
        return f"{self.padded.dim.name} as padded" if self.padded else self.dim

    def _demand(self, subject: str) -> str:
        name, both = self._name, f"{self.dim} and {' and '.join(self.others)}"
        failed, tried = self.counts
        texts: dict[RuleKind, str] = {
            "band": f"{self.size_rule} must hold",
            "relation": f"{self.size_rule} must hold",
            "equal": f"{' and '.join(self.others)} must equal {self.dim}",
            "expression": f"{name} must be {self.formula}",
            "guard": f"{self.formula} must hold",
            "irregular": f"{name} can't be {listed(self.fails)}: {failed} of the {tried} sizes "
            f"that were tried fail{self._running}",
            "unsettled": f"{name} can't be {listed(self.fails)}, and the time ran out before a "
            "rule was found",
            "dependent": f"{both} depend on each other: {tried - failed} of the {tried} "
            f"{'pairs' if len(self.others) == 1 else 'sets'} that were tried run, such as "
            f"{sizes_text(self.example)}",
            "baked-in": f"{name} is baked in: {subject} makes a Python number of it",
            "example-size": f"torch.export fixes {name} at its example size, but {subject} runs at "
            f"{name}={listed(self.runs)} and fails at {name}={listed(self.fails)}",
            "nowhere": f"{subject} runs at none of the {tried} sets of sizes that were tried",
        }
        if self.kind in texts:
            return texts[self.kind]
        inside = f"{self.ends[0]}..{self.ends[1]}" if self.ends else ""
        if self.kind == "fixed":
            return f"{name} must be {self.ends[0] if self.ends else ''}"
        if self.kind == "range":
            return f"{name} must be in {inside}"
        return f"{name} must be {multiple_text(self.multiple, self.offset)}" + (
            f" in {inside}" if inside else ""
        )

    def _around(self) -> str:
        """What to declare if the pipeline can't use the narrower dim."""
        name, new = self._plain, self.suggested
        if self.obstacle == "zero":
            return f"no dim {name}: every Dim has a size above 0"
        if self.obstacle == "empty":
            return f"a range of {name} that has such a size"
        if self.obstacle == "padding-offset":
            return (
                f"{name} without padding: padding gives multiples only, and none of them is "
                f"{multiple_text(self.multiple, self.offset)}"
            )
        if self.obstacle == "equal":
            both = " and ".join(self.dims)
            return f"one Dim for both {both}, or ranges of {both} that share no size"
        if self.obstacle == "padding-empty" or new is None:
            return f"another range of {name}"
        rules = f' with rules=("{self.size_rule}",)' if self.size_rule else ""
        return f"{dim_text(new)}{rules}, which excludes your opt={self.opt}"

    @property
    def _running(self) -> str:
        return f", and {listed(self.runs)} run" if self.runs else ""

    @property
    def _stretch(self) -> str:
        """The longest run of neighbouring sizes that ran, as an example of a range."""
        ran, best = {*self.runs}, range(0)
        for size in self.runs:
            if size - 1 not in ran:
                end = next(n for n in range(size + 1, size + len(ran) + 1) if n not in ran)
                best = max(best, range(size, end), key=len)
        return f", such as {best[0]}..{best[-1]}" if len(best) > 1 else ""

    @property
    def _symbolic(self) -> str:
        """How to keep a size symbolic in the model's line."""
        for code, instead in _NUMBERS.items():
            if code in self.line:
                return instead
        return "keep it symbolic in that line"

    def _inexpressible(self) -> str:
        """What to declare if no Dim expresses the rule."""
        name = self._plain
        others = (n.removesuffix("_padded") if self.padded else n for n in self.others)
        both = " and ".join((name, *others))
        if self.one_dim:
            return f"one Dim for both {both}" if len(self.others) == 1 else f"one Dim for {both}"
        if self.kind == "expression" and self.others:
            return f"{self.formula} in place of {name}"
        if self.kind in ("band", "relation") and not self.padded:
            return rule_words(self.size_rule)
        texts: dict[RuleKind, str] = {
            "guard": self._guarded(both),
            "dependent": f"ranges of {both} in which every "
            f"{'pair' if len(self.others) == 1 else 'set'} runs: no Dim can express the rule",
            "irregular": f"a range of {name} in which all sizes run{self._stretch}: no Dim can "
            "express this rule, or try more sizes (--search-seconds N)",
            "unsettled": f"a smaller range of {name}",
            "baked-in": f"a number in place of {name}, or {self._symbolic}",
            "example-size": f"the sizes of {name} that run (auto=True finds them)",
            "nowhere": "other fixed sizes (such as channels), axes or dtypes of the inputs, their "
            "values (--range), or ranges with sizes at which the model runs",
        }
        return texts.get(self.kind, f"only such sizes of {name}: no Dim can express this rule")

    def _guarded(self, both: str) -> str:
        """What to declare to keep a guard: the rule to paste, if the size language has it."""
        ranges = f"ranges of {both} that keep this rule"
        try:
            SizeRule("" if self.padded else self.formula)
        except InputError:  # it is in torch's words
            return f"{ranges}: no Dim can express it"
        excludes = "" if self.opt is None else ", which excludes your opt"
        return f"{rule_words(self.formula)}{excludes}, or {ranges}"


# code that makes a number of a size, and what to do instead
_NUMBERS = {
    "math.sqrt(": "write n ** 0.5 in place of math.sqrt(n) in that line",
    "shape.numel()": "write x.numel() in place of x.shape.numel() in that line",
    "size().numel()": "write x.numel() in place of x.size().numel() in that line",
    "kaiser_window(": "pass the window to the model as an input",
    "tril_indices(": "write torch.ones(n, n).tril(offset) as a mask in place of the indices",
    "triu_indices(": "write torch.ones(n, n).triu(offset) as a mask in place of the indices",
    " in range(": "compute the whole axis at once, in place of a loop over its elements",
}


@dataclass(frozen=True)
class AppliedRule:
    """A rule that narrowed a spec, in a form that a manifest stores as JSON.

    Args:
        kind: The kind of the rule.
        dim: The name of the dim that the rule restricts.
        others: The names of the other dims in the rule.
        size_rule: The rule as in `ModelSpec.rules`; empty if there is no such text.
        line: ``file:line in function: code`` of the model; empty if it is unknown.
        text: The text of the rule, for people only.
    """

    kind: RuleKind
    dim: str
    others: tuple[str, ...]
    size_rule: str
    line: str
    text: str


def merged_dims(rules: Sequence[AppliedRule], dims: Mapping[str, Dim]) -> dict[str, str]:
    """For each dim that the rules merged into one of `dims`, the name of that dim."""
    groups: list[set[str]] = []
    for rule in rules:
        equal = SizeRule(rule.size_rule) if rule.size_rule else None
        if (
            equal is None
            or equal.sign != "=="
            or equal.names != {equal.left.text, equal.right.text}
        ):
            continue
        group = set(equal.names).union(*(other for other in groups if other & equal.names))
        groups = [*(other for other in groups if not other & equal.names), group]
    merged: dict[str, str] = {}
    for group in groups:
        left = group & dims.keys()
        if len(left) == 1:  # otherwise the rule stays a rule
            merged |= dict.fromkeys(sorted(group - left), min(left))
    return merged


def multiple_text(multiple: int, offset: int) -> str:
    """``odd``, ``a multiple of 8``, ``1 more than a multiple of 32``."""
    if offset == 0:
        return f"a multiple of {multiple}"
    return "odd" if multiple == 2 else f"{offset} more than a multiple of {multiple}"


def rule_words(size_rule: str) -> str:
    """How to declare a rule on sizes, in Python and on the command line."""
    return f'rules=("{size_rule}",) (on the command line: --rule "{size_rule}")'


def dim_text(dim: Dim) -> str:
    """The dim as you write it in Python, and on the command line: ``--dim h=16:32:64``."""
    step = f", multiple_of={dim.multiple_of}" if dim.multiple_of > 1 else ""
    step += f", offset={dim.offset}" if dim.offset else ""
    word = f"/{dim.multiple_of}" if dim.multiple_of > 1 else ""
    word += f"+{dim.offset}" if dim.offset else ""
    return (
        f'Dim("{dim.name}", min={dim.min}, opt={dim.opt}, max={dim.max}{step}) '
        f"(on the command line: --dim {dim.name}={dim.min}:{dim.opt}:{dim.max}{word})"
    )


def listed(sizes: Sequence[int]) -> str:
    """The first few sizes: ``1, 4, 9, 12, 15, 20, ...``."""
    return ", ".join(map(str, sizes[:_LISTED])) + (", ..." if len(sizes) > _LISTED else "")
