"""Finds the declared size of one of torch's symbols, and the values of an expression of them."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

from pipeline.export.guards import Symbol
from pipeline.export.torch_messages import root_name
from pipeline.spec.dims import Dim, Size

Sizes = Mapping[tuple[str, int], Size]  # declared, by argument of ``forward`` and axis
Symbols = tuple[tuple[str, Size], ...]  # torch's symbols, each with its declared size

_symbols: ContextVar[dict[Any, ValueRanges[Any]] | None] = ContextVar("_symbols", default=None)
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


@contextmanager
def declaring_symbols(
    program: torch.export.ExportedProgram, shapes: Sequence[Sequence[Size]]
) -> Iterator[None]:
    """Tells `program_bounds` the declared sizes of a program's inputs.

    Args:
        program: the program.
        shapes: the declared shape of each of its inputs, in order.
    """
    inputs = program.graph_signature.user_inputs
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    token = _symbols.set(
        {
            symbol: found
            for name, shape in zip(inputs, shapes, strict=True)
            if isinstance(values.get(str(name)), torch.Tensor)
            for length, size in zip(values[str(name)].shape, shape, strict=True)
            for symbol, found in _symbol_range(length, size)
        }
    )
    try:
        yield
    finally:
        _symbols.reset(token)


def _symbol_range(length: Any, size: Size) -> Iterator[tuple[Any, ValueRanges[Any]]]:
    """torch's symbol in a length, and its range; none if the length is no multiple of a symbol."""
    if not isinstance(length, torch.SymInt) or len(length.node.expr.free_symbols) != 1:
        return
    (symbol,) = length.node.expr.free_symbols
    step, found = length.node.expr / symbol, _range(size, dims_in(size))
    if not step.is_Integer or step <= 0:
        return
    if not (found.lower.is_Integer and found.upper.is_Integer):
        return
    yield symbol, ValueRanges(-(-found.lower // step), found.upper // step)


def program_bounds(value: int | torch.SymInt) -> tuple[float, float]:
    """Two numbers between which a number of a program's sizes lies at all declared sizes.

    torch's own bounds leave out sizes of 0 and 1, and may be narrowed by a branch of the model.
    """
    if isinstance(value, int):
        return value, value
    env, declared = value.node.shape_env, _symbols.get() or {}
    ranges = {}
    for symbol in value.node.expr.free_symbols:
        found = env.var_to_range.get(symbol, ValueRanges(-int_oo, int_oo))
        if symbol in env.backed_var_to_val:
            found = declared.get(symbol, ValueRanges(0, found.upper))
        ranges[symbol] = found
    bound = bound_sympy(value.node.expr, ranges)
    return float(bound.lower), float(bound.upper)


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
    """The declared range of each symbol; None if one is not of the size of a declared input."""
    env, ranges = value.node.shape_env, {}
    for symbol in value.node.expr.free_symbols:
        found = symbol_range(env, symbol)
        if found is None:
            return None
        ranges[symbol] = found
    return ranges


def symbol_range(env: Any, symbol: Any) -> ValueRanges[Any] | None:
    """The declared range of one of torch's symbols while a model is traced; None if unknown.

    A symbol stands for a size, or for a dim divided by its multiple.
    """
    sizes = _declared.get() or {}
    source = next(iter(env.var_to_sources.get(symbol, ())), None)
    if source is None:
        return None
    size = declared_size(source.name, sizes)
    if size is not None:
        return _range(size, dims_in(size))
    dims = {dim for size in sizes.values() if not isinstance(size, int) for dim in size.dims}
    for dim in dims:
        if root_name(dim) == source.name:
            return ValueRanges(dim.min // dim.multiple_of, dim.max // dim.multiple_of)
    return None


def dims_in(*sizes: Size) -> tuple[Dim, ...]:
    """The dims in declared sizes.

    A cache of sizes needs them in its key: equal expressions may have other ranges.
    """
    found = {d.name: d for size in sizes if not isinstance(size, int) for d in size.dims}
    return tuple(found.values())


@functools.cache
def _range(size: Size, dims: tuple[Dim, ...]) -> ValueRanges[Any]:
    """The values of a declared size, or more."""
    if isinstance(size, int):
        return ValueRanges.wrap(size)
    if isinstance(size, Dim):
        return ValueRanges(size.min, size.max)
    if math.prod(dim.max - dim.min + 1 for dim in dims) > _MOST_VALUES:
        return ValueRanges(-int_oo, int_oo)
    values = np.meshgrid(*(np.arange(dim.min, dim.max + 1) for dim in dims))
    found = Symbol(size).at({dim.name: v for dim, v in zip(dims, values, strict=True)})
    return ValueRanges(int(found.min()), int(found.max()))
