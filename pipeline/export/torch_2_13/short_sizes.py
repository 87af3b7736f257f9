"""Sizes kept short while a model is traced.

torch 2.13 spends minutes on sizes that grow. A convolution with TensorFlow's "same" padding turns a
size s into
``(s + max(0, 2*ceil(s/2) + 1 - s) - 3)//2 + 1``. That is ``(s + 1)//2``, but torch's sympy does not
simplify it. Five nested ones need 120 s, nearly all in the guards. Windows that are padded in each
stage do the same. Under `short_sizes` a long expression of sizes becomes a short one. A long
condition becomes True or False. Both must be equal at every declared size:

- The sizes are those of the declared dims, not torch's conclusions about them.
- All sizes are evaluated. If they are too many, nothing is replaced.
- A quotient must also be equal at larger sizes (`_WIDE`). Otherwise it might just be a line through
  the few declared sizes.
- A size that depends on the data, or that is not an input's, does not change.

So a formula may be wrong at sizes that are not declared. These are refused at run time.

Short sizes make divisions by negative numbers more frequent, and torch merges those incorrectly:
`pipeline.export.torch_2_13.negative_divisors` mends that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import sympy
from torch.fx.experimental.sym_node import SymNode
from torch.utils._sympy.functions import FloorDiv

from pipeline.export.declared import Sizes, Symbols, declared_size, dims_in
from pipeline.export.exchange import Exchange
from pipeline.export.guards import Symbol
from pipeline.probe.evaluate import result_of
from pipeline.spec.dims import Dim

Columns = dict[str, np.ndarray]

_LONG = 6  # fewest operations of an expression to shorten
_MOST = 1 << 19  # most combinations of sizes; enough for 64..320 twice and a batch up to 7
_PROBES = 256  # combinations for a first, fast check
_WIDE = 1 << 12  # fewest sizes at which a quotient is fitted
_LARGEST = 1024  # largest divisor of a size
_EXACT = 1 << 62  # results below this are exact in int64


@dataclass(frozen=True)
class _Shortened:
    sizes: Sizes
    known: dict[tuple[Any, Any], Any] = field(default_factory=dict)  # by environment, expression


_entered: ContextVar[_Shortened | None] = ContextVar("_entered", default=None)
_init: Callable[..., None] = SymNode.__init__


@contextmanager
def short_sizes(sizes: Sizes) -> Iterator[None]:
    """Replaces long sizes by equal short ones while this thread traces a model.

    `SymNode.__init__` is torch's one place where a size gets its expression. It is exchanged for
    all threads, and put back when the last user leaves. In other threads it does what torch's own
    does.

    Args:
        sizes: the declared sizes, by the argument of the model's ``forward`` and the axis.
    """
    token = _entered.set(_Shortened(dict(sizes)))
    try:
        with _exchange.used():
            yield
    finally:
        _entered.reset(token)


def _short_init(
    node: Any, expr: Any, shape_env: Any, pytype: type, *args: Any, **kwargs: Any
) -> None:
    """`SymNode.__init__`, with the shorter expression."""
    here = _entered.get()
    if here and shape_env is not None and pytype in (int, bool) and isinstance(expr, sympy.Basic):
        key = (shape_env, expr)
        if key not in here.known:
            here.known[key] = _known_shorter(expr, shape_env, here.sizes)
        expr = here.known[key]
    _init(node, expr, shape_env, pytype, *args, **kwargs)


_exchange = Exchange({(SymNode, "__init__"): _short_init})


def shorter(expr: Any, symbols: Symbols) -> Any:
    """The expression, or a shorter one that is equal at every declared size.

    Args:
        expr: a sympy expression of integers, or a condition.
        symbols: the symbols in it, with their declared sizes.
    """
    columns = _columns(symbols, dims_in(*(size for _, size in symbols)))
    if columns is None:
        return expr
    if len(columns) > 1:
        count = len(next(iter(columns.values())))
        few = {name: column[:: -(-count // _PROBES)] for name, column in columns.items()}
        if _equal(expr, few) is None:
            return expr
    found = _equal(expr, columns)
    if found is None:
        return expr
    # the fitted expression must have these values
    want, got = _values(expr, columns), _values(found, columns)
    return expr if want is None or got is None or not np.array_equal(want, got) else found


def _known_shorter(expr: Any, env: Any, sizes: Sizes) -> Any:
    """Calls `shorter` for a long expression that has only sizes of these inputs."""
    if expr.is_Atom or expr.count_ops() < _LONG:
        return expr
    symbols = _declared(expr, env, sizes)
    if symbols is None:
        return expr
    hints = {symbol: env.backed_var_to_val.get(symbol) for symbol in expr.free_symbols}
    if None in hints.values():
        return expr
    hint = expr.xreplace(hints)
    if len(hints) > 1 and not _condition(expr) and hint not in hints.values():
        return expr  # it equals no size at the example's sizes
    short = shorter(expr, symbols)
    # always equal if the example's sizes are declared sizes
    return short if short is expr or short.xreplace(hints) == hint else expr


def _declared(expr: Any, env: Any, sizes: Sizes) -> Symbols | None:
    """The declared size of each symbol; None if one is not the size of a declared input."""
    found = []
    for symbol in sorted(expr.free_symbols, key=str):
        declared = [declared_size(s.name, sizes) for s in env.var_to_sources.get(symbol, ())]
        if not declared or any(d is None or d != declared[0] for d in declared):
            return None
        found.append((str(symbol), declared[0]))
    return tuple(found) or None  # type: ignore[arg-type]  # no None in it


def _condition(expr: Any) -> bool:
    return bool(expr.is_Boolean or expr.is_Relational)


@lru_cache(maxsize=64)
def _columns(symbols: Symbols, dims: tuple[Dim, ...]) -> Columns | None:
    """The symbols' values at every declared set of sizes; None if these are too many."""
    every = [range(d.min, d.max + 1, d.multiple_of) for d in dims]
    if not dims or math.prod(map(len, every)) > _MOST:
        return None
    meshes = np.meshgrid(*(np.array(v, np.int64) for v in every), indexing="ij")
    at = dict(zip((d.name for d in dims), (m.ravel() for m in meshes), strict=True))
    rows = np.stack([Symbol(size).at(at) for _, size in symbols], axis=1)
    return dict(zip((name for name, _ in symbols), np.unique(rows, axis=0).T, strict=True))


