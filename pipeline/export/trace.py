"""Runs torch.export on a spec's model, and narrows dims as the model needs and the spec allows.

The example sizes are small, odd and different from each other, so that no guard holds by chance.
If the model itself fails there (h must be a multiple of 8), it is tried at rounder sizes. There
torch's guards show the rules of the model.
"""

from __future__ import annotations

import contextlib
import inspect
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import torch

from pipeline.errors import ConstraintError, ExportError, first_line
from pipeline.export.guards import (
    Broken,
    broken_guards,
    excluded_ends,
    good_sizes,
    matters,
    tries,
    unguarded,
)
from pipeline.export.torch_2_13 import mended
from pipeline.export.torch_messages import (
    GuardLog,
    advice,
    find_rules,
    fixed_dims,
    of_rounding,
    root_name,
)
from pipeline.export.trace_rules import (
    by_remainder,
    find_baked,
    keep_opt,
    one_sided,
    with_branch,
    without_opt,
)
from pipeline.machine.resources import Stopwatch
from pipeline.probe.apply import apply as narrowed_by
from pipeline.probe.apply import constraint_error, for_user, may_apply, refine
from pipeline.probe.eager import EagerModule, model_line, quiet
from pipeline.probe.generic import generic_examples
from pipeline.probe.grid import legal_sizes
from pipeline.probe.rules import fitted
from pipeline.probe.sample_sizes import dims_of
from pipeline.probe.state import untouched
from pipeline.spec.dims import Dim, DimExpr, Size, sizes_text
from pipeline.spec.model import ModelSpec, inner_inputs
from pipeline.spec.rules import Rule
from pipeline.spec.tensors import Input

_LEAST = 3  # as the largest size: torch never takes 0 or 1, and a range of 2..2 is a constant
_ROUNDS = 6  # most exports with narrowed dims: multiple, then range, then another dim
_TORCH = str(Path(torch.__file__).parent)


@dataclass(frozen=True)
class _Task:
    """One model to export: its spec, its module, and the clock for the seconds inside torch."""

    spec: ModelSpec
    module: torch.nn.Module
    seed: int
    watch: Stopwatch

    @property
    def eager(self) -> EagerModule:
        return EagerModule(inner_inputs(self.spec), self.module, self.seed)

    @cached_property
    def examples(self) -> list[dict[str, int]]:
        """The sets of sizes at which to export, in the order in which to try them."""
        return generic_examples(self.eager, self.spec.rules)


def trace(
    spec: ModelSpec, module: torch.nn.Module, seed: int, watch: Stopwatch
) -> tuple[ModelSpec, torch.export.ExportedProgram, list[Rule]]:
    """Exports the module inside the spec's padding.

    Args:
        spec: the spec.
        module: the module that the spec builds.
        seed: the seed of the example inputs' values.
        watch: the clock that the seconds inside torch are added to.

    Returns:
        The spec with its dims narrowed, the program, and the rules that narrowed them.

    Raises:
        ConstraintError: the model does not run at every size of a dim.
        ExportError: torch can't export the model for another reason.
    """
    applied: list[Rule] = []
    for _ in range(_ROUNDS):
        task = _Task(spec, module, seed, watch)
        program, rules = _attempt(task)
        for skip in (1, 2) if one_sided(rules, spec) else ():
            with contextlib.suppress(ExportError):  # then the first attempt's rules stay
                rounder = _attempt(task, skip)
                kept = keep_opt(rounder[1], spec)
                clear = not one_sided(rounder[1], spec) and (kept or not keep_opt(rules, spec))
                if clear or (kept and not keep_opt(rules, spec)):
                    program, rules = rounder
                if clear:
                    break
        if program is not None and not rules:
            return spec, program, applied
        rules = [for_user(rule, spec) for rule in rules]
        rules = [without_opt(rule, spec.dims.get(rule.dim)) for rule in rules]
        if not all(may_apply(spec, rule) for rule in rules):
            raise constraint_error(spec, rules)
        spec = narrowed_by(spec, rules).spec
        applied += rules
    raise ExportError(
        f"model {spec.name}: torch.export asks for one more rule after {_ROUNDS} rounds: "
        + "; ".join(map(str, applied))
    )


