"""Notes on the values of the inputs that a comparison uses."""

from __future__ import annotations

import numpy as np

from pipeline.compare.rows import Batch, RowSizes
from pipeline.spec.findings import Note, note
from pipeline.spec.interface import Interface
from pipeline.spec.tensors import Input

_FEW = ((0, 2), (-1, 1))  # the ranges of integers that nobody chose


def input_notes(interface: Interface) -> list[Note]:
    """Returns notes on the user's values, and on bools and integers that have few values."""
    names = tuple(i.name for i in interface.inputs if i.values is not None)
    found = [note("values-given", names=names)] if names else []
    if names and interface.sizes_of_values() is None:
        found.append(note("values-at-other-sizes", names=names))
    for i in interface.inputs:
        whole = np.dtype(i.dtype).kind in "iu" and i.values is None and not i.pattern
        for low, high in _FEW:
            if whole and (i.low, i.high) == (low, high):
                found.append(note("few-values", input=i.name, low=low, high=high - 1))
        value = _only_value(i)
        if value is not None:
            found.append(note("one-value", input=i.name, value=value))
    return found


def _only_value(i: Input) -> str | None:
    """The value that a bool or an integer input has everywhere, as text."""
    if i.values is not None or np.dtype(i.dtype).kind not in "biu":
        return None
    truth = np.dtype(i.dtype).kind == "b"
    if i.pattern:
        return ("true" if truth else "1") if i.pattern == "all" else None
    low, high = i.low, i.high
    if not isinstance(low, (int, float)) or not isinstance(high, (int, float)):
        return None
    if truth:
        return "true" if low >= 0 else "false" if high <= 0 else None
    return str(int(low)) if int(high) - int(low) == 1 else None


def equal_rows(batch: Batch, at: RowSizes, seed: int) -> list[Note]:
    """Returns a note if the user's values have the same sample in each row of a batch."""
    given = [i for i in batch.interface.inputs if i.name in batch.rows]
    if not any(i.values is not None for i in given):
        return []
    rows = [i.sample(at.sizes, seed) for i in given]
    same = all(np.array_equal(row[:1], other) for row in rows for other in np.split(row, len(row)))
    return [note("equal-rows", names=tuple(i.name for i in given))] if same else []
