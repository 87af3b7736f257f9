"""Exact arithmetic of small tensors of numbers that come from sizes.

A tensor's numbers are an array of objects: `Number`, or a truth (bool or SymBool). The functions
here do to them what torch's functions of the same names do to the tensor's values.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from pipeline.export.declared import ends_of

# Below it, float32 holds every integer. A quotient of two such integers that is no integer differs
# from the nearest one by 1/divisor or more, and each rounding is smaller than 1/16 of that.
EXACT = 1 << 20


class Unknown(Exception):
    """The number can't be given exactly."""


@dataclass(frozen=True)
class Number:
    """A number of sizes.

    Args:
        top: the numerator, an int or a SymInt.
        bottom: the denominator, a positive int.
    """

    top: Any
    bottom: int = 1

    @property
    def exact(self) -> bool:
        """True if binary floats hold it without rounding, while it is small."""
        return self.bottom & (self.bottom - 1) == 0


def number(value: Any) -> Any:
    """A Python number as a number of sizes; a truth is left as it is."""
    if isinstance(value, (bool, torch.SymBool, Number)):
        return value
    if isinstance(value, (int, torch.SymInt)):
        return Number(value)
    if isinstance(value, float) and math.isfinite(value):
        top, bottom = Fraction(value).as_integer_ratio()
        if bottom < EXACT and abs(top) < EXACT:
            return Number(top, bottom)
    raise Unknown


def _total(a: Number, b: Number) -> Number:
    if not (a.bottom == 1 or b.bottom == 1 or (a.exact and b.exact)):
        raise Unknown
    bottom = math.lcm(a.bottom, b.bottom)
    left, right = bottom // a.bottom, bottom // b.bottom
    return Number(
        (a.top if left == 1 else a.top * left) + (b.top if right == 1 else b.top * right), bottom
    )


def _negative(a: Number) -> Number:
    return Number(-a.top, a.bottom)


def _difference(a: Number, b: Number) -> Number:
    if a.bottom == b.bottom == 1:
        return Number(a.top - b.top)
    return _total(a, _negative(b))


def _product(a: Number, b: Number) -> Number:
    if not (a.exact and b.exact):
        raise Unknown
    return Number(a.top * b.top, a.bottom * b.bottom)


def _quotient(a: Number, b: Number) -> Number:
    """In floats, as tensors divide."""
    if not a.exact or not isinstance(b.top, int) or b.top <= 0 or not b.exact:
        raise Unknown
    common = math.gcd(b.bottom, a.bottom)
    top, bottom = b.bottom // common, (a.bottom // common) * b.top
    return Number(a.top if top == 1 else a.top * top, bottom)


def _times_reciprocal(a: Number, b: Number) -> Number:
    """In floats, as torch divides a Python number by a tensor: it rounds twice."""
    if not isinstance(b.top, int) or b.top <= 0 or b.top & (b.top - 1):
        raise Unknown
    return _quotient(a, b)


