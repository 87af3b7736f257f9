"""The rules that a program needs but torch.export did not check.

torch.export checks a guard only on a dim that is passed unchanged (see `pipeline.probe.evaluate`).
A guard that some declared sizes break is a rule only if the program is wrong there.

A branch may hide another one on its other side (`pipeline.export.choices`). A quick export traces
another side only if the model runs new code there, or if more may be asked there without it
(`Choice.unseen`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import torch

from pipeline.export.asked import instructions_of
from pipeline.export.choices import (
    PAIRS,
    Choice,
    Hidden,
    SideSearch,
    choices,
    range_choices,
    small_choices,
)
from pipeline.export.guards import (
    Broken,
    as_formula,
    broken_guards,
    differs,
    good_sizes,
    recorded,
    unguarded,
)
from pipeline.export.size_arithmetic import too_large, zero_divisors
from pipeline.export.size_rules import by_size_rule
from pipeline.export.torch_call import Task, Traced, choices_at
from pipeline.export.torch_messages import GuardLog, of_rounding
from pipeline.export.trace_rules import by_one_size, by_remainder, unequal
from pipeline.export.tries import affordable_elements, tries, tries_beside
from pipeline.probe.eager import quiet
from pipeline.probe.evaluate import symbols_in
from pipeline.probe.rules import fitted
from pipeline.probe.sample_sizes import dims_of, elements
from pipeline.spec.dims import Dim
from pipeline.spec.rules import Rule

_TRACES = 16  # most traces on other sides, besides those for new code
_QUICK_PAIRS = 20  # sets of sizes for two choices at once, in a quick export
_NODES = 1000  # of the graphs that are traced on other sides, besides those for new code
_SAY = 25  # runs after which a line says how many there were
_PAIR_NODES = 60_000  # of the graphs that run at sets of sizes for two choices at once


def broken_rules(traced: Traced, task: Task, log: GuardLog, *, unread: bool = False) -> list[Rule]:
    """The rules that a program needs but torch.export did not check.

    Args:
        traced: the program.
        task: its model.
        log: what torch wrote while it exported.
        unread: whether a guard that can't be evaluated is always a rule.
    """
    program = traced.program
    spec, eager, tolerance = task.spec, task.eager, task.spec.tolerance
    inputs = eager.inputs
    assert tolerance is not None  # given or measured
    names = list(dims_of(inputs))
    tried: dict[tuple[int, ...], bool] = {}

    @cache
    def graph() -> torch.fx.GraphModule:
        return unguarded(program)

    @cache
    def together() -> int:
        with quiet():
            return affordable_elements(graph(), eager.args(traced.sizes))

    def matters(guard: Broken) -> bool:
        done = [dict(zip(names, key, strict=True)) for key, wrong in tried.items() if not wrong]
        sets = tries(inputs, guard, program, spec.rules, together=together(), tried=done)
        return not sets or any(map(differs_at, sets))  # a guard that can't be tried matters

    def differs_at(sizes: Mapping[str, int]) -> bool:
        key = tuple(sizes[name] for name in names)
        if key not in tried:
            if len(tried) % _SAY == 0:
                task.watch.announce(f"compare the program at other sizes, {len(tried)} done")
            with torch.no_grad(), quiet(), eager.state.restored():
                tried[key] = differs(graph(), eager, sizes, tolerance, traced.sizes)
                if changed := frozenset(eager.state.changes()):
                    task.writes.setdefault(changed, sizes)
        return tried[key]

    def differs_beside(guard: Broken, others: Sequence[Broken]) -> bool:
        sets = tries_beside(inputs, guard, others, traced.sizes, spec.rules)
        return any(map(differs_at, sets))

    every = broken_guards(program, inputs, spec.rules)
    every += zero_divisors(program, inputs, spec.rules)
    unknown = [g for g in every if not g.formula and (unread or matters(g))]
    broken = _blamed(unknown, [g for g in every if g.formula], matters, differs_beside)
    broken += too_large(program, inputs, spec.rules)  # the program itself is right there
    hidden = None if broken else _behind(traced, task, differs_at, together)
    if hidden is not None:
        broken = [hidden.choice.guard]
    untraced = hidden is not None and hidden.untraced
    rules = []
    for dim in dims_of(inputs).values():
        own = [guard for guard in broken if guard.dims == (dim,) and guard.formula]
        # the guard that most sizes break comes first; others that break with it add nothing
        own.sort(key=lambda g: len(good_sizes(dim, [g])))
        needed: list[Broken] = []
        for guard in own:
            good = good_sizes(dim, needed)
            left = guard.sizes[np.isin(guard.sizes[:, 0], good)]
            sure = hidden or guard.line or guard.too_large
            if len(left) and (sure or matters(replace(guard, sizes=left))):
                needed.append(guard)
        if needed:
            rules.append(replace(_rule(dim, needed, log), untraced=untraced))
    if rules:
        return rules
    return [
        replace(
            unequal(guard.dims, guard.sizes, eager, traced.sizes)
            or by_size_rule(guard, spec.rules)
            or Rule("guard", first, tuple(others), formula=guard.words),
            line=guard.line or log.line_for(guard.text),
            untraced=untraced,
            too_large=guard.too_large,
        )
        for guard in broken
        for first, *others in [[dim.name for dim in guard.dims]]
    ]


def _blamed(
    unknown: Sequence[Broken],
    known: Sequence[Broken],
    differs: Callable[[Broken], bool],
    differs_beside: Callable[[Broken, Sequence[Broken]], bool],
) -> list[Broken]:
    """The guards that matter.

    Sizes that break one guard may break others too, and only one of them may matter. So the others
    are tried where it holds, the one that most sizes break last. At the end, a guard stays only if
    it matters where all others hold. What is left out is tried again without these sizes.

    Args:
        unknown: guards that can't be evaluated, and that matter.
        known: the other guards.
        differs: whether the model is wrong where a guard is broken.
        differs_beside: whether it is wrong where a guard is broken and some others hold.
    """
    broken = list(unknown)
    for guard in sorted(known, key=lambda g: (len(g.dims), len(g.sizes))):
        if differs_beside(guard, broken) if broken else differs(guard):
            broken.append(guard)
    for guard in broken[len(unknown) :]:
        rest = [other for other in broken if other is not guard]
        if rest and not differs_beside(guard, rest):
            broken = rest
    return broken


def _rule(dim: Dim, needed: Sequence[Broken], log: GuardLog) -> Rule:
    """The rule that keeps the sizes of a dim that no guard excludes.

    If these are no range, no steps and not all but one, it is the rule of one of the guards. The
    others follow, since torch then exports for the sizes that are left.
    """
    first: Rule | None = None
    for guards in (needed, *([guard] for guard in needed)):
        good = good_sizes(dim, guards)
        rule = fitted(dim, good, guards[0].words)
        if rule.kind == "guard" and good:
            rule = by_remainder(dim, good) or by_one_size(dim, good) or rule
        elif rule.kind in ("fixed", "range") and of_rounding(guards[0].text):
            rule = rule if guards[0].too_large else Rule("baked-in", dim.name)
        line = guards[0].line or log.line_for(guards[0].text)
        rule = replace(rule, line=line, too_large=guards[0].too_large)
        if rule.kind != "guard":
            return rule
        first = first or rule
    assert first is not None
    return first


def _behind(
    traced: Traced,
    task: Task,
    differs_at: Callable[[Mapping[str, int]], bool],
    together: Callable[[], int],
) -> Hidden | None:
    """A choice of the program behind whose other side the model may have another result."""
    inputs, rules = task.eager.inputs, task.spec.rules
    dims = tuple(dims_of(inputs).values())
    symbols, guards = recorded(traced.program, inputs)
    traces: dict[tuple[int, ...], list[Choice] | None] = {}

    def once(sizes: Mapping[str, int]) -> list[Choice] | None:
        key = tuple(sizes[dim.name] for dim in dims)
        if key not in traces:
            traces[key] = choices_at(task, sizes)
        return traces[key]

    asked = [one for one in traced.asked if one.number is None]
    found, _ = choices(asked, symbols, dims, rules)  # torch's guards have the others
    spans = {str(symbol): span for symbol, span in traced.program.range_constraints.items()}
    concluded = range_choices(spans, symbols, dims, rules)
    small = small_choices(symbols, dims, rules)
    made = [*concluded, *found, *small]
    if not made:
        return None
    nodes = len(traced.program.graph.nodes)
    budget = 0 if task.quick else min(_NODES // nodes, _TRACES)
    search = SideSearch(
        dims,
        tuple(rules),
        choices_at=once,
        instructions_at=lambda sizes: instructions_of(lambda: task.eager.runs_at(sizes)),
        differs_at=differs_at,
        elements=lambda sizes: elements(inputs, sizes),
        budget=budget,
        pairs=min(_QUICK_PAIRS if task.quick else PAIRS, _PAIR_NODES // nodes),
        together=together(),
        known={as_formula(text, symbols) for text in guards if symbols_in(text) <= symbols.keys()},
    )
    return search.first_hidden(made, traced.sizes)
