"""Finds the declared size of one of torch's symbols, and the values of an expression of them."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

from pipeline.export.guards import Symbol
from pipeline.spec.dims import Dim, Size

Sizes = Mapping[tuple[str, int], Size]  # declared, by argument of ``forward`` and axis
Symbols = tuple[tuple[str, Size], ...]  # torch's symbols, each with its declared size

_declared: ContextVar[Sizes | None] = ContextVar("_declared", default=None)
_MOST_VALUES = 1 << 22  # of the dims of one size, to find its ends; 0.1 s
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


@contextmanager
def declaring(sizes: Sizes) -> Iterator[None]:
    """Tells `ends_of` the declared sizes while a model is traced."""
    token = _declared.set(sizes)
    try:
        yield
    finally:
        _declared.reset(token)


def ends_of(value: int | torch.SymInt) -> tuple[float, float]:
    """Two numbers between which a number of sizes lies at all declared sizes.

    They are infinite if nothing is known. torch's own bounds leave out sizes of 0 and 1.
    """
    if isinstance(value, int):
        return value, value
    ranges = _ranges(value)
    if ranges is None:
        return -math.inf, math.inf
    found = bound_sympy(value.node.expr, ranges)
    return float(found.lower), float(found.upper)


def smallest_size(value: torch.SymInt) -> float:
    """The smallest declared value of a size in a number of sizes; minus infinity if unknown."""
    ranges = _ranges(value)
    if ranges is None:
        return -math.inf
    return min((float(span.lower) for span in ranges.values()), default=math.inf)


def _ranges(value: torch.SymInt) -> dict[Any, ValueRanges[Any]] | None:
    """The declared range of each symbol; None if one is not the size of a declared input."""
    sizes, env, ranges = _declared.get() or {}, value.node.shape_env, {}
    for symbol in value.node.expr.free_symbols:
        source = next(iter(env.var_to_sources.get(symbol, ())), None)
        size = None if source is None else declared_size(source.name, sizes)
        if size is None:
            return None
        ranges[symbol] = _range(size)
    return ranges


@functools.cache
def _range(size: Size) -> ValueRanges[Any]:
    """The values of a declared size, or more."""
    if isinstance(size, int):
        return ValueRanges.wrap(size)
    if isinstance(size, Dim):
        return ValueRanges(size.min, size.max)
    if math.prod(dim.max - dim.min + 1 for dim in size.dims) > _MOST_VALUES:
        return ValueRanges(-int_oo, int_oo)
    values = np.meshgrid(*(np.arange(dim.min, dim.max + 1) for dim in size.dims))
    found = Symbol(size).at({dim.name: v for dim, v in zip(size.dims, values, strict=True)})
    return ValueRanges(int(found.min()), int(found.max()))
