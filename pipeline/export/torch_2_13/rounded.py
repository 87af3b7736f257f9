"""Makes ``round(size, -1)`` count as a use of the size's value.

torch returns the size itself, as for ``round(size)``, so a program has 134 where Python has 130.
Under `true_rounding` the size becomes a number, and torch learns that the program holds for this
number only.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_lock = threading.Lock()
_users: list[object] = []
_round = torch.SymInt.__round__


@contextmanager
def true_rounding() -> Iterator[None]:
    """Exchanges the rounding of symbolic sizes, for all threads."""
    user = object()
    with _lock:
        _users.append(user)
        torch.SymInt.__round__ = _rounded  # type: ignore[method-assign]
    try:
        yield
    finally:
        with _lock:
            _users.remove(user)
            if not _users:
                torch.SymInt.__round__ = _round  # type: ignore[method-assign]


def _rounded(size: torch.SymInt, digits: int | None = None) -> Any:
    return size if digits is None or digits >= 0 else round(int(size), digits)