def _attempt(task: _Task, skip: int = 0) -> tuple[torch.export.ExportedProgram | None, list[Rule]]:
    """Calls `_export_once`. Rules that the model does not need itself get a `branch`."""
    program, rules = _export_once(task, skip)
    return program, [with_branch(rule, task.eager) for rule in rules]


def _export_once(task: _Task, skip: int) -> tuple[torch.export.ExportedProgram | None, list[Rule]]:
    """A program, or the rules that torch needs before it makes one.

    `skip` is the number of example sizes to leave out, if there are more.
    """
    spec, eager = task.spec, task.eager
    first: ExportError | None = None
    example_sizes = task.examples[skip:] or task.examples
    for sizes in example_sizes:
        without = cache(lambda sizes=sizes: _relaxed(task, sizes))
        if first is None and _each_once(eager.inputs) and without()[0] is not None:
            return without()
        log = GuardLog(Path(_TORCH))
        try:
            with task.watch("torch.export"), log:
                program = _exported(task, sizes)
        except ConstraintError as error:
            relaxed, broken = without()
            if relaxed is not None:
                return relaxed, []
            rules = _explain(eager, str(error), log) or broken
            if any(rule.kind == "band" for rule in broken):  # torch suggests fewer sizes
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
            relaxed, broken = without()
            if relaxed is None and not broken:  # the model runs, but torch can't export it
                raise
            return relaxed, broken
        rules = _broken_rules(program, task, log)
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
        return program, rules
    assert first is not None
    raise first


def _exported(task: _Task, sizes: Mapping[str, int]) -> torch.export.ExportedProgram:
    """The program. A dim of few sizes has a larger range for torch, unless the model refuses that.

    Raises:
        ConstraintError, ExportError: see `_torch_export`.
    """
    eager, tolerance = task.eager, task.spec.tolerance
    assert tolerance is not None  # given or measured
    try:
        return _torch_export(eager, sizes)
    except ConstraintError as error:
        short = [dim for dim in dims_of(eager.inputs).values() if _enlarged(dim)]
        if not short:
            raise
        try:
            program = _torch_export(eager, sizes, least=0)
            graph = unguarded(program)
            for dim in short:  # torch may have made a number of it
                for size in legal_sizes(dim, _LEAST):
                    args = eager.args({**sizes, dim.name: size})
                    with torch.no_grad(), quiet(), untouched(eager.module):
                        if matters(graph, eager.module, args, tolerance):
                            raise error
        except ExportError:
            raise error from None
        return program


def _each_once(inputs: Sequence[Input]) -> bool:
    """True if torch's Dim says no more about the dims than their ranges.

    Each is then the size of one axis. torch refuses guards that it can't prove, and most of these
    hold, so it is faster to check the guards here at once.
    """
    sizes = [size for i in inputs for size in i.shape if not isinstance(size, int)]
    names = [size.name for size in sizes if isinstance(size, Dim)]
    return len(set(names)) == len(sizes) and not any(
        isinstance(size, DimExpr) or size.multiple_of > 1 or size.offset or _enlarged(size)
        for size in sizes
    )


def _enlarged(dim: Dim) -> bool:
    return not dim.static and dim.max // dim.multiple_of < _LEAST


