"""One node that was rewritten, or that could not be."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Change:
    """One node that a pass rewrote, or refused to: its name, its op, and what or why."""

    node: str
    op: str
    detail: str
