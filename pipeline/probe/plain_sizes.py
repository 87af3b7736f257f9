"""Output sizes that torch left as unsimplified quotients, as one dim where they are just that."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

import numpy as np

from pipeline.probe.evaluate import result_of
from pipeline.probe.fit import quotient
from pipeline.probe.grid import size_grid
from pipeline.spec.dims import Dim
from pipeline.spec.expressions import DimExpr


def plain_size(size: int | str, dims: Mapping[str, Dim], rules: Sequence[str]) -> int | str:
    """``b`` for ``(b*h*w)//(h*w)``, ``2*h``, ``h//4``, ``(h + 1)//2``, where one of them it is.

    It has to be that at every set of declared sizes that `pipeline.probe.grid.size_grid` gives:
    all there are, or, where they are too many, all sizes of each dim with some of the others.

    Args:
        size: an output's, in terms of the dims.
        dims: by name.
        rules: what sizes keep together; others are no matter.
    """
    text = str(size)
    if not re.search(r"//|%", text):
        return size
    names = DimExpr(text).names
    grid = size_grid(tuple(dims[name] for name in dims if name in names), tuple(rules))
    columns = dict(zip((name for name in dims if name in names), grid.T, strict=True))
    if len(grid) < 2:
        return size
    most = math.prod(int(column.max()) for column in columns.values())
    exact = {n: c.astype(object) for n, c in columns.items()} if most > 1 << 25 else columns
    values = result_of(text, exact)
    if values is None or any(value >= 1 << 62 for value in (values.max(), -values.min())):
        return size
    values = values.astype(np.int64)
    for name, column in columns.items():
        found = _of_one(name, column, values)
        if found is not None and _length(found) < _length(text):
            return found
    return size


def _length(text: str) -> int:
    return len(re.findall(r"\w+|//|[-+*%]", text))


def _of_one(name: str, sizes: np.ndarray, values: np.ndarray) -> str | None:
    """The values as a quotient of one dim's sizes."""
    every, first = np.unique(sizes, return_index=True)
    if (values != values[first][np.searchsorted(every, sizes)]).any():
        return None  # another dim has a part in it
    found = quotient(every, values[first])
    if found is None:
        return None
    a, b, c = found
    top = (name if a == 1 else f"{a}*{name}") + (f" + {b}" if b > 0 else f" - {-b}" if b else "")
    return top if c == 1 else f"{top}//{c}" if top == name else f"({top})//{c}"