def _torch_export(
    eager: EagerModule,
    sizes: Mapping[str, int],
    *,
    relaxed: bool = False,
    least: int = _LEAST,
) -> torch.export.ExportedProgram:
    """Calls torch.export.export once.

    If `relaxed`, torch does not check the guards, and the caller has to. The same is true of sizes
    that torch's Dim can't express (``past + seq``, ``2*k + 1``).

    Raises:
        ConstraintError: torch refuses the sizes; the text is torch's own.
        ExportError: torch fails in another way; the text names the model's line.
    """
    inputs, module = eager.inputs, eager.module
    roots: dict[str, Any] = {}

    def torch_dim(size: Dim | DimExpr) -> Any:
        if isinstance(size, DimExpr):
            return torch.export.Dim.DYNAMIC
        if relaxed or size.offset:
            return torch.export.Dim.DYNAMIC(min=size.min, max=max(size.max, least))
        return _torch_dim(size, roots, least)

    shapes: Any = tuple(
        {axis: torch_dim(size) for axis, size in enumerate(i.shape) if _dynamic(size)}
        for i in inputs
    )
    parameters = inspect.signature(module.forward).parameters.values()
    fixed = [p for p in parameters if p.kind is not inspect.Parameter.VAR_POSITIONAL]
    if len(fixed) < len(parameters) and len(fixed) < len(inputs):  # forward(self, x, *rest)
        shapes = (*shapes[: len(fixed)], shapes[len(fixed) :])
    declared = _declared(inputs, module)
    try:
        with torch.no_grad(), quiet(), untouched(module), mended(module, declared):
            return torch.export.export(
                module, eager.args(sizes), dynamic_shapes=shapes, strict=False
            )
    except Exception as error:
        text = str(error)  # torch's own
        if "Suggested fixes:" in text or "code specialized it to be a constant" in text:
            raise ConstraintError(text) from error
        line = model_line(traceback.extract_tb(error.__traceback__), _TORCH)
        place = f" at {line}" if line else ""
        first = first_line(error)
        raise ExportError(
            f"torch.export failed{place}: {first}",
            detail=text,
            line=line,
            what=f"torch.export failed: {first}",
            do=advice(text),
        ) from error


def _declared(inputs: Sequence[Input], module: torch.nn.Module) -> dict[tuple[str, int], Size]:
    """The inputs' sizes, by torch's name of the argument of ``forward`` and the axis."""
    names: list[str] = []
    for name, parameter in inspect.signature(module.forward).parameters.items():
        many = parameter.kind is inspect.Parameter.VAR_POSITIONAL
        names += [f"{name}[{n}]" for n in range(len(inputs))] if many else [name]
    return {
        (name, axis): size
        for name, i in zip(names, inputs, strict=False)
        for axis, size in enumerate(i.shape)
    }


def _dynamic(size: Size) -> TypeGuard[Dim | DimExpr]:
    if isinstance(size, DimExpr):
        return not all(dim.static for dim in size.dims)
    return isinstance(size, Dim) and not size.static


def _relaxed(
    task: _Task, sizes: Mapping[str, int]
) -> tuple[torch.export.ExportedProgram | None, list[Rule]]:
    """The program, if the guards that torch.export refuses do not matter; otherwise the rules.

    A guard may only choose a faster way, and torch can't distinguish that from a rule of the
    model. For example, ``x[:, : n // 2]`` counts as contiguous where n is 1 or odd. A guard that
    can't be evaluated is a rule here: only torch could have checked it.
    """
    log = GuardLog(Path(_TORCH))
    with contextlib.suppress(ExportError), task.watch("torch.export"), log:
        program = _torch_export(task.eager, sizes, relaxed=True)
        rules = _broken_rules(program, task, log, unread=True)
        return (None, rules) if rules else (program, [])
    return None, []


