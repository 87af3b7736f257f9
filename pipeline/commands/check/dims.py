"""Checks the dims: as declared, as the module accepts them, and as torch.export guards them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from pipeline.convert.findings import Finding, rule_finding, shortened
from pipeline.machine.resources import Stopwatch
from pipeline.probe.apply import Applied, apply, equal_dims, for_user, may_apply, merge, with_dims
from pipeline.probe.history import kept_values
from pipeline.probe.probe import SECONDS, probe
from pipeline.probe.rules import by_values
from pipeline.spec.dims import Dim
from pipeline.spec.model import ModelSpec, inner_inputs
from pipeline.spec.rules import AppliedRule, Rule, rule_words

if TYPE_CHECKING:
    import torch

    from pipeline.probe.probe import Probed

_SHOWN = 3  # guards that are listed
_ITSELF = "nothing. pipeline does it as if you declared"


def declared(spec: ModelSpec) -> list[Finding]:
    """Returns the declared dims and rules."""
    found = [Finding("dims", _describe(d), "declared", dim=name) for name, d in spec.dims.items()]
    found += [Finding("dims", f"rule on sizes: {rule}", "declared") for rule in spec.rules]
    return found or [Finding("dims", "none: all sizes are fixed", "declared")]


def _describe(dim: Dim) -> str:
    step = f" in steps of {dim.multiple_of}" if dim.multiple_of > 1 else ""
    defaults = f" ({' and '.join(dim.defaulted)} by default)" if dim.defaulted else ""
    auto = "; may be narrowed to the sizes that the model accepts" if dim.auto else ""
    return f"{dim.name}: {dim.min}..{dim.max}{step}, opt {dim.opt}{defaults}{auto}"


def tried(
    spec: ModelSpec, module: torch.nn.Module, seed: int
) -> tuple[list[Finding], Applied, Mapping[str, int]]:
    """Finds the sizes that the module accepts, by running the module.

    Returns:
        The findings; the spec with dims narrowed to the accepted sizes, as far as a rule states
        them; and sizes at which the module runs.
    """
    if all(dim.static for dim in spec.dims.values()):
        return [], Applied(spec, ()), {}
    seconds = spec.search_seconds or SECONDS
    probed = probe(inner_inputs(spec), module, seed, spec.rules, seconds)
    rules = [for_user(rule, spec) for rule in probed.rules]
    found = [Finding("dims", f"sizes tried on the model: {probed.words}", "tried")]
    done = apply(spec, rules)
    found += [
        _finding(spec, rule, own=rule not in done.left and may_apply(spec, rule)) for rule in rules
    ]
    if done.rules:
        holds = f"the lines below apply to {_range(done.spec)} only"
        found.append(Finding("dims", holds, "narrowed"))
    return found, done, {name: _at(probed, name) for name in probed.base or {}}


def _at(probed: Probed, name: str) -> int:
    """Returns a size of a dim at which the module runs. Returns 0 only if no other size runs: a
    Dim cannot be fixed at 0."""
    assert probed.base is not None
    taken = next((p.taken for p in probed.probes if p.dim.name == name), ())
    return probed.base[name] or min((size for size in taken if size > 0), default=0)


def _finding(spec: ModelSpec, rule: Rule, *, own: bool) -> Finding:
    """Returns the finding for a rule that the tried sizes showed.

    Args:
        spec: The spec.
        rule: The rule.
        own: Whether the pipeline applies the rule by itself.
    """
    new, do = rule.refined, rule.advice()
    if (own and new is not None) or (own and equal_dims(spec, rule.size_rule)):
        do = f"{_ITSELF}: {rule.declaration()}"
    elif own:
        do = f"nothing. The artifact refuses sizes that break {rule.size_rule}"
    if not own and new is not None:
        do += ", or set auto=True on the Dim"
        if new.multiple_of > 1 and not new.offset and spec.padding is None:
            do += f', or set padding=Padding({{"{rule.dim}": {new.multiple_of}}})'
    if rule.by_values and not own:
        do += by_values(spec)
    return replace(rule_finding(rule), do=do, blocks=not own)


def _range(spec: ModelSpec) -> str:
    return ", ".join([*map(str, spec.dims.values()), *spec.rules])


def traced(
    spec: ModelSpec, module: torch.nn.Module, seed: int
) -> tuple[list[Finding], ModelSpec, torch.nn.Module]:
    """Finds all constraints of torch.export on the dims, and evaluates its guards.

    Returns:
        The findings; the spec with outputs, tolerance and narrowed dims; the module that returns a
        tuple of tensors.

    Raises:
        ConstraintError: The model needs a constraint that no Dim can express.
        ExportError: torch cannot export the model for another reason.
    """
    from pipeline.export.module import inner, with_outputs
    from pipeline.export.tolerance import with_tolerance
    from pipeline.export.trace import trace

    kept = kept_values(spec, module, inner(module), seed)
    spec, module = with_outputs(spec, module, seed)
    spec = with_tolerance(spec, module, seed)
    new, program, refinements = trace(replace(spec, refine_dims=True), module, seed, Stopwatch())
    found = narrowings(spec, new.dims, new.rules, refinements)
    found += [Finding("dims", text, "note") for text in kept]
    return [*found, *_guards(new, program)], replace(new, refine_dims=spec.refine_dims), module


def narrowings(
    old: ModelSpec,
    dims: Mapping[str, Dim],
    rules: Sequence[str],
    applied: Sequence[Rule | AppliedRule],
) -> list[Finding]:
    """Returns one finding for each narrowing. It blocks if a dim is not `auto`.

    Args:
        old: The spec as the user declared it.
        dims, rules: The narrowed dims and the rules.
        applied: The rules that narrowed the spec.
    """
    found = []
    more = ", ".join(rule for rule in rules if rule not in old.rules)
    for rule in applied:
        every = (rule.dim, *rule.others)
        names = [name for name in every if name in dims]
        left = " and ".join(str(dims[name]) for name in names)
        left += f", with {more}" if len(names) > 1 and more else ""
        if isinstance(rule, AppliedRule) and rule.size_rule in rules:  # no dim expresses it
            left = rule_words(rule.size_rule)
        declare = rule.declaration() if isinstance(rule, Rule) else left
        own = all(map(old.auto, every))
        do = f"{_ITSELF}: {declare}" if own else f"declare {declare}"
        what = rule.text() if isinstance(rule, Rule) else rule.text
        dim = rule.dim if rule.dim in old.dims else ""
        found.append(
            Finding("dims", shortened(what), rule.kind, rule.line, do, blocks=not own, dim=dim)
        )
    if found:
        holds = ", ".join([*map(str, dims.values()), *rules])
        found.append(Finding("dims", f"the lines below apply to {holds} only", "narrowed"))
    return found


def _guards(spec: ModelSpec, program: torch.export.ExportedProgram) -> list[Finding]:
    """Evaluates the guards of torch.export over the ranges of the dims."""
    from pipeline.export.guards import broken_guards, sampled_guards

    guards = {
        str(guard.expr)
        for node in program.graph.nodes
        if node.op == "placeholder"
        for size in getattr(node.meta.get("val"), "shape", ())
        if not isinstance(size, int)
        for guard in size.node.shape_env.guards
    }
    if not guards:
        text = "torch.export made no assumption about the sizes: "
        text += "the model runs the same code at every size"
        return [Finding("dims", text, "guards")]
    broken = broken_guards(program, inner_inputs(spec), spec.rules)
    sampled = sampled_guards(program, inner_inputs(spec), spec.rules)
    held = len(guards) - len(broken)
    where = "at the sizes that were tried" if sampled else "at every declared size"
    every = len(guards)
    count = ("all are" if every > 1 else "it is") if held == every else f"{held} are"
    made = f"{every} assumption{'s' if every > 1 else ''}"
    text = f"torch.export made {made} about the sizes: {count} true {where}"
    found = [Finding("dims", text, "guards")]
    found += [Finding("dims", line, "guards") for line in sampled[:_SHOWN]]
    for guard in broken[:_SHOWN]:
        text = (
            f"torch.export assumed {shortened(guard.words)}. Some sizes break this, but at those "
        )
        text += "that were tried the model gives the same results"
        found.append(Finding("dims", text, "guards"))
    if broken[_SHOWN:]:
        text = f"and {len(broken) - _SHOWN} more such assumptions"
        found.append(Finding("dims", text, "guards"))
    return found


def as_one(spec: ModelSpec, rules: Sequence[Rule]) -> tuple[ModelSpec, dict[str, str]]:
    """Merges the dims that a rule advises to declare as one.

    Returns:
        The spec; and for each dim that was merged into another dim, that dim's name.
    """
    merged: dict[str, str] = {}
    for rule in rules:
        names = [name for name in spec.dims if name in rule.dims]
        one = merge(spec, *names) if rule.one_dim and len(names) == 2 else None
        if one is not None:
            spec = one
            merged[names[1]] = names[0]
    return spec, merged


def fixed(spec: ModelSpec, names: Sequence[str], sizes: Mapping[str, int]) -> ModelSpec:
    """Fixes dims at their size in `sizes`, or at their opt.

    A dim with the size 0 in `sizes` is unchanged: a Dim cannot have the size 0 only.
    """

    new = {}
    for name in names:
        dim = spec.dims[name]
        # an opt of 0 was not tried: use the first size above 0
        size = dim.legal(sizes.get(name, dim.opt or dim.min + dim.multiple_of))
        if size:
            new[name] = replace(dim, min=size, opt=size, max=size)
    return with_dims(spec, new)


def never_fixed(spec: ModelSpec, names: Sequence[str]) -> list[Finding]:
    """Returns a note for each dim that `fixed` left unchanged."""
    words = "cannot be fixed at 0, and the model ran at no other size of this dim"
    free = [name for name in names if not spec.dims[name].static]
    return [Finding("dims", f"{name} {words}", "note", dim=name) for name in free]


def declared_as_is(spec: ModelSpec) -> ModelSpec:
    """Turns narrowing off for all dims: they are narrowed already."""

    exact = {name: replace(dim, auto=False) for name, dim in spec.dims.items()}
    return replace(with_dims(spec, exact), refine_dims=False)
