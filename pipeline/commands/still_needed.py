"""Finds the passes that the installed TensorRT still needs, by their cases."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import onnx

from pipeline.build.try_graph import Outcome, attempt
from pipeline.errors import TargetMissing
from pipeline.machine.child import Child
from pipeline.machine.gpu import why_not
from pipeline.machine.target import TARGETS, Target, installed_version
from pipeline.passes import DEFAULT_PASSES, Pass
from pipeline.passes.case import Case
from pipeline.passes.cases import CASES
from pipeline.rewrite.surgeon import Surgeon

Answer = Literal["needed", "needless", "open", "covered", "broken"]


@dataclass(frozen=True)
class Trial:
    """The outcomes of one case, without the pass and with all needed passes.

    `covered` is True if the case fails, the target does not declare this pass, and the declared
    passes fix the case.
    """

    case: Case
    without: Outcome
    after: Outcome
    covered: bool = False


@dataclass(frozen=True)
class PassAnswer:
    """The result of one pass's cases on the installed TensorRT.

    Args:
        declared: Whether the pass declares that this version needs it.
        answer: ``needed``: a case fails without the pass, and all are right with the pass.
            ``broken``: a case fails with the pass. ``needless``: all cases are right without the
            pass, with compared numbers. ``covered``: other passes fix the cases. ``open``: no case
            fails, but no GPU compared the numbers, or the need was read or assumed, not measured.
        left_out: The cases that are not for this target, with the reason (`Case.not_for`).
    """

    name: str
    declared: bool
    answer: Answer
    trials: tuple[Trial, ...]
    left_out: tuple[tuple[str, str], ...] = ()

    @property
    def contradicted(self) -> bool:
        """True if the cases contradict the declared need."""
        wrong = {"needed": not self.declared, "needless": self.declared, "broken": True}
        return wrong.get(self.answer, False)


def installed_target(name: str | None = None) -> Target:
    """Returns the installed TensorRT as a target, also if its version has no name.

    Raises:
        TargetMissing: No TensorRT is installed, or not the version of that name.
    """
    known = [TARGETS[name]] if name else list(TARGETS.values())
    for target in known:
        version = installed_version(target)
        if version is None:
            continue
        numbers = tuple(int(n) for n in re.findall(r"\d+", version)[:3])
        if name and numbers[: len(target.version)] != target.version:
            continue
        same = [
            t for t in TARGETS.values()
            if t.flavour == target.flavour and numbers[: len(t.version)] == t.version
        ]  # fmt: skip
        if same:
            return same[0]
        return Target(
            f"{target.flavour} {version}", target.flavour, numbers, True, target.max_opset, ""
        )
    wanted = TARGETS[name].get if name else "; or ".join(t.get for t in TARGETS.values())
    raise TargetMissing(
        f"no TensorRT{f' for target {name}' if name else ''} is installed. Install: {wanted}"
    )


def still_needed(
    target: Target,
    passes: Sequence[Pass] = DEFAULT_PASSES,
    cases: Iterable[Case] = CASES,
    only: Sequence[str] = (),
) -> Iterator[PassAnswer]:
    """Parses and builds every positive case of every pass, without and with the pass.

    "With the pass" means after all passes that the target needs, and the tested pass. Clean-up
    passes fix nothing, so they are not tested. Cases that are not for the target are listed.

    Args:
        target: The result of `installed_target`.
        passes: The passes to test.
        cases: The cases of these passes.
        only: Names of the passes to test; empty for all.
    """
    cases = list(cases)
    gpu = not why_not(target)
    with Child() as child:
        for p in passes:
            if p.clean_up or (only and p.name not in only):
                continue
            mine = [c for c in cases if c.pass_name == p.name and c.kind == "positive"]
            left_out = tuple((c.name, c.not_for[target.name]) for c in mine if _not_for(c, target))
            trials = tuple(
                _try(child, case, p, target, passes) for case in mine if not _not_for(case, target)
            )
            if mine:
                answer = _answer(trials, gpu and _is_measured(p, target))
                yield PassAnswer(p.name, p.needed_by(target), answer, trials, left_out)


def _not_for(case: Case, target: Target) -> bool:
    return target.name in case.not_for


def _is_measured(p: Pass, target: Target) -> bool:
    """True unless the need of the target was only read or assumed."""
    bases = {needs.basis for needs in p.targets if needs.covers(target)}
    return not bases or "measured" in bases


def _try(child: Child, case: Case, p: Pass, target: Target, passes: Sequence[Pass]) -> Trial:
    feeds = [case.feeds(shapes) for shapes in case.shapes]
    without = attempt(child, case.model(), feeds, target, case.precision)
    declared = [q for q in passes if q.needed_by(target)]
    both = [q for q in passes if q is p or q in declared]
    after = attempt(child, apply(case.model(), both), feeds, target, case.precision)
    covered = False
    if p not in declared and without.failed:
        model = apply(case.model(), declared)
        covered = not attempt(child, model, feeds, target, case.precision).failed
    return Trial(case, without, after, covered)


def apply(model: onnx.ModelProto, passes: Sequence[Pass]) -> onnx.ModelProto:
    """Runs these passes in order, and checks each as the rewrite stage does."""
    surgeon = Surgeon(model)
    for n, p in enumerate(passes):
        surgeon.run(p, [q.name for q in passes[:n]])
    return surgeon.model


def _answer(trials: Sequence[Trial], decides: bool) -> Answer:
    if any(trial.after.failed for trial in trials):
        return "broken"
    fails = [trial for trial in trials if trial.without.failed]
    if fails:
        return "covered" if all(trial.covered for trial in fails) else "needed"
    compared = bool(trials) and all(trial.without.verdict == "right" for trial in trials)
    return "needless" if decides and compared else "open"
