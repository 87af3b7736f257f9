"""What a rule that torch.export asks for means: a size baked in, one branch of several, a range."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from pipeline.probe.eager import dims_of, examples, runs
from pipeline.probe.grid import legal_sizes
from pipeline.probe.rules import Rule
from pipeline.spec.dims import Dim
from pipeline.spec.model import ModelSpec, inner_inputs
from pipeline.spec.tensors import Input

_BRANCH = "by another branch"


def tell_baked(
    rules: Sequence[Rule],
    inputs: Sequence[Input],
    module: torch.nn.Module,
    seed: int,
    sizes: Mapping[str, int],
    example_sizes: Sequence[Mapping[str, int]],
) -> list[Rule]:
    """The rules, but that a dim fixed at whatever the example was is said to be baked in.

    Such a dim (``int(x.shape[2])``) must not be refined: the model works at other sizes too.
    """
    result = []
    for rule in rules:
        fixed = rule.refined is not None and rule.refined.static
        if fixed and sizes[rule.dim] == rule.refined.min:  # type: ignore[union-attr]
            others = [e for e in example_sizes if e[rule.dim] != sizes[rule.dim]]
            taken = [e for e in others if runs(inputs, module, seed, e)]
            refused = [e[rule.dim] for e in others if e not in taken]
            if taken and refused:
                words = (
                    f"{rule.dim}: torch.export takes its size for fixed, and the model runs at "
                    f"{taken[0][rule.dim]} and not at {refused[0]}"
                )
                declare = f"the sizes of {rule.dim} that it takes (auto=True finds them)"
                result.append(replace(rule, words=words, declare=declare, refined=None))
                continue
            if taken:
                words = f"{rule.dim} is baked in: the model makes a Python number of it"
                declare = f"a number in place of {rule.dim}, or keep it symbolic in that line"
                result.append(replace(rule, words=words, declare=declare, refined=None))
                continue
        result.append(rule)
    return result


def branched(rule: Rule, spec: ModelSpec, module: torch.nn.Module, seed: int) -> Rule:
    """The rule; where the model itself runs at a size that the rule leaves out, it says so."""
    inputs, new = inner_inputs(spec), rule.refined
    dim = dims_of(inputs).get(rule.dim)
    if dim is None or new is None:
        return rule
    kept = range(new.min, new.max + 1, new.multiple_of)
    out = next((n for n in legal_sizes(dim, 1 << 12) if n not in kept), None)
    if out is None or not runs(inputs, module, seed, {**examples(inputs)[0], dim.name: out}):
        return rule
    said = f"{rule.words} (the model runs at {dim.name}={out} too, {_BRANCH})"
    return replace(rule, words=said)


def keep_opt(rule: Rule, dim: Dim | None) -> Rule:
    """The rule, not to be applied by itself where it is a range without the dim's opt.

    The example may just have taken the other side of a branch than the one that is wanted.
    """
    new = rule.refined
    if dim is None or new is None or new.multiple_of != dim.multiple_of:
        return rule
    if new.min <= dim.opt <= new.max:
        return rule
    return replace(rule, refined=None, declare=f"{rule.declare} if opt={dim.opt} may go")


def one_sided(rules: Sequence[Rule], spec: ModelSpec) -> bool:
    """True if rules may hold for the example's sizes alone, and a rounder example is worth a try.

    A rule that leaves sizes such as ``16*k + 1`` may be the side of a branch that odd sizes take
    (a pad by 1); and a dim may be fixed because the example is so small that a size inside of the
    model is 1, which torch takes for a number.
    """

    def doubtful(rule: Rule) -> bool:
        new = rule.refined
        if new is None:
            return "baked in" in rule.words or "for fixed" in rule.words
        if new.multiple_of == 1 and _BRANCH in rule.words:
            return True
        declared = spec.dims.get(rule.dim)
        offset = new.offset > 0 and spec.auto(rule.dim)
        return (new.static or offset) and (declared is None or declared.offset == 0)

    return any(map(doubtful, rules))


def in_words(sizes: Mapping[str, int]) -> str:
    """``h=33, w=64``."""
    return ", ".join(f"{name}={size}" for name, size in sizes.items())
