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
        self._own = {place: vars(place[0])[place[1]] for place in new}
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
            self._users += more
            for (owner, name), value in (self._new if self._users else self._own).items():
                setattr(owner, name, value)
            self._changed()
