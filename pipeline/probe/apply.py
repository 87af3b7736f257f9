"""Applies rules on a model's sizes to its spec, for every kind of source."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pipeline.errors import ConstraintError, ExportError, InputError
from pipeline.probe.probe import SECONDS, Probed, probe
from pipeline.probe.rules import by_values
from pipeline.spec.dims import Dim, DimExpr, Size, SizeRule, kept_rules
from pipeline.spec.model import ModelSpec, inner_inputs
from pipeline.spec.padding import Padding, padded_name
from pipeline.spec.profiles import Profile
from pipeline.spec.rules import PaddedDim, Rule
from pipeline.spec.tensors import End

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Applied:
    """A spec after rules were applied to it.

    Args:
        spec: The narrowed spec.
        rules: The rules that were applied.
        left: The rules that could not be applied.
        merged: For each dim that was merged into another dim, that dim's name.
    """

    spec: ModelSpec
    rules: tuple[Rule, ...]
    left: tuple[Rule, ...] = ()
    merged: Mapping[str, str] = field(default_factory=dict)


def apply(spec: ModelSpec, rules: Sequence[Rule], *, bands: bool = False) -> Applied:
    """Narrows a spec by rules: smaller dims, one dim for two equal dims, and rules on sizes.

    Args:
        spec: The spec.
        rules: The rules, in terms of the spec's dims (see `for_user`).
        bands: True to keep all sizes of a rule such as ``h % 28 < 4``, with a range and a rule on
            sizes. Otherwise such a dim keeps sizes in equal steps, so that an output's formula can
            be fitted.
    """
    ready = [_whole_band(rule, spec) if bands else _stepped(rule) for rule in rules]
    spec = refine(spec, ready)
    done: list[Rule] = []
    left: list[Rule] = []
    renamed: dict[str, str] = {}
    for rule, own in zip(rules, ready, strict=True):
        if not own.size_rule:
            (done if own.refined is not None else left).append(rule)
            continue
        text = _rename(own.size_rule, renamed)
        names = equal_dims(spec, text)
        one = merge(spec, *names) if names else None
        if one is None:
            if names:  # they share no size
                left.append(rule)
                continue
            spec = replace(spec, rules=(*spec.rules, text))
        elif names:
            spec = one
            renamed = {old: _rename(new, {names[1]: names[0]}) for old, new in renamed.items()}
            renamed[names[1]] = names[0]
        done.append(rule)
    return Applied(spec, tuple(done), tuple(left), renamed)


def may_apply(spec: ModelSpec, rule: Rule) -> bool:
    """True if a Dim or a size rule expresses the rule, and the spec allows narrowing its dims.

    A range may become smaller, but not a single size, unless the spec allows that.
    """
    if rule.obstacle == "opt" or (rule.refined is None and not rule.size_rule):
        return False
    single = rule.refined is not None and rule.refined.static and not rule.size_rule
    if single and not spec.allow_narrow:
        return False
    names = SizeRule(rule.size_rule).names if rule.size_rule else {rule.dim}
    if rule.size_rule and not names <= spec.dims.keys():  # a rule on padded sizes
        return False
    return all(map(spec.auto, names))


def for_user(rule: Rule, spec: ModelSpec) -> Rule:
    """Completes a rule on a padded dim with its effect on the declared dim."""
    for name, multiple in (spec.padding.multiples if spec.padding else {}).items():
        if rule.dim != padded_name(name):
            continue
        padded = PaddedDim(spec.dims[name], multiple)
        rule, new = replace(rule, padded=padded), rule.refined
        if new is None:
            return rule
        if new.offset:
            shown = replace(rule, multiple=new.multiple_of, offset=new.offset)
            return replace(shown, refined=None, obstacle="padding-offset")
        if new.multiple_of > multiple:
            return rule
        padded = replace(padded, refined=_unpadded(spec.dims[name], new, multiple))
        if padded.refined is None:
            return replace(rule, refined=None, obstacle="padding-empty")
        return replace(rule, padded=padded)
    return rule


def _unpadded(dim: Dim, inner: Dim, multiple: int) -> Dim | None:
    """The sizes of `dim` that are padded to a size of `inner`; None if no size is."""
    step, first = dim.multiple_of, inner.min - multiple + 1
    low = max(dim.min, first + (dim.offset - first) % step)
    high = min(dim.max, inner.max - (inner.max - dim.offset) % step)
    if low > high:
        return None
    return replace(dim, min=low, opt=min(max(dim.opt, low), high), max=high)


def refine(spec: ModelSpec, rules: Sequence[Rule]) -> ModelSpec:
    """Puts the narrower dims of the rules into the spec's inputs, outputs and padding."""
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
    return with_dims(spec, refined, padding)


