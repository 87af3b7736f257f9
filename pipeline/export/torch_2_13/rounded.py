"""Makes ``round(size, -1)`` and ``size // 1.3`` count as a use of the size's value.

torch returns the size itself for the first, as for ``round(size)``, so a program has 134 where
Python has 130. For the second it traces ``floor(size / 1.3)``, which is 10 at a size of 13, where
Python has 9. Under `true_rounding` the size becomes a number, and torch learns that the program
holds for this number only. A quotient that has no such difference stays symbolic.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from pipeline.export.exchange import Exchange

_FEW = 1 << 20  # the largest numerator and denominator of a divisor


def _rounded(size: torch.SymInt, digits: int | None = None) -> Any:
    return size if digits is None or digits >= 0 else round(int(size), digits)


def _divided(kind: type, name: str) -> Callable[[Any, Any], Any]:
    """``//``, of which the first argument is symbolic; the second one divides it, or is divided."""
    torchs = vars(kind)[name]

    def divided(symbolic: Any, other: Any) -> Any:
        floats = kind is torch.SymFloat or isinstance(other, float | torch.SymFloat)
        if not floats or _is_exact(other, divides=name == "__floordiv__"):
            return torchs(symbolic, other)
        return getattr(float(symbolic), name)(float(other))

    return divided


def _is_exact(other: Any, *, divides: bool) -> bool:
    """Whether no quotient is rounded up to a whole number.

    That takes a dividend next below ``k * other`` for a whole number k. If the divisor has few
    digits, float64 holds that product, and its neighbour's quotient is no k.
    """
    if not divides or not isinstance(other, int | float) or not math.isfinite(other):
        return False
    return max(map(abs, other.as_integer_ratio())) <= _FEW


_exchange = Exchange(
    {
        (torch.SymInt, "__round__"): _rounded,
        (torch.SymInt, "__floordiv__"): _divided(torch.SymInt, "__floordiv__"),
        (torch.SymFloat, "__floordiv__"): _divided(torch.SymFloat, "__floordiv__"),
        (torch.SymFloat, "__rfloordiv__"): _divided(torch.SymFloat, "__rfloordiv__"),
    }
)


def true_rounding() -> AbstractContextManager[None]:
    """Exchanges the rounding of symbolic sizes, for all threads."""
    return _exchange.used()
