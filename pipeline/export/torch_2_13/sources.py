"""Finds the declared size of one of torch's symbols."""

from __future__ import annotations

import re
from collections.abc import Mapping

from pipeline.spec.dims import Size

Sizes = Mapping[tuple[str, int], Size]  # declared, by argument of ``forward`` and axis
Symbols = tuple[tuple[str, Size], ...]  # torch's symbols, each with its declared size

_SOURCE = re.compile(r"L\['(\w+)'\](\[\d+\])?\.size\(\)\[(\d+)\]")


def declared_size(source: str, sizes: Sizes) -> Size | None:
    """The declared size at the place that torch names.

    Args:
        source: torch's name of the place, such as ``L['x'].size()[2]``.
        sizes: the declared sizes.

    Returns:
        The size, or None if the place is not the size of a declared input.
    """
    match = _SOURCE.fullmatch(source)
    return sizes.get((match[1] + (match[2] or ""), int(match[3]))) if match else None