def with_dims(
    spec: ModelSpec, dims: Mapping[str, Dim], padding: Padding | None = None
) -> ModelSpec:
    """Replaces dims of a spec by other dims of the same names.

    Args:
        spec: The spec.
        dims: The new dims by name.
        padding: The new padding; None keeps the spec's padding.
    """

    def new_size(size: Size) -> Size:
        if isinstance(size, DimExpr):
            return DimExpr(size.text, tuple(dims.get(d.name, d) for d in size.dims))
        return dims.get(size.name, size) if isinstance(size, Dim) else size

    return replace(spec, **_shapes(spec, new_size), padding=padding or spec.padding)


def _shapes(spec: ModelSpec, new_size: Callable[[Size], Size]) -> dict[str, Any]:
    """The spec's inputs and outputs with every size replaced, as fields of the spec."""

    def end(value: End) -> End:
        return new_size(value) if isinstance(value, (Dim, DimExpr)) else value

    return {
        "inputs": tuple(
            replace(i, shape=tuple(map(new_size, i.shape)), low=end(i.low), high=end(i.high))
            for i in spec.inputs
        ),
        "outputs": tuple(
            replace(o, shape=o.shape and tuple(map(new_size, o.shape))) for o in spec.outputs
        ),
    }


def merge(spec: ModelSpec, stays: str, goes: str) -> ModelSpec | None:
    """Merges two dims of a spec that must be equal.

    Args:
        spec: The spec.
        stays: The name of the merged dim.
        goes: The name of the dim that disappears.

    Returns:
        The spec. The merged dim has the sizes that both dims have. None if they share no size.
    """
    a, b = spec.dims[stays], spec.dims[goes]
    step = math.lcm(a.multiple_of, b.multiple_of)
    both = [n for n in range(a.min, a.max + 1, a.multiple_of) if b.min <= n <= b.max]
    both = [n for n in both if (n - b.offset) % b.multiple_of == 0]
    if not both:
        return None
    opt = min(both, key=lambda n: abs(n - a.opt))
    one = replace(a, min=both[0], opt=opt, max=both[-1], multiple_of=step, offset=both[0] % step)
    renamed = {goes: stays}

    def new_size(size: Size) -> Size:
        if isinstance(size, Dim):
            return one if size.name in (stays, goes) else size
        if isinstance(size, DimExpr) and size.names & {stays, goes}:
            dims = [one if d.name in (stays, goes) else d for d in size.dims]
            return DimExpr(_rename(size.text, renamed), tuple(dict.fromkeys(dims)))
        return size

    rules = (_rename(rule, renamed) for rule in spec.rules)
    return replace(
        spec,
        **_shapes(spec, new_size),
        rules=tuple(rule for rule in rules if rule != f"{stays} == {stays}"),
        profiles=tuple(_merge_ranges(profile, stays, goes) for profile in spec.profiles),
    )


def _rename(formula: str, names: Mapping[str, str]) -> str:
    """Renames the dims of a formula."""
    return re.sub(r"[A-Za-z_]\w*", lambda match: names.get(match[0], match[0]), formula)


def equal_dims(spec: ModelSpec, size_rule: str) -> tuple[str, str] | None:
    """The two dims of a size rule ``h == w`` that one dim can replace, in the spec's order.

    Returns None for any other rule, and if the spec pads sizes.
    """
    if not size_rule or spec.padding is not None:
        return None
    rule = SizeRule(size_rule)
    names = (rule.left.text, rule.right.text)
    if rule.sign != "==" or not {*names} <= spec.dims.keys():
        return None
    stays, goes = sorted(names, key=list(spec.dims).index)
    return stays, goes


def merge_profiles(profiles: Sequence[Profile], merged: Mapping[str, str]) -> tuple[Profile, ...]:
    """Writes profiles in terms of merged dims.

    Args:
        profiles: The profiles, which may name dims that were merged.
        merged: For each dim that was merged into another dim, that dim's name.

    Raises:
        InputError: The ranges of dims that became one have no size in common.
    """
    for goes, stays in merged.items():
        profiles = [_merge_ranges(profile, stays, goes) for profile in profiles]
    return tuple(profiles)


