"""Makes rules on one dim from a set of good sizes, a range or a step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from pipeline.errors import InputError
from pipeline.spec.dims import Dim
from pipeline.spec.model import ModelSpec
from pipeline.spec.rules import Rule, RuleKind
from pipeline.spec.tensors import Input

_MOST_RESIDUES = 128


def fitted(dim: Dim, good: Sequence[int], guard: str = "") -> Rule:
    """The rule that keeps only the good sizes of a dim.

    Args:
        dim: The dim, with more legal sizes than the good ones.
        good: The sizes to keep, in ascending order.
        guard: The guard of torch.export that the good sizes keep, in terms of the dims. It becomes
            the rule's text if the good sizes are not a range of equal steps.
    """
    if not good:
        return Rule("guard", dim.name, formula=guard)
    if len(good) == 1:
        return narrowed(dim, "fixed", (good[0], good[0]), shown=True)
    step = math.gcd(*(size - good[0] for size in good[1:]))
    if list(good) != list(range(good[0], good[-1] + 1, step)):
        return Rule("guard", dim.name, formula=guard)
    ends = (good[0], good[-1])
    if step == dim.multiple_of:
        return narrowed(dim, "range", ends, (step, good[0] % step), shown=True)
    # the text has the range only if it is smaller than the dim's range
    shown = good[0] - step >= dim.min or good[-1] + step <= dim.max
    return narrowed(dim, "multiple", ends, (step, good[0] % step), shown=shown)


def residues(tested: Mapping[int, bool]) -> tuple[int, int, int] | None:
    """(m, a, b) if the sizes with ``a <= n % m <= b``, and no others, fail (wraps if a > b).

    Args:
        tested: Whether each size runs. Every residue of m must have been tried.
    """
    for modulus in range(2, _MOST_RESIDUES + 1):
        seen: dict[int, bool] = {}
        if not all(seen.setdefault(n % modulus, ok) == ok for n, ok in tested.items()):
            continue
        if len(seen) < modulus or len(tested) < 2 * modulus or all(seen.values()):
            return None
        failing = {r for r, ok in seen.items() if not ok}
        starts = [r for r in failing if (r - 1) % modulus not in failing]
        if len(starts) != 1:
            return None
        return modulus, starts[0], (starts[0] + len(failing) - 1) % modulus
    return None


def banded(dim: Dim, modulus: int, a: int, b: int) -> Rule:
    """The rule that ``dim % modulus`` is not in a..b (wraps around if a > b)."""
    name, failing = dim.name, (b - a) % modulus + 1
    first = (b + 1) % modulus  # of the residues that run
    shifted = f"({name} + {modulus - first}) % {modulus}" if first else f"{name} % {modulus}"
    text = f"{shifted} < {modulus - failing}"
    if failing == 1:
        text = f"{name} % {modulus} != {a}"
    refined = None
    if 2 * failing > modulus:  # most sizes fail: a step is good enough
        rest = 0 if (-first) % modulus < modulus - failing else first
        legal = range(dim.min, dim.max + 1, dim.multiple_of)
        refined = fitted(dim, [n for n in legal if n % modulus == rest]).refined
    return Rule("band", name, refined=refined, size_rule=text)


def narrowed(
    dim: Dim,
    kind: RuleKind,
    ends: tuple[int, int],
    step: tuple[int, int] = (1, 0),
    *,
    shown: bool,
) -> Rule:
    """The rule that keeps the sizes of a dim in a range and in steps.

    Args:
        dim: The dim.
        kind: ``fixed``, ``range`` or ``multiple``.
        ends: The smallest and the largest size; they need not be in step.
        step: The multiple and the offset of the sizes.
        shown: True if the range is part of the rule's text.
    """
    multiple, offset = step
    rule = Rule(kind, dim.name, ends=ends if shown else None, multiple=multiple, offset=offset)
    low = ends[0] + (offset - ends[0]) % multiple
    high = ends[1] - (ends[1] - offset) % multiple
    opt = min(max(dim.opt - (dim.opt - offset) % multiple, low), high)
    try:
        new = replace(dim, min=low, opt=opt, max=high, multiple_of=multiple, offset=offset)
    except InputError:  # nothing is left of the range
        return replace(rule, obstacle="zero" if high == 0 else "empty")
    return replace(rule, refined=new)


def _integers(declared: Input) -> str:
    """The random integers of an input as text, both ends included."""
    low, high = declared.low, declared.high
    plain = isinstance(low, (int, float)) and isinstance(high, (int, float))
    return f"{low:g}..{high - 1:g}" if plain and not declared.pattern else declared.drawn


def by_values(spec: ModelSpec) -> str:
    """A hint for a run that may have failed because of random integers."""
    names = [i.name for i in spec.inputs if i.dtype.startswith(("int", "uint"))]
    if not names:
        return ""
    ranges = ", ".join(f"{i.name} {_integers(i)}" for i in spec.inputs if i.name in names)
    return (
        f". If the values of integer inputs cause this ({ranges}), pass --range NAME=LOW..HIGH. "
        "If an input sets a shape or an axis, make it a constant"
    )
