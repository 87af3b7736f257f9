"""JSON with one record on each line, for files that people read, compare and keep in git."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def compact(content: Mapping[str, Any], width: int) -> str:
    """Writes an object as JSON, in few, short lines.

    Each key of `content` begins a line, and so does each object in a list. A value that is longer
    than a line is broken at its commas.

    Args:
        content: The object to write.
        width: The most characters of a line. Only a single string or key may be longer.

    Returns:
        The text, which ends with a newline. `json.loads` gives `content` back.
    """
    return _broken(content, 0, width, fill=False) + "\n"


def _broken(value: Mapping[str, Any] | list[Any], depth: int, width: int, fill: bool) -> str:
    """An object or a list over several lines. With `fill`, each line has as many items as fit."""
    mapping = isinstance(value, Mapping)
    items = list(value.items()) if isinstance(value, Mapping) else [("", item) for item in value]
    room = width - depth - 2  # without the indentation and a comma
    lines: list[str] = []
    open_line = False  # True if more items fit on the last line
    for key, item in items:
        name = f"{json.dumps(key)}: " if mapping else ""
        text = name + json.dumps(item)
        whole = len(text) <= room or not item or not isinstance(item, Mapping | list)
        if not whole:
            records = isinstance(item, list) and all(isinstance(one, Mapping) for one in item)
            text = name + _broken(item, depth + 1, width, fill=not records)
        if open_line and whole and len(lines[-1]) + len(text) + 2 <= room:
            lines[-1] += f", {text}"
        else:
            lines.append(text)
        open_line = fill and whole
    start, end = "{}" if mapping else "[]"
    space = " " * (depth + 1)
    return "\n".join([start, ",\n".join(space + line for line in lines), " " * depth + end])
