"""Floor divisions of sizes by a negative number, which torch merges incorrectly.

Code rounds up by ``-(n // -2)``. torch writes ``(s//2)//-2`` as ``s//-4``, which is another number
at odd s (`FloorDiv.eval`). Under `positive_divisors` a negative divisor is written as a positive
one of the negative size, and torch merges those correctly.

sympy and `SymNode` cache their results for the whole process. These caches are emptied at both
ends: otherwise a wrong quotient of an earlier export would come back.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from sympy.core.cache import clear_cache
from torch.fx.experimental.sym_node import SymNode
from torch.utils._sympy.functions import FloorDiv

from pipeline.export.exchange import Exchange

_divisions: Any = FloorDiv
_eval: Callable[..., Any] = _divisions.eval.__func__


def _forget() -> None:
    """Empties sympy's cache, and the cache in the closure of each `SymNode` operation."""
    clear_cache()
    for operation in vars(SymNode).values():
        for cell in getattr(inspect.unwrap(operation), "__closure__", None) or ():
            clear = getattr(cell.cell_contents, "cache_clear", None)
            if clear is not None:
                clear()


def _positive(cls: Any, base: Any, divisor: Any) -> Any:
    """`FloorDiv.eval`, with ``a//-b`` as ``-a//b``."""
    if divisor.is_Integer and divisor < 0:
        return cls(-base, -divisor)
    return _eval(cls, base, divisor)


_exchange = Exchange({(FloorDiv, "eval"): classmethod(_positive)}, changed=_forget)


def positive_divisors() -> AbstractContextManager[None]:
    """Keeps divisions of sizes by negative numbers correct, for all threads."""
    return _exchange.used()
