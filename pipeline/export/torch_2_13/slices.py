"""Slices that end within an axis at some sizes, and beyond its end at others.

``x[:8]`` of an axis with 2 to 40 elements has ``min(8, size)`` elements. torch 2.13 compares 8 with
the example's size, and takes the answer for every size (`_compute_slice_index`). It has the
``min(8, size)`` itself, but only for sizes that depend on the data. Under `open_slices` it takes it
wherever both answers are possible at the declared sizes. So it does for ``x[3:-3]``, which is empty
at some sizes: torch takes 0 elements for every size, if the example has fewer than 6.

The node of the slice keeps its numbers: ONNX cuts a slice at the end of the axis, as Python does.
"""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from itertools import chain
from typing import Any

import numpy as np
import sympy
import torch
from torch._subclasses import fake_impls
from torch.utils._sympy.value_ranges import bound_sympy

from pipeline.export.declared import symbol_range
from pipeline.export.exchange import Exchange
from pipeline.export.symbols import exact
from pipeline.probe.evaluate import where_holds
from pipeline.probe.grid import spread

Size = Any  # int or torch.SymInt
Range = tuple[str, int, int]  # a symbol, its smallest and its largest value

_FEW = 1 << 14  # combinations of sizes at which a condition is evaluated first
_MOST = 1 << 22  # most combinations at which it is evaluated
_CHUNK = 1 << 17  # of them at a time
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


def _slice(
    mode: Any,
    func: Any,
    self: torch.Tensor,
    dim: int = 0,
    start: Any = None,
    end: Any = None,
    step: Any = 1,
) -> Any:
    """``slice``, where its end is before its start at some of the declared sizes."""
    own = _implementations[func]
    if self.dim() == 0 or start is None or end is None or step <= 0:
        return own(mode, func, self, dim, start, end, step)
    size = self.shape[dim]
    first, last = _index(size, start), _index(size, end)
    if first is None or last is None or _held(last >= first) != "some":
        return own(mode, func, self, dim, start, end, step)
    # a short formula, if the slice counts from both ends
    both = isinstance(start, int) and isinstance(end, int) and start >= 0 > end
    length = _most(size + end - start if both else last - first, 0)
    sizes, strides = list(self.shape), list(self.stride())
    offset = self.storage_offset() + first * strides[dim]
    sizes[dim], strides[dim] = (length + step - 1) // step, strides[dim] * step
    return self.as_strided(sizes, strides, offset)


def _held(condition: bool | torch.SymBool) -> str:
    """At which of the declared sizes a condition holds: "all", "some" or "none"; "" if unknown.

    It is "some" also if there are too many sizes to try them all: `_index` is right at every size
    then. torch's own ranges leave out sizes of 0 and 1, and are narrowed by the model's branches.
    """
    if not isinstance(condition, torch.SymBool):
        return "all" if condition else "none"
    env, expr = condition.node.shape_env, condition.node.expr
    if expr in (sympy.true, sympy.false):
        return "all" if expr == sympy.true else "none"
    ranges, spans = [], {}
    for symbol in sorted(expr.free_symbols, key=str):
        own = env.var_to_range.get(symbol)
        if symbol not in env.backed_var_to_val or own is None:
            return ""  # torch does what is right for a size that depends on the data
        found = symbol_range(env, symbol) or own
        spans[symbol] = found
        low = int(found.lower)
        high = int(found.upper) if found.upper.is_Integer else max(low, _LARGEST)
        ranges.append((str(symbol), low, high))
    if not ranges:
        return ""
    return _where(exact(expr), tuple(ranges)) or _by_bounds(expr, spans)


def _by_bounds(expr: Any, spans: dict[Any, Any]) -> str:
    """What `_held` returns, by the ends of the condition's two sides, without trying sizes."""
    if not expr.is_Relational:
        return ""
    bound = bound_sympy(expr.lhs - expr.rhs, spans)
    below, above = bound.upper < 0, bound.lower > 0
    never, always = {
        ">=": (below, bound.lower >= 0),
        ">": (bound.upper <= 0, above),
        "<=": (above, bound.upper <= 0),
        "<": (bound.lower >= 0, below),
    }.get(expr.rel_op, (False, False))
    return "none" if never else "all" if always else "some"


@lru_cache(maxsize=4096)
def _where(condition: str, ranges: tuple[Range, ...]) -> str:
    """At which of the sizes a condition holds; "" if they are too many, or it can't be evaluated.

    Of many sizes, some are tried first. If the condition holds at a part of them, that is enough.
    """
    lows = [low for _, low, _ in ranges]
    counts = [high - low + 1 for _, low, high in ranges]
    total, seen = math.prod(counts), set()
    few = _some_places(counts) if total > _FEW else []
    whole = range(0, total if total <= _MOST else 0, _CHUNK)
    chunks = (np.unravel_index(np.arange(n, min(total, n + _CHUNK)), counts) for n in whole)
    for place in chain(few, chunks):
        values = {r[0]: low + k for r, low, k in zip(ranges, lows, place, strict=True)}
        held = where_holds(condition, values)
        if held is None:
            return ""
        seen |= set(held.tolist())
        if len(seen) == 2:
            return "some"
    if total > _MOST:
        return ""
    return "all" if True in seen else "none"


def _some_places(counts: Sequence[int]) -> list[list[np.ndarray]]:
    """Indices of some combinations, most of them small; none if there are too many axes."""
    each = max(4, int(_FEW ** (1 / len(counts))))
    lines = [np.array(spread(count, each)) for count in counts]
    if math.prod(map(len, lines)) > _FEW:
        return []
    return [[mesh.ravel() for mesh in np.meshgrid(*lines, indexing="ij")]]


_implementations: Any = fake_impls.op_implementations_dict
_exchange = Exchange(
    {
        (fake_impls, "_compute_slice_index"): _index,
        (fake_impls, "op_implementations_dict"): ChainMap(
            {torch.ops.aten.slice.Tensor: _slice}, _implementations
        ),
    }
)


def open_slices() -> AbstractContextManager[None]:
    """Gives slices their size at every size of the axis, for all threads."""
    return _exchange.used()
