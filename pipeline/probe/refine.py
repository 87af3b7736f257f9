"""Rules on dims carried over into a spec: narrower dims, a larger multiple to pad to."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace

from pipeline.errors import InputError
from pipeline.probe.rules import Rule
from pipeline.spec.dims import Dim, DimExpr, Size
from pipeline.spec.model import ModelSpec, padded_name
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
