"""Formulas for sizes that were seen: what an output's size is of the inputs' dims."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction

import numpy as np

from pipeline.errors import InputError
from pipeline.spec.dims import evaluate

Point = tuple[Mapping[str, int], int]  # the dims' sizes, and the size that was seen there


_LARGEST_DIVISOR = 64  # of a size


def holds_at(text: int | str, points: Sequence[Point]) -> bool:
    """True if the formula gives every size that was seen."""
    for sizes, value in points:
        try:
            if evaluate(text, sizes) != value:
                return False
        except InputError:  # a name that is no dim, or a division that is not exact
            return False
    return True


def formula(points: Sequence[Point], base: Mapping[str, int]) -> int | str | None:
    """The simplest formula that gives every size that was seen, or None.

    Tried in this order: a number; a quotient of one dim ``(a*h + b)//c``; a sum of quotients; a
    product of all dims times a fraction; a product of quotients, perhaps with a number added (the
    class token beside the patches); a sum of such products is not.

    Args:
        points: among them, for each dim, some that differ from `base` in that dim only.
        base: the sizes at which those lines cross.
    """
    values = {value for _, value in points}
    if len(values) == 1:
        return values.pop()
    for candidate in _candidates(points, base):
        if holds_at(candidate, points):
            return candidate
    return None


def _candidates(points: Sequence[Point], base: Mapping[str, int]) -> Iterator[str]:
    lines = {name: _line(points, base, name) for name in base}
    moving = [name for name, line in lines.items() if len(set(line.values())) > 1]
    start = next((value for sizes, value in points if dict(sizes) == dict(base)), None)
    for name in base:
        every = {sizes[name]: value for sizes, value in points}
        found = _quotient(every)
        if found is not None and len(moving) <= 1:
            yield _text(name, *found)
    if start is None or not moving:
        return
    yield from _sum(lines, moving, start)
    product = _fraction(points, moving)
    if product:
        yield product
    for more in (0, 1, -1, *range(2, 9)):
        found_product = _product(lines, moving, base, start, more)
        if found_product:
            yield found_product


def _line(points: Sequence[Point], base: Mapping[str, int], name: str) -> dict[int, int]:
    return {
        sizes[name]: value
        for sizes, value in points
        if all(sizes[other] == base[other] for other in base if other != name)
    }


def _quotient(line: Mapping[int, int]) -> tuple[int, int, int] | None:
    """(a, b, c) with ``(a*size + b)//c`` on the whole line."""

    pairs = np.array(sorted(line.items()))
    return quotient(pairs[:, 0], pairs[:, 1]) if len(pairs) > 1 else None


def _sum(
    lines: Mapping[str, Mapping[int, int]], moving: Sequence[str], start: int
) -> Iterator[str]:
    terms, constant = [], -(len(moving) - 1) * start
    for name in moving:
        found = _quotient(lines[name])
        if found is None:
            return
        a, b, c = found
        constant += b // c
        terms.append(_text(name, a, b % c, c))
    yield " + ".join(terms) + _plus(constant)


def _fraction(points: Sequence[Point], moving: Sequence[str]) -> str:
    """``(a*h*w)//c`` where the product times a/c is a whole number at every point."""
    ratios = {Fraction(value, math.prod(s[n] for n in moving)) for s, value in points}
    if len(ratios) != 1:
        return ""
    ratio = ratios.pop()
    top = "*".join(moving if ratio.numerator == 1 else [str(ratio.numerator), *moving])
    return top if ratio.denominator == 1 else f"({top})//{ratio.denominator}"


def _product(
    lines: Mapping[str, Mapping[int, int]],
    moving: Sequence[str],
    base: Mapping[str, int],
    start: int,
    more: int,
) -> str:
    """``k*q(h)*q(w) + more`` with a quotient q of each dim."""
    factors, rest = [], Fraction(start - more)
    for name in moving:
        line = {size: value - more for size, value in lines[name].items()}
        common = math.gcd(*line.values())
        if common < 1:
            return ""
        found = _quotient({size: value // common for size, value in line.items()})
        if found is None:
            return ""
        a, b, c = found
        if (a * base[name] + b) // c < 1:
            return ""
        rest /= (a * base[name] + b) // c
        text = _text(name, a, b, c)
        factors.append(text if c > 1 or text == name else f"({text})")
    if rest.denominator != 1 or rest < 1:
        return ""
    texts = [f"({t})" if "//" in t else t for t in factors]
    return "*".join([str(rest)] * (rest > 1) + texts) + _plus(more)


def _text(name: str, a: int, b: int, c: int) -> str:
    top = (name if a == 1 else f"{a}*{name}") + _plus(b)
    if c == 1:
        return top
    return f"({top})//{c}" if top != name else f"{name}//{c}"


def _plus(number: int) -> str:
    return f" {'+' if number > 0 else '-'} {abs(number)}" if number else ""


def doubts(
    text: int | str, base: Mapping[str, int], legal: Mapping[str, Sequence[int]]
) -> Iterator[dict[str, int]]:
    """Small sizes at which a formula with another rounding would give another size.

    ``h//32`` and ``(h + 1)//32`` differ at one size in 32 only: those where the formula's value is
    about to change, and has just changed.

    Args:
        text: the formula.
        base: sizes; one dim at a time differs from them.
        legal: sizes of each dim in ascending order.
    """
    for name, sizes in legal.items():
        line = [(size, _value(text, {**base, name: size})) for size in sizes]
        steps = [
            n
            for n in range(1, len(line))
            if line[n][1] != line[n - 1][1] and line[n][0] - line[n - 1][0] <= 1
        ]
        if len(steps) == len(line) - 1:  # it changes everywhere: nothing is rounded
            continue
        for n in steps[:2]:
            yield {**base, name: line[n - 1][0]}
            yield {**base, name: line[n][0]}


def _value(text: int | str, sizes: Mapping[str, int]) -> int | None:
    try:
        return evaluate(text, sizes)
    except InputError:
        return None


def quotient(sizes: np.ndarray, values: np.ndarray) -> tuple[int, int, int] | None:
    """(a, b, c) so that ``(a*size + b)//c`` is the value at each size, c being the least; or None.

    Args:
        sizes: in ascending order.
        values: as many.
    """
    if len(sizes) < 2:
        return None
    slope = float(values[-1] - values[0]) / float(sizes[-1] - sizes[0])
    for c in range(1, _LARGEST_DIVISOR + 1):
        for a in (round(slope * c) + more for more in (0, 1, -1)):
            rest = values * c - a * sizes
            low, high = int(rest.max()), int(rest.min()) + c - 1
            if a > 0 and low <= high:
                return a, min(max(0, low), high), c
    return None