def _merge_ranges(profile: Profile, stays: str, goes: str) -> Profile:
    """Merges the ranges of two dims that became one: the sizes in both ranges stay."""
    ranges = dict(profile.ranges)
    if goes not in ranges:
        return profile
    low, opt, high = ranges.pop(goes)
    if stays in ranges:
        a, middle, b = ranges[stays]
        low, high = max(low, a), min(high, b)
        if low > high:
            raise InputError(
                f"profile {profile.name}: {stays} and {goes} must be equal, but their ranges have "
                "no size in common. Change one of the ranges"
            )
        opt = min(max(middle, low), high)
    return replace(profile, ranges={**ranges, stays: (low, opt, high)})


def fit_to_module(
    spec: ModelSpec, module: torch.nn.Module, seed: int, *, brief: bool = False
) -> tuple[ModelSpec, list[Rule]]:
    """Narrows the dims of a spec to the sizes at which its module runs.

    Does nothing if no dim may be narrowed (`Dim.auto`). torch.export and the comparison then check
    the declared sizes.

    Args:
        spec: The spec.
        module: The module that the spec builds, called with one tensor for each input.
        seed: The seed of the inputs' values.
        brief: See `pipeline.probe.probe.probe`.

    Returns:
        The narrowed spec, and the rules that narrowed it.

    Raises:
        ConstraintError: The model needs a rule on a dim that may not be narrowed. Or neither a dim
            nor a rule on sizes can express the rule.
        ExportError: The model runs at none of the sizes that were tried.
    """
    if not any(spec.auto(name) for name in spec.dims):
        return spec, []
    found = probe(
        inner_inputs(spec), module, seed, spec.rules, spec.search_seconds or SECONDS, brief=brief
    )
    rules = [for_user(rule, spec) for rule in found.rules]
    if found.base is None:
        if not rules:
            raise ExportError(f"model {spec.name}: it ran at none of the sizes that were tried")
        (rule,) = rules
        raise ExportError(
            f"model {spec.name}: {rule.text('it')}{f' ({rule.line})' if rule.line else ''}",
            line=rule.line,
            what=rule.text("it"),
            do=rule.advice(),
        )
    if not all(may_apply(spec, rule) for rule in rules):
        raise constraint_error(spec, rules, found)
    done = apply(spec, rules, bands=True)
    if done.left:
        raise constraint_error(spec, done.left)
    return done.spec, rules


def _stepped(rule: Rule) -> Rule:
    """The rule without its rule on sizes, if it also has a Dim."""
    return rule if rule.refined is None else replace(rule, size_rule="")


def _whole_band(rule: Rule, spec: ModelSpec) -> Rule:
    """Gives a rule the range of all sizes that keep its `size_rule`.

    A Dim alone that keeps ``(h + 3) % 32 < 4`` excludes all sizes but the multiples of 32.
    """
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


def explain_by_running(
    spec: ModelSpec, module: torch.nn.Module, seed: int
) -> ConstraintError | None:
    """The error for the rules that a model needs. Runs the model at many sizes to find them.

    Returns None if the model runs at all of these sizes, or at none.
    """
    found = probe(inner_inputs(spec), module, seed, spec.rules, spec.search_seconds or SECONDS)
    rules = [for_user(rule, spec) for rule in found.rules]
    if found.base is None:
        return None
    return constraint_error(spec, rules, found) if rules else None


def constraint_error(
    spec: ModelSpec, rules: Sequence[Rule], found: Probed | None = None
) -> ConstraintError:
    """Makes an error from rules. It states what to declare.

    Args:
        spec: The spec.
        rules: The rules, at least one.
        found: The result of the probe, if a probe found the rules.
    """
    ways = []
    if not any(spec.auto(r.dim) or r.refined is None or r.refined.static for r in rules):
        ways.append("set refine_dims=True (or auto=True on the Dim) to let the pipeline narrow it")
    multiples = {
        rule.dim: rule.refined.multiple_of
        for rule in rules
        if rule.refined and rule.refined.multiple_of > 1 and not rule.refined.offset
    }
    if multiples and spec.padding is None and len(multiples) == len(rules):
        ways.append(f"padding=Padding({multiples}) to pad every size inside the engine")
    hint = by_values(spec) if any(rule.by_values for rule in rules) else ""
    how = f"by running the model: {found.words}" if found else ""
    text = "; or ".join(["; ".join(map(str, rules)), *ways])
    advice = [*(f"Or {way}" for way in ways), hint.lstrip(". "), how and f"Found {how}"]
    return ConstraintError(
        f"model {spec.name}: {text}{hint}{how and f' (found {how})'}",
        rules=tuple(rules),
        advice=tuple(filter(None, advice)),
    )
