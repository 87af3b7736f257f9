"""Which passes the installed TensorRT still needs: every pass's cases, without it and with it."""

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
    """One case, as it stands and after the passes.

    `covered`: it fails, and passes that are said to be needed mend it without this one, which
    is not.
    """

    case: Case
    without: Outcome
    after: Outcome
    covered: bool = False


@dataclass(frozen=True)
class Verdict:
    """What the cases of one pass say of it on the installed TensorRT.

    Args:
        declared: whether the pass's data say that this version needs it.
        answer: ``needed`` if a case fails without it and all are right with it; ``broken`` if a
            case fails with it; ``needless`` if all are right without it, numbers compared;
            ``open`` if none fails, but no GPU here could compare the numbers, or the need is not
            measured but read or assumed, so that the cases may not show it.
        left_out: the cases that this target can't bring out right, and why (`Case.not_for`).
    """

    name: str
    declared: bool
    answer: Answer
    trials: tuple[Trial, ...]
    left_out: tuple[tuple[str, str], ...] = ()

    @property
    def contradicted(self) -> bool:
        """True if the data say something else than the cases."""
        wrong = {"needed": not self.declared, "needless": self.declared, "broken": True}
        return wrong.get(self.answer, False)


def installed_target(name: str | None = None) -> Target:
    """The TensorRT that is installed here, in just its version, known by name or not.

    Raises:
        TargetMissing: none is, or not the one of that name.
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
        f"no TensorRT{f' for target {name}' if name else ''} is installed: {wanted}"
    )


def still_needed(
    target: Target,
    passes: Sequence[Pass] = DEFAULT_PASSES,
    cases: Iterable[Case] = CASES,
    only: Sequence[str] = (),
) -> Iterator[Verdict]:
    """Parses and builds every positive case of every pass, as it stands and after the passes
    that the target needs and that one. Clean-up passes mend nothing and are left out, and so are
    cases that are not for the target: these are listed.

    Args:
        target: see `installed_target`.
        only: names of passes, if not all.
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
                yield Verdict(p.name, p.needed_by(target), answer, trials, left_out)


def _not_for(case: Case, target: Target) -> bool:
    return target.name in case.not_for


def _is_measured(p: Pass, target: Target) -> bool:
    """False if the pass is declared for the target on what was read or assumed alone."""
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
    """The model after these passes, in order, each checked as in the rewrite stage."""
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
