"""The dims of a check: what is declared, what the module takes, what torch.export stands on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from pipeline.commands.check.findings import Finding, rule_finding, shortened
from pipeline.machine.resources import Stopwatch
from pipeline.probe.apply import apply, equal_dims, for_user, may_apply, with_dims
from pipeline.probe.probe import probe
from pipeline.spec.dims import Dim
from pipeline.spec.model import ModelSpec, inner_inputs
from pipeline.spec.rules import AppliedRule, Rule

if TYPE_CHECKING:
    import torch

    from pipeline.probe.probe import Probed

_SHOWN = 3  # guards that are listed


def declared(spec: ModelSpec) -> list[Finding]:
    """The dims as they are declared, and the rules on them."""
    found = [Finding("dims", _describe(d), "declared", dim=name) for name, d in spec.dims.items()]
    found += [Finding("dims", f"sizes keep together: {rule}", "declared") for rule in spec.rules]
    return found or [Finding("dims", "none: all sizes are fixed", "declared")]


def _describe(dim: Dim) -> str:
    step = f" in steps of {dim.multiple_of}" if dim.multiple_of > 1 else ""
    defaults = f" ({' and '.join(dim.defaulted)} by default)" if dim.defaulted else ""
    auto = "; may be narrowed to sizes at which the model runs" if dim.auto else ""
    return f"{dim.name}: {dim.min}..{dim.max}{step}, opt {dim.opt}{defaults}{auto}"


def tried(
    spec: ModelSpec, module: torch.nn.Module, seed: int
) -> tuple[list[Finding], ModelSpec, Mapping[str, int]]:
    """What sizes the module takes, by running it.

    Returns:
        The findings; the spec with its dims narrowed to what the module takes, as far as that can
        be said; and sizes at which it runs.
    """

    if all(dim.static for dim in spec.dims.values()):
        return [], spec, {}
    probed = probe(inner_inputs(spec), module, seed, spec.rules)
    rules = [for_user(rule, spec) for rule in probed.rules]
    found = [Finding("dims", f"tried by running the model: {probed.words}", "tried")]
    found += [_finding(spec, rule) for rule in rules]
    done = apply(spec, rules)
    if done.rules:
        holds = f"what follows holds for {_range(done.spec)} only"
        found.append(Finding("dims", holds, "narrowed"))
    return found, done.spec, {name: _at(probed, name) for name in probed.base or {}}


def _at(probed: Probed, name: str) -> int:
    """A size of a dim at which the module runs; 0, which no Dim can be fixed at, only where it
    runs at no other."""
    assert probed.base is not None
    taken = next((p.taken for p in probed.probes if p.dim.name == name), ())
    return probed.base[name] or min((size for size in taken if size > 0), default=0)


def _finding(spec: ModelSpec, rule: Rule) -> Finding:
    """A rule that trying sizes has shown."""

    own, new, do = may_apply(spec, rule), rule.refined, rule.advice()
    if own and new is not None:
        do = f"nothing: narrowed to {rule.declaration()}"
    elif own and equal_dims(spec, rule.size_rule):
        do = f"nothing: {rule.declaration()}"
    elif own:
        do = f"nothing: sizes that break {rule.size_rule} are refused"
    if not own and new is not None:
        do += ", or auto=True on the Dim"
        if new.multiple_of > 1 and not new.offset and spec.padding is None:
            do += f', or padding=Padding({{"{rule.dim}": {new.multiple_of}}})'
    return replace(rule_finding(rule), do=do, blocks=not own)


def _range(spec: ModelSpec) -> str:
    return ", ".join([*map(str, spec.dims.values()), *spec.rules])


def traced(
    spec: ModelSpec, module: torch.nn.Module, seed: int
) -> tuple[list[Finding], ModelSpec, torch.nn.Module]:
    """What torch.export asks of the dims, all of it, and what its guards are worth.

    Returns:
        The findings; the spec with its outputs, its tolerance and its dims narrowed; the module
        that returns a tuple of tensors.

    Raises:
        ConstraintError: the model asks for something that no Dim can say.
        ExportError: torch can't export it for another reason.
    """
    from pipeline.export.module import with_outputs
    from pipeline.export.tolerance import with_tolerance
    from pipeline.export.trace import trace

    spec, module = with_outputs(spec, module, seed)
    spec = with_tolerance(spec, module, seed)
    new, program, refinements = trace(replace(spec, refine_dims=True), module, seed, Stopwatch())
    found = narrowings(spec, new.dims, new.rules, refinements)
    return [*found, *_guards(new, program)], replace(new, refine_dims=spec.refine_dims), module


def narrowings(
    old: ModelSpec,
    dims: Mapping[str, Dim],
    rules: Sequence[str],
    applied: Sequence[Rule | AppliedRule],
) -> list[Finding]:
    """What was narrowed, one finding each; it stands in the way where a dim is not `auto`.

    Args:
        old: as it was asked for.
        dims, rules: what was left of it.
        applied: the rules that narrowed it.
    """
    found = []
    more = ", ".join(rule for rule in rules if rule not in old.rules)
    for rule in applied:
        every = (rule.dim, *rule.others)
        names = [name for name in every if name in dims]
        left = " and ".join(str(dims[name]) for name in names)
        left += f", with {more}" if len(names) > 1 and more else ""
        declare = rule.declaration() if isinstance(rule, Rule) else left
        own = all(map(old.auto, every))
        do = f"nothing: narrowed to {declare}" if own else f"declare {declare}"
        what = rule.text() if isinstance(rule, Rule) else rule.text
        dim = rule.dim if rule.dim in old.dims else ""
        found.append(
            Finding("dims", shortened(what), rule.kind, rule.line, do, blocks=not own, dim=dim)
        )
    if found:
        holds = ", ".join([*map(str, dims.values()), *rules])
        found.append(Finding("dims", f"what follows holds for {holds} only", "narrowed"))
    return found


def _guards(spec: ModelSpec, program: torch.export.ExportedProgram) -> list[Finding]:
    """torch.export's guards, evaluated over the dims' ranges."""
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
        text = "torch.export made no guard: every size takes the same way through the model"
        return [Finding("dims", text, "guards")]
    broken = broken_guards(program, inner_inputs(spec), spec.rules)
    sampled = sampled_guards(program, inner_inputs(spec), spec.rules)
    held = len(guards) - len(broken)
    where = "at the sizes that were tried" if sampled else "at every declared size"
    text = f"guards of torch.export: {held} of {len(guards)} hold {where}"
    found = [Finding("dims", text, "guards")]
    found += [Finding("dims", line, "guards") for line in sampled[:_SHOWN]]
    for guard in broken[:_SHOWN]:
        text = f"guard {shortened(guard.words)} does not hold at every size, but that makes no "
        text += "difference at the sizes that were tried"
        found.append(Finding("dims", text, "guards"))
    if broken[_SHOWN:]:
        text = f"and {len(broken) - _SHOWN} more such guards"
        found.append(Finding("dims", text, "guards"))
    return found


def fixed(spec: ModelSpec, names: Sequence[str], sizes: Mapping[str, int]) -> ModelSpec:
    """The spec with some dims of one size each: that of `sizes`, or their opt.

    A dim that `sizes` has at 0 stays as it is: no Dim is of the size 0 alone.
    """

    new = {}
    for name in names:
        dim = spec.dims[name]
        # of an opt of 0 nothing was tried: the first size above it
        size = dim.legal(sizes.get(name, dim.opt or dim.min + dim.multiple_of))
        if size:
            new[name] = replace(dim, min=size, opt=size, max=size)
    return with_dims(spec, new)


def never_fixed(spec: ModelSpec, names: Sequence[str]) -> list[Finding]:
    """Those of the dims that `fixed` left as they were."""
    words = "can't be fixed at 0, the only size of it at which the model was seen to run"
    free = [name for name in names if not spec.dims[name].static]
    return [Finding("dims", f"{name} {words}", "note", dim=name) for name in free]


def declared_as_is(spec: ModelSpec) -> ModelSpec:
    """The spec with no dim left to be narrowed: that has been done."""

    exact = {name: replace(dim, auto=False) for name, dim in spec.dims.items()}
    return replace(with_dims(spec, exact), refine_dims=False)
