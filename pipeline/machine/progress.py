"""How progress is announced."""

from __future__ import annotations

from collections.abc import Callable

Announce = Callable[[str], None]