def _torch_dim(size: Dim, roots: dict[str, Any], least: int) -> Any:
    """torch's Dim for a dim, or ``k*_name`` for multiples; one object for each name."""
    step = size.multiple_of
    if size.name not in roots:
        largest = max(size.max // step, least)
        root = torch.export.Dim(root_name(size), min=size.min // step, max=largest)
        roots[size.name] = step * root if step > 1 else root
    return roots[size.name]


def _explain(eager: EagerModule, text: str, log: GuardLog) -> list[Rule]:
    """The rules behind a constraint violation, each with the model's line that needs it.

    `text` is torch's own.
    """
    dims = {name: dim for name, dim in dims_of(eager.inputs).items() if not dim.static}
    declared = _declared(eager.inputs, eager.module)
    arguments = {at: size.name for at, size in declared.items() if isinstance(size, Dim)}
    found = []
    for rule in find_rules(text, dims) or fixed_dims(text, arguments, dims):
        name = rule.others[0] if rule.others else rule.dim  # torch names this one
        guard, line = log.guard_on(arguments, name, legal_sizes(dims[name], 1 << 12))
        baked = rule.kind in ("fixed", "range") and of_rounding(guard)
        found.append(replace(Rule("baked-in", rule.dim) if baked else rule, line=line))
    return found


def _is_plain_at(task: _Task, dim: Dim, size: int) -> bool:
    """True if an export at this size of a dim needs no rule on the other dims.

    Then the model has no branch on them that a program from another size could not know.
    """
    if task.spec.padding is not None:
        return False
    there = Rule("fixed", dim.name, refined=Dim(dim.name, size, size, size))
    part = replace(task, spec=refine(task.spec, [there]))
    log = GuardLog(Path(_TORCH))
    with contextlib.suppress(ExportError, ConstraintError), task.watch("torch.export"), log:
        sizes = {**task.examples[0], dim.name: size}
        program = _torch_export(part.eager, sizes, relaxed=True)
        return not _broken_rules(program, part, log, unread=True)
    return False


def _broken_rules(
    program: torch.export.ExportedProgram, task: _Task, log: GuardLog, *, unread: bool = False
) -> list[Rule]:
    """The rules that torch.export needs but did not check (see `pipeline.probe.evaluate`).

    If `unread`, a guard that can't be evaluated is always a rule.
    """
    spec, eager, tolerance = task.spec, task.eager, task.spec.tolerance
    inputs = eager.inputs
    assert tolerance is not None  # given or measured
    tried: dict[tuple[int, ...], bool] = {}

    @cache
    def graph() -> torch.nn.Module:
        ends = [end for end in excluded_ends(program, inputs) if _is_plain_at(task, *end)]
        return unguarded(program, inputs, ends)

    def differs(guard: Broken) -> bool:
        sets = tries(inputs, guard, program, spec.rules)
        return not sets or any(map(differs_at, sets))  # a guard that can't be tried matters

    def differs_at(sizes: Mapping[str, int]) -> bool:
        key = tuple(sizes.values())
        if key not in tried:
            with torch.no_grad(), quiet(), untouched(eager.module):
                tried[key] = matters(graph(), eager.module, eager.args(sizes), tolerance)
        return tried[key]

    broken = [
        guard
        for guard in broken_guards(program, inputs, spec.rules)
        if (unread and not guard.readable) or differs(guard)
    ]
    rules = []
    for dim in dims_of(inputs).values():
        own = [guard for guard in broken if guard.dims == (dim,) and guard.readable]
        # the guard that most sizes break comes first; others that break with it add nothing
        own.sort(key=lambda g: len(good_sizes(program, inputs, dim, [g])))
        needed: list[Broken] = []
        for guard in own:
            good = good_sizes(program, inputs, dim, needed)
            left = guard.sizes[np.isin(guard.sizes[:, 0], good)]
            if len(left) and differs(replace(guard, sizes=left)):
                needed.append(guard)
        if needed:
            line = log.line_for(needed[0].text)
            good = good_sizes(program, inputs, dim, needed)
            rule = fitted(dim, good, needed[0].words)
            if rule.kind == "guard" and good:
                rule = by_remainder(dim, good) or rule
            baked = rule.kind in ("fixed", "range") and of_rounding(needed[0].text)
            rules.append(replace(Rule("baked-in", dim.name) if baked else rule, line=line))
    if rules:
        return rules
    return [
        Rule("guard", first, tuple(others), formula=guard.words, line=log.line_for(guard.text))
        for guard in broken
        for first, *others in [[dim.name for dim in guard.dims]]
    ]
