"""Rules on dims carried over into a spec: narrower dims, a larger multiple to pad to."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace

import torch

from pipeline.errors import ConstraintError, ExportError, InputError
from pipeline.probe.probe import Probed, probe
from pipeline.probe.rules import Rule
from pipeline.spec.dims import Dim, DimExpr, Size, SizeRule, kept_rules
from pipeline.spec.model import ModelSpec, inner_inputs
from pipeline.spec.padding import padded_name
from pipeline.spec.profiles import Profile


def outer(rule: Rule, spec: ModelSpec) -> Rule:
    """A rule on a padded dim in terms of the dim that the user declares."""
    for name, multiple in (spec.padding.multiples if spec.padding else {}).items():
        if rule.dim != padded_name(name):
            continue
        words = rule.words.replace(rule.dim, f"{name} as padded")
        inner = rule.refined
        if inner is None:
            return replace(rule, words=words, declare=rule.declare.replace(rule.dim, name))
        if inner.offset:
            declare = f"no padding: it gives multiples only, and none of {rule.declare}"
            return replace(rule, words=words, declare=declare, refined=None)
        if inner.multiple_of > multiple:
            return replace(rule, words=words, declare=f'Padding({{"{name}": {inner.multiple_of}}})')
        new = _unpadded(spec.dims[name], inner, multiple)
        if new is None:
            return replace(rule, words=words, declare=f"another range of {name}", refined=None)
        step = f", multiple_of={new.multiple_of}" if new.multiple_of > 1 else ""
        step += f", offset={new.offset}" if new.offset else ""
        declare = f'Dim("{name}", min={new.min}, opt={new.opt}, max={new.max}{step})'
        return replace(rule, words=words, declare=declare)
    return rule


def _unpadded(dim: Dim, inner: Dim, multiple: int) -> Dim | None:
    """The sizes of `dim` that are padded to a size of `inner`; None if there are none."""
    step, first = dim.multiple_of, inner.min - multiple + 1
    low = max(dim.min, first + (dim.offset - first) % step)
    high = min(dim.max, inner.max - (inner.max - dim.offset) % step)
    if low > high:
        return None
    return replace(dim, min=low, opt=min(max(dim.opt, low), high), max=high)


def refine(spec: ModelSpec, rules: Sequence[Rule]) -> ModelSpec:
    """The spec with every refined dim in its place, in inputs, outputs and padding."""
    refined = {rule.dim: rule.refined for rule in rules if rule.refined is not None}
    padding = spec.padding
    for name, multiple in (spec.padding.multiples if spec.padding else {}).items():
        inner = refined.pop(padded_name(name), None)
        if inner is None or padding is None:
            continue
        if inner.multiple_of > multiple:
            padding = replace(padding, multiples={**padding.multiples, name: inner.multiple_of})
        elif (new := _unpadded(spec.dims[name], inner, multiple)) is not None:
            refined[name] = new

    def new_size(size: Size) -> Size:
        if isinstance(size, DimExpr):
            return DimExpr(size.text, tuple(refined.get(d.name, d) for d in size.dims))
        return refined.get(size.name, size) if isinstance(size, Dim) else size

    def all_new(shape: Sequence[Size]) -> tuple[Size, ...]:
        return tuple(new_size(size) for size in shape)

    return replace(
        spec,
        inputs=tuple(replace(i, shape=all_new(i.shape)) for i in spec.inputs),
        outputs=tuple(
            replace(o, shape=None if o.shape is None else all_new(o.shape)) for o in spec.outputs
        ),
        padding=padding,
    )


def merged(spec: ModelSpec, kept: str, gone: str) -> ModelSpec | None:
    """The spec with one dim for two that must be equal, called `kept`, of the sizes that both
    have; None if there are none."""
    a, b = spec.dims[kept], spec.dims[gone]
    step = math.lcm(a.multiple_of, b.multiple_of)
    both = [n for n in range(a.min, a.max + 1, a.multiple_of) if b.min <= n <= b.max]
    both = [n for n in both if (n - b.offset) % b.multiple_of == 0]
    if not both:
        return None
    opt = min(both, key=lambda n: abs(n - a.opt))
    one = replace(a, min=both[0], opt=opt, max=both[-1], multiple_of=step, offset=both[0] % step)

    def renamed(text: str) -> str:
        return re.sub(rf"\b{re.escape(gone)}\b", kept, text)

    def new_size(size: Size) -> Size:
        if isinstance(size, Dim):
            return one if size.name in (kept, gone) else size
        if isinstance(size, DimExpr) and size.names & {kept, gone}:
            dims = [one if d.name in (kept, gone) else d for d in size.dims]
            return DimExpr(renamed(size.text), tuple(dict.fromkeys(dims)))
        return size

    shapes = {i.name: tuple(map(new_size, i.shape)) for i in spec.inputs}
    return replace(
        spec,
        inputs=tuple(replace(i, shape=shapes[i.name]) for i in spec.inputs),
        outputs=tuple(
            replace(o, shape=o.shape and tuple(map(new_size, o.shape))) for o in spec.outputs
        ),
        rules=tuple(renamed(rule) for rule in spec.rules if renamed(rule) != f"{kept} == {kept}"),
        profiles=tuple(_profile(profile, kept, gone) for profile in spec.profiles),
    )


def equal_dims(spec: ModelSpec, rule: str) -> tuple[str, str] | None:
    """The two dims of a rule like ``h == w`` that one dim can stand for, the first one first; None
    for another rule, and where sizes are padded."""
    match = re.fullmatch(r"(\w+) == (\w+)", rule)
    if match is None or spec.padding is not None or not {*match.groups()} <= spec.dims.keys():
        return None
    kept, gone = sorted(match.groups(), key=list(spec.dims).index)
    return kept, gone


def _profile(profile: Profile, kept: str, gone: str) -> Profile:
    """The profile with one range for two dims that became one: what both ranges have."""
    ranges = dict(profile.ranges)
    if gone not in ranges:
        return profile
    low, opt, high = ranges.pop(gone)
    if kept in ranges:
        a, middle, b = ranges[kept]
        low, high = max(low, a), min(high, b)
        if low > high:
            raise InputError(
                f"profile {profile.name}: {kept} and {gone} must be equal, and their ranges have "
                "no size in common"
            )
        opt = min(max(middle, low), high)
    return replace(profile, ranges={**ranges, kept: (low, opt, high)})


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