def whole_quotient(a: Number, b: Number) -> Number:
    """The quotient of two integers, rounded down."""
    if a.bottom != 1 or b.bottom != 1 or (isinstance(b.top, int) and b.top == 0):
        raise Unknown
    return Number(a.top // b.top)


def _remainder(a: Number, b: Number) -> Number:
    if a.bottom != 1 or b.bottom != 1 or (isinstance(b.top, int) and b.top == 0):
        raise Unknown
    return Number(a.top % b.top)


def largest(a: Number, b: Number) -> Number:
    """The larger of two integers."""
    if a.bottom != 1 or b.bottom != 1:
        raise Unknown
    most: Any = torch.sym_max
    return Number(most(a.top, b.top))


def smallest(a: Number, b: Number) -> Number:
    """The smaller of two integers."""
    if a.bottom != 1 or b.bottom != 1:
        raise Unknown
    least: Any = torch.sym_min
    return Number(least(a.top, b.top))


def _compared(how: Callable[[Any, Any], Any]) -> Callable[[Number, Number], Any]:
    def compare(a: Number, b: Number) -> Any:
        if not (a.exact and b.exact):
            raise Unknown
        left = a.top if b.bottom == 1 else a.top * b.bottom
        right = b.top if a.bottom == 1 else b.top * a.bottom
        return how(left, right)

    return compare


def _down(a: Number) -> Number:
    return a if a.bottom == 1 else Number(a.top // a.bottom)


def cut(a: Number) -> Number:
    """The whole part, as ``int()`` gives it."""
    if a.bottom == 1:
        return a
    if ends_of(a.top)[0] < 0:
        raise Unknown
    return _down(a)


def _up(a: Number) -> Number:
    return a if a.bottom == 1 else Number((a.top + (a.bottom - 1)) // a.bottom)


TWO: dict[str, Callable[[Number, Number], Any]] = {
    "add": _total, "__radd__": _total,
    "sub": _difference, "subtract": _difference,
    "mul": _product, "multiply": _product, "__rmul__": _product,
    "div": _quotient, "divide": _quotient, "true_divide": _quotient,
    "floor_divide": whole_quotient, "__floordiv__": whole_quotient,
    "remainder": _remainder, "__mod__": _remainder,
    "maximum": largest, "clamp_min": largest,
    "minimum": smallest, "clamp_max": smallest,
    **{
        name: _compared(getattr(operator, word))
        for word in ("eq", "ne", "lt", "le", "gt", "ge")
        for name in (word, f"__{word}__")
    },
}  # fmt: skip
SWAPPED = {
    "rsub": _difference, "__rsub__": _difference, "__rdiv__": _times_reciprocal,
    "__rtruediv__": _times_reciprocal, "__rfloordiv__": whole_quotient, "__rmod__": _remainder,
}  # fmt: skip
ONE: dict[str, Callable[[Number], Number]] = {
    "neg": _negative, "negative": _negative, "floor": _down, "ceil": _up, "trunc": cut,
}  # fmt: skip
# of all elements
ALL: dict[str, Callable[[Number, Number], Number]] = {
    "prod": _product, "sum": _total,
    "max": largest, "amax": largest, "min": smallest, "amin": smallest,
}  # fmt: skip


def read(tensor: torch.Tensor) -> np.ndarray:
    """The numbers of a tensor that has values.

    Raises:
        Unknown: it has none (inside of ``torch.vmap``).
    """
    try:
        with _disable_current_modes():
            return listed(tensor.tolist())
    except RuntimeError as error:
        raise Unknown from error


def listed(values: Any) -> np.ndarray:
    """The numbers of a tensor that is made of these values (nested lists)."""
    return np.array(_each(values), dtype=object)


def _each(values: Any) -> Any:
    if isinstance(values, (tuple, list)):
        return [_each(value) for value in values]
    return number(values)


def by_one(function: Callable[[Number], Any], numbers: np.ndarray) -> np.ndarray:
    """A function of each number."""
    return by_two(lambda a, _: function(a), numbers, listed(0))


def by_two(
    function: Callable[[Number, Number], Any], left: np.ndarray, right: np.ndarray
) -> np.ndarray:
    """A function of each pair of numbers, in the shape that both have together."""
    left, right = np.broadcast_arrays(left, right)
    found = np.empty(left.shape, dtype=object)
    for at in np.ndindex(left.shape):
        a, b = left[at], right[at]
        if not (isinstance(a, Number) and isinstance(b, Number)):
            raise Unknown
        found[at] = function(a, b)
    return found


def reduced(function: Callable[[Number, Number], Any], numbers: np.ndarray) -> np.ndarray:
    """A function of all numbers, one after the other."""
    if not numbers.size or not all(isinstance(n, Number) for n in numbers.flat):
        raise Unknown
    return np.array(functools.reduce(function, numbers.flat), dtype=object)