def _values(expr: Any, columns: Columns) -> np.ndarray | None:
    """The expression's values, one for each set of sizes; None if they are not exact."""
    highest = {name: int(np.abs(column).max()) for name, column in columns.items()}
    if _bound(expr, highest) >= _EXACT:
        return None
    result = result_of(str(expr), columns)
    if result is None:
        return None
    length = len(next(iter(columns.values())))
    return np.broadcast_to(np.asarray(result), (length,))


def _bound(expr: Any, highest: Mapping[str, int]) -> float:
    """An upper bound of the absolute value of every part of the expression."""
    if expr.is_Symbol:
        return highest[str(expr)]
    if expr.is_Atom:
        return abs(float(expr)) if expr.is_number else 1
    parts = [_bound(arg, highest) for arg in expr.args]
    kind = type(expr).__name__
    if kind == "Pow" and expr.exp.is_Integer and 0 < expr.exp < 9:
        return parts[0] ** int(expr.exp)
    if kind == "Mul":
        return math.prod(max(part, 1.0) for part in parts)
    if kind in _NOT_GREATER or expr.is_Boolean or expr.is_Relational:
        return max(parts) + 1
    return sum(parts) if kind == "Add" else math.inf


_NOT_GREATER = frozenset(
    # than one of their arguments, by more than 1
    "FloorDiv CleanDiv CeilDiv Mod PythonMod Max Min ceiling floor ToFloat IntTrueDiv "  # noqa: SIM905
    "CeilToInt FloorToInt TruncToInt RoundToInt Abs Identity".split()
)


def _equal(expr: Any, columns: Columns) -> Any:
    """A short expression that has the same values at these sizes; None if there is none."""
    values = _values(expr, columns)
    if values is None:
        return None
    same = bool((values == values[0]).all())
    if _condition(expr):
        return (sympy.true if values[0] else sympy.false) if same else None
    if values.dtype.kind != "i":
        return None
    if same:
        return sympy.Integer(int(values[0]))
    for symbol in sorted(expr.free_symbols, key=str):
        if np.array_equal(values, columns[str(symbol)]):
            return symbol
    return _as_quotient(expr, columns) if len(columns) == 1 else None


def _as_quotient(expr: Any, columns: Columns) -> Any:
    """``m*((a*s + b)//c) + e``, or that minus s, equal at the given sizes and at larger ones."""
    (symbol,), ((name, sizes),) = expr.free_symbols, columns.items()
    step = int(np.gcd.reduce(np.diff(sizes)))
    most = max(int(sizes[-1]) + 1, int(sizes[0]) + _WIDE * step)
    wide = np.arange(int(sizes[0]), most, step)
    values = _values(expr, {name: wide})
    if values is None:
        return None
    found = _fitted(symbol, wide, values)
    if found is None:  # ``7*((s + 6)//7) - s``, an amount of padding
        padded = _fitted(symbol, wide, values + wide)
        found = None if padded is None else padded - symbol
    return found if found is not None and found.count_ops() < expr.count_ops() else None


def _fitted(symbol: Any, sizes: np.ndarray, values: np.ndarray) -> Any:
    m = int(np.gcd.reduce(np.diff(values)))
    if not m:
        return None
    e = int(values[0]) % m
    found = _line(sizes, (values - e) // m)
    if found is None:
        return None
    a, b, c = found
    return m * FloorDiv(a * symbol + b, c) + e


def _line(sizes: np.ndarray, values: np.ndarray) -> tuple[int, int, int] | None:
    """(a, b, c) with ``(a*size + b)//c`` equal to the value at each size; None without a fit.

    c is the smallest possible, at most `_LARGEST`.
    """
    rise, run = int(values[-1] - values[0]), int(sizes[-1] - sizes[0])
    for c in range(1, _LARGEST + 1):
        a = round(rise * c / run)
        if a < 1 or abs(rise * c - a * run) >= c:  # the ends alone exclude this c
            continue
        rest = values * c - a * sizes
        low, high = int(rest.max()), int(rest.min()) + c - 1
        if low <= high:
            return a, min(max(0, low), high), c
    return None
