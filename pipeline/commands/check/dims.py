"""The dims of a check: what is declared, what the module takes, what torch.export stands on."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from pipeline.commands.check.findings import Finding, rule_findings, shortened
from pipeline.probe.refine import equal_dims, merged, outer, refine
from pipeline.probe.rules import Rule
from pipeline.spec.dims import Dim
from pipeline.spec.model import ModelSpec

if TYPE_CHECKING:
    import torch

    from pipeline.probe.probe import Probed

_SHOWN = 3  # guards that are listed


def declared(spec: ModelSpec) -> list[Finding]:
    """The dims as they are declared, and the rules on them."""
    found = [Finding("dims", _words(dim), dim=name) for name, dim in spec.dims.items()]
    found += [Finding("dims", f"sizes keep together: {rule}") for rule in spec.rules]
    return found or [Finding("dims", "none: all sizes are fixed")]


def _words(dim: Dim) -> str:
    step = f" in steps of {dim.multiple_of}" if dim.multiple_of > 1 else ""
    defaults = f" ({' and '.join(dim.defaulted)} by default)" if dim.defaulted else ""
    auto = "; may be narrowed to what the model takes" if dim.auto else ""
    return f"{dim.name}: {dim.min}..{dim.max}{step}, opt {dim.opt}{defaults}{auto}"


def tried(
    spec: ModelSpec, module: torch.nn.Module, seed: int
) -> tuple[list[Finding], ModelSpec, Mapping[str, int]]:
    """What sizes the module takes, by running it.

    Returns:
        The findings; the spec with its dims narrowed to what the module takes, as far as that can
        be said; and sizes at which it runs.
    """
    from pipeline.probe.probe import probe
    from pipeline.spec.model import inner_inputs

    if all(dim.static for dim in spec.dims.values()):
        return [], spec, {}
    probed = probe(inner_inputs(spec), module, seed, spec.rules)
    rules = [outer(rule, spec) for rule in probed.rules]
    found = [Finding("dims", f"tried by running the model: {probed.words}")]
    found += [_finding(spec, rule) for rule in rules]
    # a rule on padded dims may leave nothing to narrow
    narrow = [rule for rule in rules if rule.refined is not None]
    more = [rule.size_rule for rule in rules if rule.refined is None and rule.size_rule]
    new = refine(spec, narrow)
    for rule in more:
        names = equal_dims(new, rule)
        one = merged(new, *names) if names else None
        new = one or replace(new, rules=(*new.rules, rule))
    if narrow or more:
        found.append(Finding("dims", f"what follows holds for {_range(new)} only"))
    return found, new, {name: _at(probed, name) for name in probed.base or {}}


def _at(probed: Probed, name: str) -> int:
    """A size of a dim at which the module runs; 0, which no Dim can be fixed at, only where it
    runs at no other."""
    assert probed.base is not None
    taken = next((p.taken for p in probed.probes if p.dim.name == name), ())
    return probed.base[name] or min((size for size in taken if size > 0), default=0)


def _finding(spec: ModelSpec, rule: Rule) -> Finding:
    """A rule that trying sizes has shown."""
    own = spec.auto(rule.dim) and bool(rule.refined or rule.size_rule)
    new = rule.refined
    do = f"declare {rule.declare}"
    if own and new is not None:
        do = f"nothing: narrowed to {rule.declare}"
    elif own:
        one = equal_dims(spec, rule.size_rule)
        refused = f"sizes that break {rule.size_rule} are refused"
        do = f"nothing: {rule.declare if one else refused}"
    if not own and new is not None:
        do += ", or auto=True on the Dim"
        if new.multiple_of > 1 and not new.offset and spec.padding is None:
            do += f', or padding=Padding({{"{rule.dim}": {new.multiple_of}}})'
    return Finding("dims", shortened(rule.words), rule.line, do, not own, rule.dim)


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
    from pipeline.machine.resources import Stopwatch

    spec, module = with_outputs(spec, module, seed)
    spec = with_tolerance(spec, module, seed)
    new, program, refinements = trace(replace(spec, refine_dims=True), module, seed, Stopwatch())
    found = narrowings(spec, new.dims, new.rules, refinements)
    return [*found, *_guards(new, program)], replace(new, refine_dims=spec.refine_dims), module


def narrowings(
    old: ModelSpec, dims: Mapping[str, Dim], rules: Sequence[str], refinements: Sequence[str]
) -> list[Finding]:
    """What was narrowed, one finding each; it stands in the way where a dim is not `auto`.

    Args:
        old: as it was asked for.
        dims, rules: what was left of it.
        refinements: what was narrowed and why, in words.
    """
    found = []
    more = ", ".join(rule for rule in rules if rule not in old.rules)
    for finding in (f for text in refinements for f in rule_findings(text, old.dims)):
        words = re.findall(r"\w+", finding.what.partition(":")[0])
        names = [finding.dim] if finding.do else [n for n in dict.fromkeys(words) if n in dims]
        own = bool(names) and all(map(old.auto, names))
        left = " and ".join(str(dims[name]) for name in names if name in dims)
        left += f", with {more}" if len(names) > 1 and more else ""
        declare = finding.do.removeprefix("declare ") or left
        do = f"nothing: narrowed to {declare}" if own else f"declare {declare}"
        found.append(replace(finding, blocks=not own, do=do))
    if found:
        holds = ", ".join([*map(str, dims.values()), *rules])
        found.append(Finding("dims", f"what follows holds for {holds} only"))
    return found


def _guards(spec: ModelSpec, program: torch.export.ExportedProgram) -> list[Finding]:
    """torch.export's guards, evaluated over the dims' ranges."""
    from pipeline.export.guards import broken_guards
    from pipeline.export.proof import unproved
    from pipeline.spec.model import inner_inputs

    guards = {
        str(guard.expr)
        for node in program.graph.nodes
        if node.op == "placeholder"
        for size in getattr(node.meta.get("val"), "shape", ())
        if not isinstance(size, int)
        for guard in size.node.shape_env.guards
    }
    if not guards:
        return [Finding("dims", "torch.export stands on no guard: every size goes the same way")]
    broken = broken_guards(program, inner_inputs(spec), spec.rules)
    open_ones = unproved(program, inner_inputs(spec), spec.rules)
    held = len(guards) - len(broken) - len(open_ones)
    found = [
        Finding("dims", f"guards of torch.export: {held} of {len(guards)} proved over the range"),
        *(Finding("dims", f"guard {line}") for line in open_ones[:_SHOWN]),
    ]
    for guard in broken[:_SHOWN]:
        words = "holds not for every size, but makes no difference at the sizes that were tried"
        found.append(Finding("dims", f"guard {shortened(guard.words)} {words}"))
    if broken[_SHOWN:]:
        found.append(Finding("dims", f"and {len(broken) - _SHOWN} more such guards"))
    return found


def fixed(spec: ModelSpec, names: Sequence[str], sizes: Mapping[str, int]) -> ModelSpec:
    """The spec with some dims of one size each: that of `sizes`, or their opt.

    A dim that `sizes` has at 0 stays as it is: no Dim is of the size 0 alone.
    """
    rules = []
    for name in names:
        dim = spec.dims[name]
        # of an opt of 0 nothing was tried: the first size above it
        size = dim.legal(sizes.get(name, dim.opt or dim.min + dim.multiple_of))
        if size:
            one = replace(dim, min=size, opt=size, max=size)
            rules.append(Rule(name, "", "", one))
    return refine(spec, rules)


def never_fixed(spec: ModelSpec, names: Sequence[str]) -> list[Finding]:
    """Those of the dims that `fixed` left as they were."""
    words = "can't be fixed at 0, the only size of it at which the model was seen to run"
    return [Finding("dims", f"{name} {words}") for name in names if not spec.dims[name].static]


def declared_as_is(spec: ModelSpec) -> ModelSpec:
    """The spec with no dim left to be narrowed: that has been done."""
    plain = [Rule(n, "", "", replace(dim, auto=False)) for n, dim in spec.dims.items() if dim.auto]
    return replace(refine(spec, plain) if plain else spec, refine_dims=False)
