"""Announcements of progress."""

from __future__ import annotations

from collections.abc import Callable

Announce = Callable[[str], None]


def silent(_: str) -> None:
    """Announces nothing."""
