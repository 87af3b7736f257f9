"""A node that a pass rewrote or refused."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Change:
    """One node that a pass rewrote or refused: its name, its op, and the change or the reason."""

    node: str
    op: str
    detail: str
