"""Fits formulas to sizes of runs: an output's size in terms of the inputs' dims.

Only this module fits and prints ``(a*h + b)//c``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from pipeline.errors import InputError
from pipeline.probe.evaluate import result_of
from pipeline.probe.grid import size_grid
from pipeline.spec.dims import Dim, DimExpr, evaluate

Point = tuple[Mapping[str, int], int]  # the dims' sizes of a run, and its size of an output

LARGEST_DIVISOR = 64


@dataclass(frozen=True)
class Quotient:
    """``(a*size + b)//c`` of one size; whole numbers, c at least 1."""

    a: int
    b: int
    c: int

    def at(self, size: int) -> int:
        """The quotient's value at a size."""
        return (self.a * size + self.b) // self.c

    def text(self, name: str) -> str:
        """The quotient as a formula of a dim: ``(3*h + 1)//2``, ``h//4``, ``2*h``."""
        top = (name if self.a == 1 else f"{self.a}*{name}") + _plus(self.b)
        if self.c == 1:
            return top
        return f"{name}//{self.c}" if top == name else f"({top})//{self.c}"


def fit_quotient(
    sizes: np.ndarray, values: np.ndarray, largest: int = LARGEST_DIVISOR
) -> Quotient | None:
    """The quotient with the smallest divisor that gives the value at each size, or None.

    Args:
        sizes: The sizes in ascending order, int [n], at least two.
        values: The value at each size, int [n].
        largest: The largest divisor. A larger one may fit by chance, if some sizes are left out.
    """
    if len(sizes) < 2:
        return None
    slope = float(values[-1] - values[0]) / float(sizes[-1] - sizes[0])
    for c in range(1, largest + 1):
        for a in (round(slope * c) + more for more in (0, 1, -1)):
            rest = values * c - a * sizes
            low, high = int(rest.max()), int(rest.min()) + c - 1
            if a > 0 and low <= high:
                return Quotient(a, min(max(0, low), high), c)
    return None


def fit_line(values: Mapping[int, int]) -> Quotient | None:
    """Calls `fit_quotient` with a mapping from sizes to values."""
    pairs = np.array(sorted(values.items()))
    return fit_quotient(pairs[:, 0], pairs[:, 1]) if len(pairs) > 1 else None


def fit_dim(name: str, sizes: np.ndarray, values: np.ndarray) -> str | None:
    """The values as a quotient of one dim's sizes, as text; None if the values need another dim.

    Args:
        name: The dim's name.
        sizes: The dim's sizes, int [n], in any order; a size may be repeated.
        values: The value at each size, int [n].
    """
    every, first = np.unique(sizes, return_index=True)
    if (values != values[first][np.searchsorted(every, sizes)]).any():
        return None
    found = fit_quotient(every, values[first])
    return None if found is None else found.text(name)


def holds_at(text: int | str, points: Sequence[Point]) -> bool:
    """True if the formula gives the size of every point."""
    for sizes, value in points:
        try:
            if evaluate(text, sizes) != value:
                return False
        except InputError:  # an unknown name, or a division that is not exact
            return False
    return True


def formula(points: Sequence[Point], base: Mapping[str, int]) -> int | str | None:
    """The simplest formula that gives the size of every point, or None.

    These are tried in order:

    - a number
    - a quotient of one dim: ``(a*h + b)//c``
    - a sum of quotients
    - a product of all dims times a fraction
    - a product of quotients, plus a number from -1 to 8 (a class token beside the patches)

    A sum of such products is not tried.

    Args:
        points: The points. For each dim, some points differ from `base` in that dim only.
        base: The common sizes of these points.
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
        found = fit_line(every)
        if found is not None and len(moving) <= 1:
            yield found.text(name)
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


def _sum(
    lines: Mapping[str, Mapping[int, int]], moving: Sequence[str], start: int
) -> Iterator[str]:
    terms, constant = [], -(len(moving) - 1) * start
    for name in moving:
        found = fit_line(lines[name])
        if found is None:
            return
        constant += found.b // found.c
        terms.append(replace(found, b=found.b % found.c).text(name))
    yield " + ".join(terms) + _plus(constant)


def _fraction(points: Sequence[Point], moving: Sequence[str]) -> str:
    """``(a*h*w)//c`` if the product times a/c is the value at every point."""
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
        found = fit_line({size: value // common for size, value in line.items()})
        if found is None or found.at(base[name]) < 1:
            return ""
        rest /= found.at(base[name])
        text = found.text(name)
        factors.append(text if found.c > 1 or text == name else f"({text})")
    if rest.denominator != 1 or rest < 1:
        return ""
    texts = [f"({t})" if "//" in t else t for t in factors]
    return "*".join([str(rest)] * (rest > 1) + texts) + _plus(more)


def _plus(number: int) -> str:
    return f" {'+' if number > 0 else '-'} {abs(number)}" if number else ""


def doubts(
    text: int | str, base: Mapping[str, int], legal: Mapping[str, Sequence[int]]
) -> Iterator[dict[str, int]]:
    """Small sizes at which a formula with a different rounding would give a different size.

    ``h//32`` and ``(h + 1)//32`` differ at only one size in 32. So this yields the sizes directly
    before and after a change of the formula's value.

    Args:
        text: The formula.
        base: The sizes of all dims; one dim at a time differs from them.
        legal: The sizes of each dim in ascending order.
    """
    for name, sizes in legal.items():
        line = [(size, _value(text, {**base, name: size})) for size in sizes]
        steps = [
            n
            for n in range(1, len(line))
            if line[n][1] != line[n - 1][1] and line[n][0] - line[n - 1][0] <= 1
        ]
        if len(steps) == len(line) - 1:  # the value changes at every size: nothing is rounded
            continue
        for n in steps[:2]:
            yield {**base, name: line[n - 1][0]}
            yield {**base, name: line[n][0]}


def _value(text: int | str, sizes: Mapping[str, int]) -> int | None:
    try:
        return evaluate(text, sizes)
    except InputError:
        return None


def plain_size(size: int | str, dims: Mapping[str, Dim], rules: Sequence[str]) -> int | str:
    """Simplifies an output's size to a number or a quotient of one dim.

    So ``(b*h*w)//(h*w)`` is ``b``, and ``min(50, h//2)`` is 50 if no declared h is below 100.

    Both must be equal at every set of sizes in `pipeline.probe.grid.size_grid`.

    Args:
        size: The output's size, in terms of the dims.
        dims: The dims by name.
        rules: The rules on sizes; sizes that break one are ignored.

    Returns:
        The number, the quotient (``2*h``, ``h//4``, ``(h + 1)//2``), or the size itself.
    """
    text = str(size)
    if not re.search(r"//|%", text):
        return size
    names = DimExpr(text).names
    grid = size_grid(tuple(dims[name] for name in dims if name in names), tuple(rules))
    columns = dict(zip((name for name in dims if name in names), grid.T, strict=True))
    if len(grid) < 2:
        return size
    most = math.prod(int(column.max()) for column in columns.values())
    exact = {n: c.astype(object) for n, c in columns.items()} if most > 1 << 25 else columns
    values = result_of(text, exact)
    if values is None or any(value >= 1 << 62 for value in (values.max(), -values.min())):
        return size
    values = values.astype(np.int64)
    if (values == values[0]).all():
        return int(values[0])
    for name, column in columns.items():
        found = fit_dim(name, column, values)
        if found is not None and _length(found) < _length(text):
            return found
    return size


def _length(text: str) -> int:
    return len(re.findall(r"\w+|//|[-+*%]", text))
