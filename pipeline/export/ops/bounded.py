"""Bounds of the values of a float tensor, as far as constants and simple ops show them.

A translation asks for them to omit a guard that the model does not need.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch.fx import Node

aten: Any = torch.ops.aten
Range = tuple[float, float]

_UNKNOWN: Range = (-math.inf, math.inf)
_DEEP = 40  # longest chain of nodes that is followed
_constants: ContextVar[Mapping[str, torch.Tensor] | None] = ContextVar("_constants", default=None)

# ops whose result has only values of their first input
_MOVES = frozenset(
    getattr(aten, name)
    for name in (
        *("alias", "clone", "contiguous", "detach", "embedding", "expand", "gather", "index"),
        *("index_select", "permute", "reshape", "select", "slice", "squeeze", "t", "transpose"),
        *("unsqueeze", "view", "_unsafe_view", "_to_copy", "to"),
    )
)
_FILLED: Mapping[Any, Range] = {
    **dict.fromkeys((aten.zeros, aten.zeros_like), (0.0, 0.0)),
    **dict.fromkeys((aten.ones, aten.ones_like), (1.0, 1.0)),
}


@contextmanager
def knowing(program: torch.export.ExportedProgram) -> Iterator[None]:
    """Tells `constant` and `bounds_of` the values of the program's weights and constants."""
    signature = program.graph_signature
    names = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    found = {n: program.state_dict[t] for n, t in names.items() if t in program.state_dict}
    names |= signature.inputs_to_lifted_tensor_constants
    found |= {n: program.constants[t] for n, t in names.items() if t in program.constants}
    written = signature.buffers_to_mutate.values()
    kept = {n: t for n, t in found.items() if isinstance(t, torch.Tensor)}
    token = _constants.set({n: t for n, t in kept.items() if names[n] not in written})
    try:
        yield
    finally:
        _constants.reset(token)


def constant(node: Any) -> torch.Tensor | None:
    """The values of a weight or constant of the program; None for another node."""
    placed = isinstance(node, Node) and node.op == "placeholder"
    return (_constants.get() or {}).get(str(node.name)) if placed else None


def bounds_of(node: Any, depth: int = 0) -> Range:
    """Two numbers between which the values of a node lie; infinite if that is not known."""
    if isinstance(node, bool | int | float):
        return float(node), float(node)
    known = constant(node)
    if known is not None:
        return _ends(known)
    value = node.meta.get("val") if isinstance(node, Node) else None
    if not isinstance(value, torch.Tensor) or depth > _DEEP:
        return _UNKNOWN
    if value.dtype == torch.bool:
        return 0.0, 1.0
    if not value.is_floating_point():
        info = torch.iinfo(value.dtype)
        return float(info.min), float(info.max)
    low, high = _made(node, depth + 1)
    most = torch.finfo(value.dtype).max
    return (low, high) if -most <= low <= high <= most else _UNKNOWN


def _made(node: Node, depth: int) -> Range:
    op = getattr(node.target, "overloadpacket", None)
    if op in (aten.full, aten.full_like):
        return bounds_of(node.args[1], depth)
    if op is aten.scalar_tensor or op in _MOVES:
        return bounds_of(node.args[0], depth)
    if op in (aten.where, aten.masked_fill):
        first = node.args[0 if op is aten.masked_fill else 1]
        (a, b), (c, d) = (bounds_of(arg, depth) for arg in (first, node.args[2]))
        return min(a, c), max(b, d)
    if op in (aten.add, aten.sub, aten.mul) and not node.kwargs:
        ends = [bounds_of(arg, depth) for arg in node.args[:2]]
        return _computed(op, *ends) if all(map(math.isfinite, sum(ends, ()))) else _UNKNOWN
    return _FILLED.get(op, _UNKNOWN)


def _computed(op: Any, one: Range, other: Range) -> Range:
    if op is aten.mul:
        products = [a * b for a in one for b in other]
        return min(products), max(products)
    low, high = other if op is aten.add else (-other[1], -other[0])
    return one[0] + low, one[1] + high


def _ends(values: torch.Tensor) -> Range:
    if values.numel() == 0 or values.is_complex() or bool(values.isnan().any()):
        return _UNKNOWN
    return float(values.min()), float(values.max())
