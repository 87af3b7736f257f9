"""Turns quotients of sizes that Python computes in floats into exact integers.

Python's ``a / (b / c)`` rounds twice, ``a*c // b`` does not. Both have the same whole part if

- ``a*c / b`` is not an integer. The next integer is at least ``1/b`` away, and a few roundings of
  a number below 2**48 are smaller.
- ``a*c / b`` is an integer, and every quotient before it is exact in floats (whole, or a fraction
  by a power of 2).
- ``a*c / b`` is an integer, and the roundings do no harm at any of the sizes, all checked.

This is checked at every declared size. If these are too many, all sizes of each dim are checked
with some of the others (`pipeline.probe.grid.size_grid`). Other expressions have no quotient here:
fractional factors (``h * 0.7``), sums of floats, powers, negative numbers. A product with a number
has none either: sympy folds ``h * 0.1 * 10`` to ``1.0*h``, and Python's floats do not.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import sympy
from torch.utils._sympy.functions import FloorDiv

from pipeline.export.declared import Symbols, dims_in
from pipeline.export.guards import Symbol
from pipeline.probe.evaluate import result_of
from pipeline.probe.grid import size_grid
from pipeline.spec.dims import Dim

_EXACT = 1 << 48  # largest integer; float64 has 5 more bits, enough for
_ROUNDINGS = 30


@dataclass(frozen=True)
class _Ratio:
    """A float of sizes as a quotient of integers.

    Args:
        top, bottom: the integers, in torch's symbols.
        p, q: their values, one for each set of sizes; p >= 0, q > 0.
        value: the result in Python's floats.
        exact: True at each set of sizes where no partial quotient is rounded.
        roundings: the largest number of roundings.
    """

    top: Any
    bottom: Any
    p: np.ndarray
    q: np.ndarray
    value: np.ndarray
    exact: np.ndarray
    roundings: int = 0


def whole_part(expr: Any, symbols: Symbols) -> Any:
    """The whole part of a float of sizes as an integer expression; None if it is not known.

    If it equals a dim, or a multiple of one, at every set of sizes, that is the result.

    Args:
        expr: the sympy expression that torch makes while it traces.
        symbols: the symbols in it, with their declared sizes.
    """
    columns, complete = _sizes(symbols, dims_in(*(size for _, size in symbols)))
    if not len(next(iter(columns.values()), ())):
        return None
    ratio = _ratio(expr, lambda e: _values(e, columns))
    if ratio is None or ratio.roundings > _ROUNDINGS:
        return None
    whole, divides = ratio.p // ratio.q, ratio.p % ratio.q == 0
    sure = complete or (ratio.exact | ~divides).all()
    if not sure or (np.floor(ratio.value) != whole).any():
        return None
    if divides.all():
        for symbol in sorted(expr.free_symbols, key=str):
            column = columns[str(symbol)]
            factor = int(whole[-1]) // max(int(column[-1]), 1)
            if factor > 0 and (whole == factor * column).all():
                return factor * symbol
    return FloorDiv(ratio.top, ratio.bottom)


def _ratio(expr: Any, values: Callable[[Any], np.ndarray | None]) -> _Ratio | None:
    """Reads the forms in which torch writes a quotient of sizes."""
    kind = type(expr).__name__
    if kind == "ToFloat":
        return _integer(expr.args[0], values)
    if expr.is_Float or expr.is_Integer:
        number = float(expr)
        return _integer(sympy.Integer(int(number)), values) if number.is_integer() else None
    if kind == "IntTrueDiv":
        return _combined([_integer(e, values) for e in expr.args], divide=True)
    if kind == "FloatTrueDiv":
        return _combined([_ratio(e, values) for e in expr.args], divide=True)
    if kind == "Mul" and not any(e.is_number for e in expr.args):
        return _combined([_ratio(e, values) for e in expr.args], divide=False)
    return None


def _integer(expr: Any, values: Callable[[Any], np.ndarray | None]) -> _Ratio | None:
    found = values(expr)
    if found is None or found.min() < 0 or found.max() >= _EXACT:
        return None
    p = found.astype(np.int64)
    exact = np.ones(len(p), bool)
    return _Ratio(expr, sympy.Integer(1), p, np.ones_like(p), p.astype(np.float64), exact)


def _combined(parts: Sequence[_Ratio | None], *, divide: bool) -> _Ratio | None:
    """The product of all parts, or the first part divided by the second."""
    left = parts[0]
    for right in parts[1:]:
        if left is None or right is None:
            return None
        left = _pair(left, right, divide=divide)
    return left


def _pair(left: _Ratio, right: _Ratio, *, divide: bool) -> _Ratio | None:
    top, bottom, p, q = right.top, right.bottom, right.p, right.q
    if divide:
        if p.min() <= 0:
            return None
        top, bottom, p, q = bottom, top, q, p
    if any(int(a.max()) * int(b.max()) >= _EXACT for a, b in ((left.p, p), (left.q, q))):
        return None
    p, q = left.p * p, left.q * q
    odd = q // (q & -q)
    return _Ratio(
        left.top * top,
        left.bottom * bottom,
        p,
        q,
        left.value / right.value if divide else left.value * right.value,
        left.exact & right.exact & (p % odd == 0),
        left.roundings + right.roundings + 1,
    )


@functools.lru_cache(maxsize=64)
def _sizes(symbols: Symbols, dims: tuple[Dim, ...]) -> tuple[dict[str, np.ndarray], bool]:
    """The symbols' values at sets of declared sizes, and whether these are all the sets."""
    grid = size_grid(dims, ())
    at = dict(zip((dim.name for dim in dims), grid.T, strict=True))
    if math.prod(int(column.max()) for column in at.values()) > 1 << 25:
        at = {name: column.astype(object) for name, column in at.items()}
    complete = len(grid) == math.prod(
        len(range(dim.min, dim.max + 1, dim.multiple_of)) for dim in dims
    )
    return {name: Symbol(size).at(at) for name, size in symbols}, complete


def _values(expr: Any, columns: dict[str, np.ndarray]) -> np.ndarray | None:
    if expr.is_Integer:
        length = len(next(iter(columns.values())))
        return np.full(length, int(expr))
    found = result_of(str(expr), columns)
    return None if found is None else np.asarray(found)
