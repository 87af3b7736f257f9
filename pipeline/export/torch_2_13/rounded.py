"""Makes ``round(size, -1)`` count as a use of the size's value.

torch returns the size itself, as for ``round(size)``, so a program has 134 where Python has 130.
Under `true_rounding` the size becomes a number, and torch learns that the program holds for this
number only.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from pipeline.export.exchange import Exchange


def _rounded(size: torch.SymInt, digits: int | None = None) -> Any:
    return size if digits is None or digits >= 0 else round(int(size), digits)


_exchange = Exchange({(torch.SymInt, "__round__"): _rounded})


def true_rounding() -> AbstractContextManager[None]:
    """Exchanges the rounding of symbolic sizes, for all threads."""
    return _exchange.used()
