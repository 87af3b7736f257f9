"""The notes of a comparison or a regression check: findings beside the verdicts, by kind.

Code decides on a note's kind and facts. Its text is for people and is never read back. `NOTES`
lists every kind with its meaning and its sentence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from pipeline.spec.dims import sizes_text

Fact = int | float | str | None | tuple[int | str, ...] | Mapping[str, int]
Facts = Mapping[str, Fact]

NoteKind = Literal[
    "too-large",
    "not-stored",
    "one-run",
    "nothing-compared",
    "no-size-keeps-the-rules",
    "profile-not-stored",
    "profile-too-large",
    "source-is-onnx",
    "only-exported",
    "model-unchanged",
    "half-not-built",
    "sizes-not-inferred",
    "memory-not-counted",
    "shape-inference-not-run",
    "shape-inference-agrees",
    "sizes-left-to-the-run",
    "no-batch-dim",
    "rows-nothing-compared",
    "rows-too-large",
    "no-two-rows",
    "profile-without-two-rows",
    "engine-out-of-memory",
    "check-out-of-memory",
    "check-not-done",
    "outputs-not-stored",
    "random-sizes",
    "quick",
    "no-engine-tolerance",
    "wide-tolerance",
    "weak-parts",
    "near-zero",
    "only-zeros",
    "no-elements",
    "values-given",
    "values-at-other-sizes",
    "few-values",
    "one-value",
    "equal-rows",
    "input-changed",
    "output-changed",
    "dim-removed",
    "dim-narrowed",
    "profile-narrowed",
    "precision-changed",
    "rule-added",
    "tolerance-widened",
    "engine-tolerance-widened",
    "size-not-compared",
    "engine-not-compared",
    "input-refused",
    "output-differs",
    "error-too-large",
    "error-grew",
    "no-regression",
    "no-regression-without-engine",
]


class Kind(NamedTuple):
    """What a kind of finding means, and its sentence.

    Args:
        meaning: One line for the reference page.
        text: A format string over the finding's facts.
    """

    meaning: str
    text: str


_AT = "{label} ({sizes})"
_OUTPUT_OF = "{output} of {run} at {label} ({sizes}): "

NOTES: Mapping[NoteKind, Kind] = {
    # why a set of sizes was not compared (`PointInfo.left_out`)
    "too-large": Kind(
        "The estimated memory of a run is over the limit.",
        "needs about {need_bytes}, the limit is {limit_bytes}",
    ),
    "not-stored": Kind(
        "The artifact does not store the reference's outputs at these sizes.",
        "the outputs of {run} are not stored at these sizes; pass --torch to run the model again",
    ),
    "one-run": Kind(
        "Only one run exists, so there is nothing to compare.",
        "only {run} ran. --reference FILE compares it with another ONNX file",
    ),
    # what fails a comparison although no verdict does (`FAILING`)
    "nothing-compared": Kind(
        "Every set of sizes is over the memory limit.",
        "nothing was compared: every set of sizes is over the memory limit. Raise --memory-limit",
    ),
    "no-size-keeps-the-rules": Kind(
        "No chosen size of a profile keeps the model's rules.",
        "profile {profile}: none of its sizes was compared, because none keeps the rules. "
        "Give the profile other ranges",
    ),
    "profile-not-stored": Kind(
        "The artifact stores no reference outputs for any size of a profile.",
        "profile {profile}: none of its sizes was compared, because the outputs of torch are not "
        "stored for them. Pass --torch to run the model again",
    ),
    # notes of a comparison
    "profile-too-large": Kind(
        "Every size of a profile is over the memory limit.",
        "profile {profile}: none of its sizes was compared, because all need more memory than the "
        "limit",
    ),
    "source-is-onnx": Kind(
        "The source is an ONNX file, so exported.onnx is the reference.",
        "exported.onnx is the source itself, so it is the reference",
    ),
    "only-exported": Kind(
        "model.onnx does not exist yet.",
        "only exported.onnx was compared: model.onnx does not exist yet",
    ),
    "model-unchanged": Kind(
        "model.onnx and exported.onnx are the same file, which runs once.",
        "no rewrite was needed: model.onnx equals exported.onnx, and ran once",
    ),
    "half-not-built": Kind(
        "half.onnx does not exist yet; the comparison used what it is going to be.",
        "half.onnx is not built yet: model.onnx was compared in half precision",
    ),
    "sizes-not-inferred": Kind(
        "ONNX's shape inference failed, so output sizes were not checked before the run.",
        _AT + ": output sizes were not checked before the run: {reason}",
    ),
    "memory-not-counted": Kind(
        "The memory estimate leaves out tensors of unknown size.",
        _AT + ": the memory of {count} tensors of unknown size is not counted",
    ),
    "shape-inference-not-run": Kind(
        "TensorRT's shape inference could not run.",
        "output sizes were not compared with TensorRT's shape inference: {reason}",
    ),
    "shape-inference-agrees": Kind(
        "At how many sets of sizes TensorRT's shape inference gives the declared output sizes.",
        "TensorRT's shape inference agrees on the output sizes at {count} of {of} sets of sizes",
    ),
    "sizes-left-to-the-run": Kind(
        "TensorRT knows these output sizes only when it runs.",
        "TensorRT knows these output sizes only when it runs: {names}",
    ),
    "no-batch-dim": Kind(
        "No dim is only the first axis of inputs and outputs, or it bounds an input's values.",
        "batch rows were not checked: no dim is only the first axis of inputs and outputs, and "
        "bounds no values",
    ),
    "rows-nothing-compared": Kind(
        "No size was compared, so no batch rows were checked.",
        "batch rows were not checked: no size was compared",
    ),
    "rows-too-large": Kind(
        "A batch of two rows is over the memory limit.",
        "batch rows were not checked: two rows are over the memory limit",
    ),
    "no-two-rows": Kind(
        "The batch dimension allows no two rows.",
        "batch rows were not checked: dim {name} allows no two rows",
    ),
    "profile-without-two-rows": Kind(
        "A profile allows no two rows at the sizes that ran.",
        "batch rows of {run} were not checked: profile {profile} allows no two rows at the sizes "
        "that ran",
    ),
    "engine-out-of-memory": Kind(
        "The engine did not run at a set of sizes: the GPU's memory is too small.",
        "{run} was not compared at " + _AT + ": {reason}",
    ),
    "check-out-of-memory": Kind(
        "A check was left out at a set of sizes: the GPU's memory is too small.",
        "{check} of {run}: not done at {at}: {reason}",
    ),
    "check-not-done": Kind(
        "A check was not done: no set of sizes fits into the GPU's memory.",
        "{check} of {run}: not done, no size fits into the GPU's memory: at {names}: {reason}",
    ),
    "outputs-not-stored": Kind(
        "A run's outputs are not stored, since it did not run at every size of a profile.",
        "outputs of {run} are not stored: {count} of {of} sizes of profile {profile} did not run",
    ),
    "random-sizes": Kind(
        "Further sizes were compared, which were chosen at random.",
        "{count} more sets of sizes were compared, chosen at random",
    ),
    "quick": Kind(
        "Only a few sizes were compared, because you passed `--quick`. Branches of the model that "
        "other branches hide were looked for less far.",
        "compared only at min, opt, max and one odd set of sizes of each profile, because of "
        "--quick. A branch that hides behind another may be missed. Before you use the engine, "
        "convert without --quick",
    ),
    "no-engine-tolerance": Kind(
        "No tolerance is stated for engines of this precision.",
        "no tolerance is stated for {precision} engines: the fp32 tolerance was used",
    ),
    "wide-tolerance": Kind(
        "Rounding alone moves an output so far that its measured tolerance could hide a fault.",
        "{output}: rounding to {precision} alone moves it so far that atol={atol} is allowed, "
        "{share} of its root mean square. A fault could hide in that{chosen}. Judge the engine in "
        "your program, or state a tolerance (--engine-tolerance {output}=RTOL,ATOL)",
    ),
    "weak-parts": Kind(
        "Some values of an output are so small that its tolerance could hide a fault in them.",
        "{output}: {count} of {of} indices of axis {axis} ({names}) have a root mean square of at "
        "most {rms}. atol={atol} could hide a fault in them. Make them a separate output, or state "
        "a smaller tolerance (--tolerance {output}=RTOL,ATOL, or tolerance= of the Output)",
    ),
    "near-zero": Kind(
        "Every value of an output is below its atol at some sizes, so these say nothing about it.",
        "{output} of {run}: {count} of {of} sets of sizes say nothing, because every value of "
        "{reference} is below atol there. The others were judged",
    ),
    "only-zeros": Kind(
        "Every value of an output is 0 at all compared sizes.",
        "{output} of {run}: every value of {reference} is 0 at all compared sizes, and {run} has "
        "the same zeros. If other inputs give other values, compare with them (--range, or low= "
        "and high=)",
    ),
    "no-elements": Kind(
        "An output has no elements at all compared sizes.",
        "{output} has no elements at the compared sizes: nothing was compared",
    ),
    "values-given": Kind(
        "The comparison used the user's values of these inputs.",
        "your values of {names} were used in place of random ones (inputs.npz)",
    ),
    "values-at-other-sizes": Kind(
        "The model does not accept the sizes of the user's values.",
        "the model does not accept the sizes of your values of {names}: they were cropped and "
        "repeated to other sizes",
    ),
    "few-values": Kind(
        "The random values of an integer input are two numbers only.",
        "the random values of {input} were only {low} and {high}. If the model takes others, give "
        "a range (--range {input}=0..1000, or low= and high= of the Input) or your own values "
        "(--inputs)",
    ),
    "one-value": Kind(
        "A bool or an integer input had the same value everywhere.",
        "every value of {input} was {value}: a model that does something else at other values was "
        "not compared there (--range, or --inputs)",
    ),
    "equal-rows": Kind(
        "The user's values have the same sample in each row, so mixed rows do not show.",
        "rows that mix do not show, because your values of {names} are the same in each row. Pass "
        "at least two different rows",
    ),
    # what a regression check found
    "input-changed": Kind(
        "An input is missing, or has another type or shape.",
        "input {name} was {was}, is {now}",
    ),
    "output-changed": Kind(
        "An output is missing, or has another type or shape.",
        "output {name} was {was}, is {now}",
    ),
    "dim-removed": Kind("A dim no longer exists.", "dim {name} no longer exists"),
    "dim-narrowed": Kind("A dim allows fewer sizes.", "dim narrowed: {was} is now {now}"),
    "profile-narrowed": Kind(
        "No profile allows sizes that a profile allowed.",
        "profile {profile}: no profile allows its {which} {sizes} any more",
    ),
    "precision-changed": Kind("The precision is another one.", "precision was {was}, is {now}"),
    "rule-added": Kind("A new rule restricts the sizes.", "rule added: {rule}"),
    "tolerance-widened": Kind(
        "The tolerance of an output allows larger errors.",
        "tolerance of {output} widened from {was} to {now}",
    ),
    "engine-tolerance-widened": Kind(
        "The engine's tolerance allows larger errors.",
        "tolerance of {output} of the engine widened from {was} to {now}",
    ),
    "size-not-compared": Kind(
        "A set of sizes was compared before and is not now.",
        "{sizes} was compared before and is not now",
    ),
    "engine-not-compared": Kind(
        "The engine was compared before and is not now.",
        "the engine was compared before and is not now: {reason}",
    ),
    "input-refused": Kind(
        "The new artifact refuses a stored input.",
        "the new artifact refuses a stored input: {reason}",
    ),
    "output-differs": Kind(
        "The new model's output differs from the old model's.",
        "{output} at " + _AT + ": {reason}",
    ),
    "error-too-large": Kind(
        "A run's error is beyond the old tolerance.",
        _OUTPUT_OF + "differs from {reference} by up to {error}; the error before was {before}",
    ),
    "error-grew": Kind(
        "A run's error grew, and uses up more of the tolerance.",
        _OUTPUT_OF + "its error grew from {before} to {error}, {part_share} of the tolerance",
    ),
    "no-regression": Kind(
        "Nothing got worse, and the engine was compared.",
        "no regression against {path}. Sizes compared: {count}. Engine: compared",
    ),
    "no-regression-without-engine": Kind(
        "Nothing got worse; the engine was not compared.",
        "no regression against {path}. Sizes compared: {count}. Engine: not compared: {reason}",
    ),
}

FAILING: frozenset[NoteKind] = frozenset(
    {"nothing-compared", "no-size-keeps-the-rules", "profile-not-stored"}
)


@dataclass(frozen=True)
class Note:
    """One finding.

    Args:
        kind: One of `NOTES`.
        facts: The numbers and names of the finding. The fact `sizes` is a size by dim.
        text: The sentence. If empty, it is made from the kind and the facts. A stored text stays
            as it was written.
    """

    kind: NoteKind
    facts: Facts = field(default_factory=dict)
    text: str = ""

    def __post_init__(self) -> None:
        if not self.text:
            object.__setattr__(self, "text", NOTES[self.kind].text.format_map(shown(self.facts)))

    def __str__(self) -> str:
        return self.text

    @property
    def fails(self) -> bool:
        """True if a comparison with this note does not pass."""
        return self.kind in FAILING

    @property
    def subject(self) -> tuple[object, ...]:
        """What the note is about without the sizes: equal for one finding at several sizes."""
        leave = ("label", "sizes", "reason")
        facts = sorted((k, str(v)) for k, v in self.facts.items() if k not in leave)
        return (self.kind, *facts)


def note(kind: NoteKind, **facts: Fact) -> Note:
    """A note of a kind, with its facts by keyword."""
    return Note(kind, facts)


def shown(facts: Facts) -> dict[str, str]:
    """The facts as text, for a format string."""
    return {name: _show(name, value) for name, value in facts.items()}


def _show(name: str, value: Fact) -> str:
    if isinstance(value, Mapping):
        return sizes_text(value)
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    if isinstance(value, int | float):
        return _show_number(name, value)
    return "unknown" if value is None else value


def _show_number(name: str, value: float) -> str:
    if name.endswith("_bytes"):
        large = value >= 2**30 / 10
        return f"{value / 2**30:.1f} GiB" if large else f"{value / 2**20:.1f} MiB"
    if name.endswith("_share"):
        return f"{value:.0%}"
    return f"{value:.3g}" if isinstance(value, float) else str(value)
