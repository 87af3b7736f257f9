"""Classifies torch.export's rules: a size that is baked in, one branch of several, or a range."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from pipeline.probe.eager import EagerModule
from pipeline.probe.grid import MOST_SIZES, legal_sizes
from pipeline.probe.rules import banded, residues
from pipeline.probe.sample_sizes import dims_of, examples
from pipeline.spec.dims import Dim, kept_rules
from pipeline.spec.model import ModelSpec
from pipeline.spec.rules import Rule


def find_baked(
    rules: Sequence[Rule],
    eager: EagerModule,
    sizes: Mapping[str, int],
    example_sizes: Sequence[Mapping[str, int]],
) -> list[Rule]:
    """Marks the rules that only fix a dim at its example size.

    Such a dim (``int(x.shape[2])``) must not be narrowed: the model runs at other sizes too.

    Args:
        rules: the rules that torch.export needs.
        eager: the module and its inputs.
        sizes: the example sizes of the export.
        example_sizes: all example sizes.

    Returns:
        The rules; such a rule has the kind ``baked-in`` or ``example-size``.
    """
    result = []
    for rule in rules:
        new = rule.refined
        if new is not None and new.static and sizes[rule.dim] == new.min:
            others = [e for e in example_sizes if e[rule.dim] != sizes[rule.dim]]
            taken = [e for e in others if eager.runs_at(e)]
            fails = tuple(e[rule.dim] for e in others if e not in taken)
            found = Rule("baked-in", rule.dim, line=rule.line)
            if taken and fails:
                seen = tuple(e[rule.dim] for e in taken)
                found = replace(found, kind="example-size", runs=seen[:1], fails=fails[:1])
            result.append(found if taken else rule)
        else:
            result.append(rule)
    return result


def by_remainder(dim: Dim, good: Sequence[int]) -> Rule | None:
    """The rule on the remainder of a size that keeps the good sizes, such as ``t % 64 != 20``.

    None if there is no such rule. If it excludes the dim's opt, another opt is a suggestion.
    """
    kept = set(good)
    found = residues({n: n in kept for n in legal_sizes(dim, MOST_SIZES)})
    if found is None:
        return None
    rule = banded(dim, *found)
    if dim.opt in kept:
        return rule
    other = replace(dim, opt=min(good, key=lambda n: abs(n - dim.opt)))
    return replace(rule, refined=None, suggested=other, obstacle="opt", opt=dim.opt)


def by_one_size(dim: Dim, good: Sequence[int]) -> Rule | None:
    """The rule that excludes the only missing size, such as ``h != 100``.

    None if more sizes are missing. If the dim's opt is missing, the longest range without it is a
    suggestion.
    """
    legal = legal_sizes(dim, MOST_SIZES)
    missing = sorted(set(legal) - set(good))
    if len(missing) != 1:
        return None
    text = f"{dim.name} != {missing[0]}"
    if dim.opt != missing[0]:
        return Rule("relation", dim.name, size_rule=text)
    at = legal.index(dim.opt)
    longest = max(legal[:at], legal[at + 1 :], key=len)
    other = replace(dim, min=longest[0], opt=longest[0], max=longest[-1])
    return Rule("guard", dim.name, formula=text, obstacle="opt", suggested=other, opt=dim.opt)


def unequal(
    dims: Sequence[Dim], broken: np.ndarray, eager: EagerModule, near: Mapping[str, int]
) -> Rule | None:
    """The rule that excludes equal sizes of two dims, such as ``t != s``.

    None if other sizes break it too, or if the model fails at equal sizes: then it is no branch.

    Args:
        dims: the dims of a guard.
        broken: the sizes that break it, int [combinations, dims].
        eager: the module and its inputs.
        near: sizes at which it runs.
    """
    if len(dims) != 2 or (broken[:, 0] != broken[:, 1]).any():
        return None
    first, second = dims
    shared = {*legal_sizes(first, MOST_SIZES)} & {*legal_sizes(second, MOST_SIZES)}
    if {*broken[:, 0].tolist()} != shared:
        return None
    if not eager.runs_at({**near, **dict.fromkeys((first.name, second.name), min(shared))}):
        return None
    formula = f"{first.name} != {second.name}"
    return Rule("guard", first.name, (second.name,), formula=formula, obstacle="equal")


def with_branch(rule: Rule, eager: EagerModule) -> Rule:
    """Adds to a rule, as its `branch`, a size that it excludes and at which the model runs.

    A number that is too large for ONNX makes no branch.
    """
    if rule.too_large:
        return rule
    dim = dims_of(eager.inputs).get(rule.dim)
    out = next(iter(_outside(rule, dim)), None) if dim is not None else None
    if out is None or not eager.runs_at({**examples(eager.inputs)[0], rule.dim: out}):
        return rule
    return replace(rule, branch=out)


def excluded(
    rules: Sequence[Rule], eager: EagerModule, sizes: Mapping[str, int]
) -> dict[str, int] | None:
    """Sizes close to these that break a rule on each dim that has rules.

    None if no rule is on a single dim, or if the model does not run at the sizes.
    """
    found = dict(sizes)
    for name, dim in dims_of(eager.inputs).items():
        out = {n for rule in rules if rule.dim == name for n in _outside(rule, dim) if n > 1}
        others = {size for other, size in found.items() if other != name}
        if out - others:
            found[name] = min(out - others, key=lambda n: (abs(n - sizes[name]), n))
    return found if found != sizes and eager.runs_at(found) else None


def _outside(rule: Rule, dim: Dim) -> list[int]:
    """The legal sizes that a rule excludes; none if it does not name any."""
    new, legal = rule.refined, legal_sizes(dim, 1 << 12)
    if rule.size_rule or new is None:
        known = bool(rule.size_rule)
        return [n for n in legal if known and not kept_rules([rule.size_rule], {dim.name: n})]
    inside = range(new.min, new.max + 1, new.multiple_of)
    return [n for n in legal if n not in inside]


def without_opt(rule: Rule, dim: Dim | None) -> Rule:
    """Turns a range that excludes the dim's opt into a suggestion.

    The example may have taken another side of a branch than the one that the user wants.
    """
    new = rule.refined
    if dim is None or new is None or new.multiple_of != dim.multiple_of:
        return rule
    if new.min <= dim.opt <= new.max:
        return rule
    return replace(rule, refined=None, suggested=new, obstacle="opt", opt=dim.opt)


def keep_opt(rules: Sequence[Rule], spec: ModelSpec) -> bool:
    """True if every rule keeps the dim's opt and more sizes."""
    opts = {name: dim.opt for name, dim in spec.dims.items()}
    for rule in rules:
        dim, new = spec.dims.get(rule.dim), rule.refined
        if dim is None:  # it is padded
            return False
        if rule.size_rule and not rule.obstacle and kept_rules([rule.size_rule], opts):
            continue
        if new is None or new.static:
            return False
        if dim.opt not in range(new.min, new.max + 1, new.multiple_of):
            return False
    return True


def one_sided(rules: Sequence[Rule], spec: ModelSpec) -> bool:
    """Whether rules may be artefacts of the example's sizes, so that a rounder example may help.

    A rule may be one side of a branch: odd sizes are padded, and the example has an even one. A
    program from the other side may serve both. So may one for a rule that keeps ``16*k + 1``.
    A dim may also be fixed because the example is too small: a size inside the model is 1, which
    torch treats as a constant.
    """

    def doubtful(rule: Rule) -> bool:
        new = rule.refined
        if rule.branch is not None:
            return True
        if new is None:
            return rule.kind in ("baked-in", "example-size")
        declared = spec.dims.get(rule.dim)
        offset = new.offset > 0 and spec.auto(rule.dim)
        return (new.static or offset) and (declared is None or declared.offset == 0)

    return any(map(doubtful, rules))
