"""Announcements of progress."""

from __future__ import annotations

from collections.abc import Callable

Announce = Callable[[str], None]


def silent(_: str) -> None:
    """Announces nothing."""


class StageText(str):
    """The text that announces a stage, such as ``build (last time 117 s)``.

    Args:
        name: The stage's name.
        seconds: How long it took last time, if that is known. Less than 1 s is left out.

    Attributes:
        last: These seconds, rounded; None if they are left out.
    """

    name: str
    last: int | None

    def __new__(cls, name: str, seconds: float | None = None) -> StageText:
        last = round(seconds) if seconds and seconds >= 1 else None
        text = super().__new__(cls, name if last is None else f"{name} (last time {last} s)")
        text.name, text.last = name, last
        return text
