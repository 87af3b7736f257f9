"""The type of a function that announces progress."""

from __future__ import annotations

from collections.abc import Callable

Announce = Callable[[str], None]
