"""What sizes a model takes, found by running it, applied to the spec or explained."""

from __future__ import annotations

from dataclasses import replace

import torch

from pipeline.errors import ConstraintError, ExportError
from pipeline.export.padding import inner_inputs
from pipeline.probe.probe import Probed, probe
from pipeline.probe.refine import equal_dims, merged, outer, refine
from pipeline.probe.rules import Rule
from pipeline.spec.dims import SizeRule, kept_rules
from pipeline.spec.model import ModelSpec


def narrowed(
    spec: ModelSpec, module: torch.nn.Module, seed: int, seconds: float = 20.0
) -> tuple[ModelSpec, list[str]]:
    """The spec with its dims narrowed to what the model takes, and what was narrowed, in words.

    Only where a dim is `Dim.auto`: the dims of other specs are held to what they declare, by
    torch.export and by the comparison.

    Args:
        spec: the spec.
        module: what it builds; called with its inputs one by one.
        seed: for the inputs' values.
        seconds: about how long it may take.

    Raises:
        ConstraintError: the model asks for something of a dim that may not be narrowed, or for
            something that neither a dim nor a rule on sizes can say.
        ExportError: the model runs at none of the sizes that were tried.
    """
    if not any(spec.auto(name) for name in spec.dims):
        return spec, []
    found = probe(inner_inputs(spec), module, seed, spec.rules, seconds)
    rules = [outer(rule, spec) for rule in found.rules]
    if found.base is None:
        why = "; ".join(rule.words for rule in rules) or "it ran at none of the sizes tried"
        raise ExportError(f"model {spec.name}: {why} ({found.words})")
    for rule in rules:
        names = SizeRule(rule.size_rule).names if rule.size_rule else {rule.dim}
        if not all(map(spec.auto, names)) or (rule.refined is None and not rule.size_rule):
            raise constraint_error(spec, rules, found)
    said = [str(rule) for rule in rules]
    rules = [_widened(rule, spec) for rule in rules]
    spec = refine(spec, [rule for rule in rules if rule.refined is not None])
    for rule in rules:
        if rule.size_rule:
            spec = _tied(spec, rule)
    return spec, said


def _widened(rule: Rule, spec: ModelSpec) -> Rule:
    """The rule with the range of all sizes that keep its `size_rule`, where a Dim that obeys it
    leaves some of them out (``(h + 3) % 32 < 4``: more than the multiples of 32)."""
    new = rule.refined
    if new is None or not rule.size_rule:
        return rule
    if spec.padding is not None or SizeRule(rule.size_rule).names != {rule.dim}:
        return replace(rule, size_rule="")
    dim = spec.dims[rule.dim]
    last = min(dim.max, new.max + new.multiple_of - 1)
    good = [
        n
        for n in range(dim.min, last + 1, dim.multiple_of)
        if n >= new.min and kept_rules([rule.size_rule], {rule.dim: n})
    ]
    opt = min(good, key=lambda n: abs(n - dim.opt))
    return replace(rule, refined=replace(dim, min=good[0], opt=opt, max=good[-1]))


def _tied(spec: ModelSpec, rule: Rule) -> ModelSpec:
    """The spec with a rule on sizes: one dim for two that must be equal."""
    names = equal_dims(spec, rule.size_rule)
    if names:
        one = merged(spec, *names)
        if one is None:
            raise constraint_error(spec, [rule])
        return one
    return replace(spec, rules=(*spec.rules, rule.size_rule))


def explained(spec: ModelSpec, module: torch.nn.Module, seed: int) -> ConstraintError | None:
    """What the model asks of its sizes, found by trying them; None if it takes all of them."""
    found = probe(inner_inputs(spec), module, seed, spec.rules)
    rules = [outer(rule, spec) for rule in found.rules]
    if found.base is None:
        return None
    return constraint_error(spec, rules, found) if rules else None


def constraint_error(
    spec: ModelSpec, rules: list[Rule], found: Probed | None = None
) -> ConstraintError:
    """The rules as an error that says what to declare.

    Args:
        spec: the spec.
        rules: at least one.
        found: how they were found, if by trying sizes.
    """
    allow = "; or set refine_dims=True (or auto=True on the Dim) to let the pipeline narrow it"
    if any(spec.auto(rule.dim) or rule.refined is None for rule in rules):
        allow = ""
    multiples = {
        rule.dim: rule.refined.multiple_of
        for rule in rules
        if rule.refined and rule.refined.multiple_of > 1 and not rule.refined.offset
    }
    if multiples and spec.padding is None and len(multiples) == len(rules):
        allow += f"; or padding=Padding({multiples}) to pad every size inside of the engine"
    how = f" (found by running the model: {found.words})" if found else ""
    return ConstraintError(f"model {spec.name}: {'; '.join(map(str, rules))}{allow}{how}")
