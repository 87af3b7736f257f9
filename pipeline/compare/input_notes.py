"""Notes on the values of the inputs that a comparison uses."""

from __future__ import annotations

import numpy as np

from pipeline.compare.rows import Batch, RowSizes
from pipeline.spec.findings import Note, note
from pipeline.spec.interface import Interface

_FEW = ((0, 2), (-1, 1))  # the ranges of integers that nobody chose


def input_notes(interface: Interface) -> list[Note]:
    """Returns a note on the user's values, and one for each integer input without a range."""
    names = tuple(i.name for i in interface.inputs if i.values is not None)
    found = [note("values-given", names=names)] if names else []
    for i in interface.inputs:
        whole = np.dtype(i.dtype).kind in "iu" and i.values is None and not i.pattern
        for low, high in _FEW:
            if whole and (i.low, i.high) == (low, high):
                found.append(note("few-values", input=i.name, low=low, high=high - 1))
    return found


def equal_rows(batch: Batch, at: RowSizes, seed: int) -> list[Note]:
    """Returns a note if the user's values have the same sample in each row of a batch."""
    given = [i for i in batch.interface.inputs if i.name in batch.rows]
    if not any(i.values is not None for i in given):
        return []
    rows = [i.sample(at.sizes, seed) for i in given]
    same = all(np.array_equal(row[:1], other) for row in rows for other in np.split(row, len(row)))
    return [note("equal-rows", names=tuple(i.name for i in given))] if same else []
