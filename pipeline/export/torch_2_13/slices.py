"""Slices that end within an axis at some sizes, and beyond its end at others.

``x[:8]`` of an axis with 2 to 40 elements has ``min(8, size)`` elements. torch 2.13 compares 8 with
the example's size, and takes the answer for every size (`_compute_slice_index`). It has the
``min(8, size)`` itself, but only for sizes that depend on the data. Under `open_slices` it takes it
wherever both answers are possible at the declared sizes.

The node of the slice keeps its numbers: ONNX cuts a slice at the end of the axis, as Python does.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any

import numpy as np
import sympy
import torch
from torch._subclasses import fake_impls

from pipeline.export.declared import symbol_range
from pipeline.export.exchange import Exchange
from pipeline.export.symbols import exact
from pipeline.probe.evaluate import where_holds
from pipeline.probe.grid import spread

Size = Any  # int or torch.SymInt
Range = tuple[str, int, int]  # a symbol, its smallest and its largest value

_MOST = 1 << 14  # most combinations of sizes at which a condition is evaluated
_LARGEST = 1 << 16  # of a size without a largest value
_own: Callable[[Size, Size], Any] = fake_impls._compute_slice_index
_least: Callable[[Size, Size], Any] = torch.sym_min
_most: Callable[[Size, Size], Any] = torch.sym_max


def _index(size: Size, index: Size) -> Any:
    """Where a slice begins or ends in an axis of this size."""
    if not isinstance(size, torch.SymInt) and not isinstance(index, torch.SymInt):
        return _own(size, index)
    counted = _held(index >= 0)  # from the start
    if counted == "all":
        within = _held(index <= size)
        if within in ("some", "all"):
            return index if within == "all" else _least(index, size)
    elif counted == "none":
        within = _held(index >= -size)
        if within in ("some", "all"):
            return index + size if within == "all" else _most(index + size, 0)
    elif counted == "some":
        from_end = _least(1, _most(0, -index))  # 1 for a negative index
        return _least(_most(index + size * from_end, 0), size)
    return _own(size, index)


def _held(condition: bool | torch.SymBool) -> str:
    """At which of the declared sizes a condition holds: "all", "some" or "none"; "" if unknown.

    torch's own ranges leave out sizes of 0 and 1, and are narrowed by the model's branches.
    """
    if not isinstance(condition, torch.SymBool):
        return "all" if condition else "none"
    env, expr = condition.node.shape_env, condition.node.expr
    if expr in (sympy.true, sympy.false):
        return "all" if expr == sympy.true else "none"
    ranges = []
    for symbol in sorted(expr.free_symbols, key=str):
        own = env.var_to_range.get(symbol)
        if symbol not in env.backed_var_to_val or own is None:
            return ""  # torch does what is right for a size that depends on the data
        found = symbol_range(env, symbol) or own
        low = int(found.lower)
        high = int(found.upper) if found.upper.is_Integer else max(low, _LARGEST)
        ranges.append((str(symbol), low, high))
    return _where(exact(expr), tuple(ranges)) if ranges else ""


@lru_cache(maxsize=4096)
def _where(condition: str, ranges: tuple[Range, ...]) -> str:
    """At which of the sizes a condition holds; see `_held`."""
    each = max(4, int(_MOST ** (1 / len(ranges))))  # minima in a size take effect at small sizes
    lines = [low + np.array(spread(high - low + 1, each)) for _, low, high in ranges]
    if math.prod(map(len, lines)) > _MOST:
        return ""
    meshes = np.meshgrid(*lines, indexing="ij")
    values = {name: m.ravel() for (name, _, _), m in zip(ranges, meshes, strict=True)}
    held = where_holds(condition, values)
    if held is None:
        return ""
    return "all" if held.all() else "some" if held.any() else "none"


_exchange = Exchange({(fake_impls, "_compute_slice_index"): _index})


def open_slices() -> AbstractContextManager[None]:
    """Gives slices their size at every size of the axis, for all threads."""
    return _exchange.used()
