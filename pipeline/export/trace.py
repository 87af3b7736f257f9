"""Runs torch.export on a spec's model, and narrows dims as the model needs and the spec allows.

The example sizes are small, odd and different from each other, so that no guard holds by chance.
If the model itself fails there (h must be a multiple of 8), it is tried at rounder sizes. There
torch's guards show the rules of the model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch

from pipeline.errors import ConstraintError, ExportError
from pipeline.export.asked import Line
from pipeline.export.broken_rules import broken_rules
from pipeline.export.guards import differs, unguarded
from pipeline.export.module import inner
from pipeline.export.number_branches import arithmetic_lines
from pipeline.export.torch_call import (
    LEAST,
    TORCH,
    Task,
    Traced,
    declared_sizes,
    torch_export,
)
from pipeline.export.torch_messages import GuardLog, find_rules, fixed_dims, of_rounding
from pipeline.export.trace_rules import (
    excluded,
    find_baked,
    keep_opt,
    one_sided,
    with_branch,
    without_opt,
)
from pipeline.machine.resources import Stopwatch
from pipeline.probe.apply import apply as narrowed_by
from pipeline.probe.apply import constraint_error, for_user, may_apply
from pipeline.probe.eager import EagerModule, quiet
from pipeline.probe.grid import legal_sizes
from pipeline.probe.history import kept_values
from pipeline.probe.sample_sizes import dims_of
from pipeline.spec.dims import Dim, DimExpr, kept_rules, sizes_text
from pipeline.spec.model import ModelSpec
from pipeline.spec.rules import Rule
from pipeline.spec.tensors import Input

_SIDES = 3  # most examples that may take another side of a branch
_WRITES = 4  # most sets of sizes at which the module keeps something, and is called once more
_MOST = 1 << 12  # most sizes of a dim that are counted
_ROUNDS = 6  # most exports with narrowed dims: multiple, then range, then another dim


def trace(
    spec: ModelSpec,
    module: torch.nn.Module,
    seed: int,
    watch: Stopwatch,
    *,
    quick: bool = False,
) -> tuple[ModelSpec, torch.export.ExportedProgram, list[Rule]]:
    """Exports the module inside the spec's padding.

    Args:
        spec: the spec.
        module: the module that the spec builds.
        seed: the seed of the example inputs' values.
        watch: the clock that the seconds inside torch are added to.
        quick: whether to look less far for branches behind other branches.

    Returns:
        The spec with its dims narrowed, the program, and the rules that narrowed them.

    Raises:
        ConstraintError: the model does not run at every size of a dim.
        ExportError: torch can't export the model for another reason, or it remembers earlier calls.
    """
    applied: list[Rule] = []
    arithmetic: frozenset[Line] = frozenset()
    for _ in range(_ROUNDS):
        task = Task(spec, module, seed, watch, quick, arithmetic)
        found = _with_arithmetic(_found(task))
        arithmetic, rules = found.task.arithmetic, found.rules
        if found.program is not None and not rules:
            _forgetful(found.task)
            return spec, found.program, applied
        if not all(may_apply(spec, rule) for rule in rules):
            raise constraint_error(spec, rules)
        spec = narrowed_by(spec, rules).spec
        applied += rules
    raise ExportError(
        f"model {spec.name}: torch.export asks for one more rule after {_ROUNDS} rounds: "
        + "; ".join(map(str, applied))
    )


def _forgetful(task: Task) -> None:
    """Raises an error if the module remembers a call on another side of one of its branches."""
    if task.writes:
        most = list(task.writes.values())[:_WRITES]
        kept_values(task.spec, task.module, inner(task.module), task.seed, most)


@dataclass(frozen=True)
class _Found:
    """What the exports of a task gave.

    Args:
        task: the task.
        program: a program that serves the sizes that keep the rules; None if there is none yet.
        rules: the rules that the sizes have to keep.
    """

    task: Task
    program: torch.export.ExportedProgram | None
    rules: list[Rule]

    @cached_property
    def kept(self) -> float:
        """The number of sets of sizes that the rules leave; 0 if they can't be applied.

        For a dim with more than `_MOST` sizes, the number is estimated from a sample of its sizes.
        """
        spec = self.task.spec
        if not all(may_apply(spec, rule) for rule in self.rules):
            return 0
        new = narrowed_by(spec, self.rules).spec
        left = 1.0
        for dim in new.dims.values():
            tried = legal_sizes(dim, _MOST)
            share = sum(kept_rules(new.rules, {dim.name: n}) for n in tried) / len(tried)
            left *= share * len(range(dim.min, dim.max + 1, dim.multiple_of))
        return left


def _found(task: Task) -> _Found:
    """The first program that serves every size, or the rules of the best one."""
    spec = task.spec
    whole = _for_every_size(task)
    if whole is not None:
        return _Found(task, whole, [])
    program, rules = _attempt(task)
    whole = _from_the_other_side(task, rules)
    if whole is not None:
        return _Found(task, whole, [])
    for skip in range(1, _SIDES) if one_sided(rules, spec) else ():
        with contextlib.suppress(ExportError):  # then the first attempt's rules stay
            rounder = _attempt(task, skip)
            kept = keep_opt(rounder[1], spec)
            clear = not one_sided(rounder[1], spec) and (kept or not keep_opt(rules, spec))
            if clear or (kept and not keep_opt(rules, spec)):
                program, rules = rounder
            if clear:
                break
    rules = [for_user(rule, spec) for rule in rules]
    return _Found(task, program, [without_opt(r, spec.dims.get(r.dim)) for r in rules])


def _with_arithmetic(found: _Found) -> _Found:
    """The same, or with branches that only choose numbers as arithmetic, if that keeps more sizes.

    Such a branch may hide others, so this is done again while there are more.
    """
    while found.rules:
        task = found.task
        lines = task.arithmetic | arithmetic_lines(task.heard)
        if lines == task.arithmetic:
            break
        with contextlib.suppress(ExportError):
            other = _found(task.with_arithmetic(lines))
            if other.kept > found.kept:
                found = other
                continue
        break
    return found


def _for_every_size(task: Task) -> torch.export.ExportedProgram | None:
    """A program for every size, if one of the first examples takes a side that serves all.

    torch itself is not asked for its rules: that takes as long as an export.
    """
    if not _each_once(task.eager.inputs):
        return None
    for sizes in task.examples[:_SIDES]:
        program, rules = _relaxed(task, sizes)
        if program is None:
            rules = [with_branch(rule, task.eager) for rule in rules]
            program = _from_the_other_side(task, rules)
        if program is not None:
            return program
        if not one_sided(rules, task.spec):
            return None
    return None


def _from_the_other_side(task: Task, rules: Sequence[Rule]) -> torch.export.ExportedProgram | None:
    """A program for every size, exported at sizes that the rules of the first one exclude."""
    if not one_sided(rules, task.spec):
        return None
    sizes = excluded(rules, task.eager, task.examples[0])
    return None if sizes is None else _relaxed(task, sizes)[0]


def _attempt(task: Task, skip: int = 0) -> tuple[torch.export.ExportedProgram | None, list[Rule]]:
    """Calls `_export_once`. Rules that the model does not need itself get a `branch`."""
    program, rules = _export_once(task, skip)
    return program, [with_branch(rule, task.eager) for rule in rules]


def _export_once(task: Task, skip: int) -> tuple[torch.export.ExportedProgram | None, list[Rule]]:
    """A program, or the rules that torch needs before it makes one.

    `skip` is the number of example sizes to leave out, if there are more.
    """
    spec, eager = task.spec, task.eager
    first: ExportError | None = None
    example_sizes = task.examples[skip:] or task.examples
    for sizes in example_sizes:
        if first is None and _each_once(eager.inputs):
            relaxed, broken = _relaxed(task, sizes)
            if relaxed is not None:
                return relaxed, broken
            if broken and all(rule.refined or rule.size_rule for rule in broken):
                return None, find_baked(broken, eager, sizes, example_sizes)
        log = GuardLog(Path(TORCH))
        try:
            with task.watch("torch.export"), log:
                traced = _exported(task, sizes)
        except ConstraintError as error:
            relaxed, broken = _relaxed(task, sizes)
            if relaxed is not None:
                return relaxed, []
            rules = _explain(eager, str(error), log) or broken
            if any(rule.size_rule for rule in broken):  # torch suggests fewer sizes
                rules = broken
            if not rules:
                lines = [line.strip(" -") for line in str(error).strip().splitlines()]
                raise ExportError(
                    f"model {spec.name}: torch.export: {' '.join(lines[:2])}", detail=str(error)
                ) from error
            return None, find_baked(rules, eager, sizes, example_sizes)
        except ExportError as error:
            first = first or error
            if not eager.runs_at(sizes):
                continue
            relaxed, broken = _relaxed(task, sizes)
            if relaxed is None and not broken:  # the model runs, but torch can't export it
                raise
            return relaxed, broken
        rules = broken_rules(traced, task, log)
        if first is not None and not rules:
            text = str(first).removesuffix(f"; {first.do}") if not first.others else first.what
            raise ExportError(
                f"{text} (the model fails at {sizes_text(example_sizes[0])}, and exports "
                f"from an example at {sizes_text(sizes)}; torch.export does not say at which sizes "
                "it runs)",
                detail=first.detail,
                do=first.do,
                others=first.others,
            )
        return traced.program, rules
    assert first is not None
    raise first


def _exported(task: Task, sizes: Mapping[str, int]) -> Traced:
    """The program. A dim of few sizes has a larger range for torch, unless the model refuses that.

    Raises:
        ConstraintError, ExportError: see `torch_export`.
    """
    eager, tolerance = task.eager, task.spec.tolerance
    assert tolerance is not None  # given or measured
    try:
        return torch_export(task, sizes)
    except ConstraintError as error:
        short = [
            dim
            for dim in dims_of(eager.inputs).values()
            if not dim.static and dim.max // dim.multiple_of < LEAST
        ]
        if not short:
            raise
        try:
            traced = torch_export(task, sizes, least=0)
            graph = unguarded(traced.program)
            for dim in short:  # torch may have made a number of it
                for size in legal_sizes(dim, LEAST):
                    with torch.no_grad(), quiet(), eager.state.restored():
                        if differs(graph, eager, {**sizes, dim.name: size}, tolerance, sizes):
                            raise error
        except ExportError:
            raise error from None
        return traced


def _each_once(inputs: Sequence[Input]) -> bool:
    """True if torch's Dim says no more about the dims than their ranges.

    Each is then the size of one axis. torch refuses guards that it can't prove, and most of these
    hold, so it is faster to check the guards here at once.
    """
    sizes = [size for i in inputs for size in i.shape if not isinstance(size, int)]
    names = [size.name for size in sizes if isinstance(size, Dim)]
    return len(set(names)) == len(sizes) and not any(
        isinstance(size, DimExpr) or size.multiple_of > 1 or size.offset for size in sizes
    )


def _relaxed(
    task: Task, sizes: Mapping[str, int]
) -> tuple[torch.export.ExportedProgram | None, list[Rule]]:
    """The program, if the guards that torch.export refuses do not matter; otherwise the rules.

    A guard may only choose a faster way, and torch can't distinguish that from a rule of the
    model. For example, ``x[:, : n // 2]`` counts as contiguous where n is 1 or odd. A guard that
    can't be evaluated is a rule here: only torch could have checked it.
    """
    key = tuple(sizes.items())
    if key not in task.relaxed:
        task.relaxed[key] = (None, [])
        log = GuardLog(Path(TORCH))
        with contextlib.suppress(ExportError), task.watch("torch.export"), log:
            traced = torch_export(task, sizes, relaxed=True)
            rules = broken_rules(traced, task, log, unread=True)
            task.relaxed[key] = (None, rules) if rules else (traced.program, [])
    return task.relaxed[key]


def _explain(eager: EagerModule, text: str, log: GuardLog) -> list[Rule]:
    """The rules behind a constraint violation, each with the model's line that needs it.

    `text` is torch's own.
    """
    dims = {name: dim for name, dim in dims_of(eager.inputs).items() if not dim.static}
    declared = declared_sizes(eager.inputs, eager.module)
    arguments = {at: size.name for at, size in declared.items() if isinstance(size, Dim)}
    found = []
    for rule in find_rules(text, dims) or fixed_dims(text, arguments, dims):
        name = rule.others[0] if rule.others else rule.dim  # torch names this one
        guard, line = log.guard_on(arguments, name, legal_sizes(dims[name], 1 << 12))
        baked = rule.kind in ("fixed", "range") and of_rounding(guard)
        found.append(replace(Rule("baked-in", rule.dim) if baked else rule, line=line))
    return found
