"""Exchanges attributes of classes or modules while somebody uses them, for all threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any


class Exchange:
    """Other values of attributes, while anybody uses them. The last user puts the own ones back.

    Args:
        new: the other values, by the owner and the attribute's name.
        changed: called after each use begins or ends, before another thread goes on.
    """

    def __init__(
        self, new: Mapping[tuple[Any, str], Any], changed: Callable[[], object] = lambda: None
    ) -> None:
        self._new = dict(new)
        self._own: dict[tuple[Any, str], Any] = {}
        self._changed = changed
        self._lock = threading.Lock()
        self._users = 0

    @contextmanager
    def used(self) -> Iterator[None]:
        """While it is active, the attributes have the other values."""
        self._use(+1)
        try:
            yield
        finally:
            self._use(-1)

    def _use(self, more: int) -> None:
        with self._lock:
            if not self._users:
                self._own = {place: _value(*place) for place in self._new}
            self._users += more
            for (owner, name), value in (self._new if self._users else self._own).items():
                setattr(owner, name, value)
            self._changed()


def _value(owner: Any, name: str) -> Any:
    """The attribute as it is stored: a class method, not its bound form."""
    return vars(owner)[name] if name in vars(owner) else getattr(owner, name)
