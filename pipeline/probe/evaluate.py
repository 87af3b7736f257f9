"""The guards that an export stands on, held against every size that is declared.

torch.export itself checks a guard only where it is on one dim that was given as it is: for a
derived dim (``8*_h``) and for two dims at once (``h*w < 10000``) it takes what the example
showed for the whole range (torch 2.13). So each guard that the shape environment recorded is
evaluated at the dims' legal sizes. A guard that can't be evaluated counts as broken everywhere.
"""

from __future__ import annotations

import ast
import functools
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.spec.dims import Dim, DimExpr, Size, size_text
from pipeline.spec.tensors import Input

if TYPE_CHECKING:
    import torch


def _each(function: Callable[..., Any], kind: Any) -> Callable[..., Any]:
    """Python's own function on numbers and on arrays: numpy's may round in another way."""
    return np.vectorize(function, otypes=[kind])


def _fold(function: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    return lambda *args: functools.reduce(function, args)


def _piecewise(*cases: tuple[Any, Any]) -> Any:
    result = cases[-1][0]
    for value, condition in reversed(cases):
        result = np.where(condition, value, result)
    return result


_UNARY = (
    "sqrt cos cosh sin sinh tan tanh asin acos atan exp log asinh log2".split()  # noqa: SIM905
)
# what torch.utils._sympy.functions and sympy print
_WORDS: dict[str, Any] = {
    "Eq": operator.eq,
    "Ne": operator.ne,
    "Not": np.logical_not,
    "And": _fold(np.logical_and),
    "Or": _fold(np.logical_or),
    "Xor": _fold(np.logical_xor),
    "Mod": operator.mod,
    "PythonMod": operator.mod,
    "FloorDiv": operator.floordiv,
    "CleanDiv": operator.floordiv,
    "CeilDiv": lambda a, b: -(-a // b),
    "ModularIndexing": lambda a, b, c: a // b % c,
    "IntTrueDiv": operator.truediv,
    "FloatTrueDiv": operator.truediv,
    "ToFloat": _each(float, float),
    "TruncToInt": _each(lambda x: math.trunc(float(x)), np.int64),
    "TruncToFloat": _each(lambda x: float(math.trunc(x)), float),
    "FloorToInt": _each(lambda x: math.floor(float(x)), np.int64),
    "CeilToInt": _each(lambda x: math.ceil(float(x)), np.int64),
    "RoundToInt": _each(lambda x: round(float(x)), np.int64),
    "RoundDecimal": _each(lambda x, n: round(float(x), int(n)), float),
    "floor": _each(math.floor, np.int64),
    "ceiling": _each(math.ceil, np.int64),
    "Pow": operator.pow,
    "PowByNatural": _each(lambda a, b: int(a) ** int(b), object),
    "FloatPow": _each(lambda a, b: float(a) ** float(b), float),
    "LShift": _each(lambda a, b: int(a) << int(b), object),
    "RShift": operator.rshift,
    "BitwiseFn_bitwise_and": operator.and_,
    "BitwiseFn_bitwise_or": operator.or_,
    "BitwiseFn_bitwise_xor": operator.xor,
    "Abs": abs,
    "Identity": lambda x: x,
    "Max": _fold(np.maximum),
    "Min": _fold(np.minimum),
    "max": _fold(np.maximum),  # of an expression of dims
    "min": _fold(np.minimum),
    "Where": np.where,
    "Piecewise": _piecewise,
    "oo": math.inf,
    "int_oo": math.inf,
    "pi": math.pi,
    "E": math.e,
    **{name: _each(getattr(math, name), float) for name in _UNARY},
    **{f"OpaqueUnaryFn_{name}": _each(getattr(math, name), float) for name in _UNARY},
}
_NAME = re.compile(r"\b[a-z]+\d+\b(?!\()")  # of a symbol
_MOST = 1 << 14  # sizes of a dim at which a guard is evaluated
_GRID = 1 << 18  # combinations of sizes at which a guard on several dims is evaluated


@dataclass(frozen=True)
class Broken:
    """A guard that some of the declared sizes break.

    Args:
        text: the guard, in torch's symbols.
        words: the guard, in the dims.
        dims: the dims that it is on.
        sizes: sizes that break it, one row a combination, in the order of `dims`, the one of
            the fewest elements first.
        readable: False if it can't be evaluated: then it is taken to be broken at every size.
    """

    text: str
    words: str
    dims: tuple[Dim, ...]
    sizes: np.ndarray
    readable: bool = True


@dataclass(frozen=True)
class Symbol:
    size: Size  # what is declared where torch has the symbol
    step: int = 1  # the symbol's value is that size divided by this

    @property
    def names(self) -> frozenset[str]:
        return DimExpr(size_text(self.size)).names

    def at(self, columns: Mapping[str, np.ndarray]) -> np.ndarray:
        """Its values where the dims have these sizes."""
        values: np.ndarray = result_of(size_text(self.size), columns)
        return values // self.step

    def __str__(self) -> str:
        text = size_text(self.size)
        text = f"({text})" if isinstance(self.size, DimExpr) else text
        return text if self.step == 1 else f"({text}/{self.step})"


class _Logic(ast.NodeTransformer):
    """``~``, ``&`` and ``|`` as functions: sympy prints its logic so, Python takes it for bits."""

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        self.generic_visit(node)
        return _call("Not", node.operand) if isinstance(node.op, ast.Invert) else node

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        name = {ast.BitAnd: "And", ast.BitOr: "Or", ast.BitXor: "Xor"}.get(type(node.op))
        return _call(name, node.left, node.right) if name else node


def _call(name: str, *args: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(name, ast.Load()), list(args), [])


def result_of(text: str, values: Mapping[str, Any]) -> Any:
    """The value of torch's text of an expression; None if it can't be told.

    Args:
        text: as torch prints it.
        values: of its symbols, numbers or numpy arrays of one shape.
    """
    code = _compiled(text)
    if code is None:
        return None
    try:
        with np.errstate(divide="raise", invalid="raise", over="raise"):
            return eval(code, {"__builtins__": {}, **_WORDS}, dict(values))
    except (ArithmeticError, NameError, TypeError, ValueError, AttributeError):
        return None


def holds(guard: str, values: Mapping[str, int]) -> bool | None:
    """The value of a guard's text at given values of its symbols; None if it can't be told."""
    result = result_of(guard, values)
    return None if result is None else bool(result)


def symbols_in(guard: str) -> set[str]:
    """The names of the symbols in a guard's text."""
    return set(_NAME.findall(guard))


@lru_cache(maxsize=4096)
def _compiled(guard: str) -> CodeType | None:
    try:
        tree = ast.parse(guard, mode="eval")
        if any(isinstance(node, (ast.Attribute, ast.Subscript)) for node in ast.walk(tree)):
            return None
        return compile(ast.fix_missing_locations(_Logic().visit(tree)), "<guard>", "eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def broken_guards(
    program: torch.export.ExportedProgram, inputs: Sequence[Input], rules: Sequence[str] = ()
) -> list[Broken]:
    """The guards of a program that not all declared sizes keep, or that can't be evaluated.

    Args:
        program: what torch exported.
        inputs: its inputs as declared.
        rules: what sizes keep together; others are no matter.
    """
    symbols, guards = recorded(program, inputs)
    every = {dim.name: dim for i in inputs for dim in i.dims}
    found = []
    for text in dict.fromkeys(guards):
        used = sorted(symbols_in(text))
        if not used and holds(text, {}):
            continue
        own = {name for n in used if n in symbols for name in symbols[n].names}
        dims = tuple(dim for name, dim in every.items() if name in own or not own)
        grid = size_grid(dims, tuple(rules))
        kept = None
        if used and all(name in symbols for name in used):
            columns = dict(zip((dim.name for dim in dims), grid.T, strict=True))
            kept = where_kept(text, {n: symbols[n].at(columns) for n in used})
        bad = grid if kept is None else grid[~kept]
        if len(bad):
            found.append(Broken(text, in_dims(text, symbols), dims, bad, kept is not None))
    return found


def in_dims(text: str, symbols: Mapping[str, Symbol]) -> str:
    """A guard's text with the dims in place of torch's symbols."""
    return _NAME.sub(lambda m: str(symbols.get(m[0], m[0])), text)


def complete(dims: Sequence[Dim]) -> bool:
    """True if `size_grid` holds every combination of the dims' sizes."""
    counts = [len(range(d.min, d.max + 1, d.multiple_of)) for d in dims]
    return max(counts, default=0) <= _MOST and (len(counts) == 1 or math.prod(counts) <= _GRID)


def good_sizes(
    program: torch.export.ExportedProgram,
    inputs: Sequence[Input],
    dim: Dim,
    guards: Sequence[Broken],
) -> list[int]:
    """The legal sizes of a dim that keep all of these guards, which are on this dim alone."""
    symbols, _ = recorded(program, inputs)
    own = {name: s for name, s in symbols.items() if s.names == {dim.name}}
    sizes = np.array(legal_sizes(dim, _MOST))
    good = np.ones(len(sizes), bool)
    for guard in guards:
        kept = where_kept(guard.text, {n: s.at({dim.name: sizes}) for n, s in own.items()})
        good &= False if kept is None else kept
    return [int(size) for size in sizes[good]]


def where_kept(text: str, values: Mapping[str, np.ndarray]) -> np.ndarray | None:
    """Where a guard holds; None if it can't be told everywhere."""
    (length,) = {len(v) for v in values.values()}
    # Python's own numbers where a product of the sizes, squared, might leave int64
    if math.prod(int(v.max()) for v in values.values()) > 1 << 25:
        values = {n: v.astype(object) for n, v in values.items()}
    result = result_of(text, values)
    return None if result is None else np.broadcast_to(np.asarray(result, bool), length)


@lru_cache(maxsize=16)
def size_grid(dims: tuple[Dim, ...], rules: tuple[str, ...]) -> np.ndarray:
    """Combinations of legal sizes that keep the rules, those of few elements first, one row each.

    All of them, or, where they are too many, all sizes of each dim with some of the others.
    """
    count, every = len(dims), [legal_sizes(dim, _MOST) for dim in dims]
    if count == 1 or math.prod(map(len, every)) <= _GRID:
        blocks = [every]
    else:
        probes = max(4, int((_GRID / max(map(len, every))) ** (1 / (count - 1))))
        full = max(64, _GRID // probes ** (count - 1))
        blocks = [
            [legal_sizes(d, full if i == k else probes) for i, d in enumerate(dims)]
            for k in range(count)
        ]
    meshes = [np.stack([m.ravel() for m in np.meshgrid(*b)], axis=1) for b in blocks]
    rows = meshes[0] if len(meshes) == 1 else np.unique(np.concatenate(meshes), axis=0)
    columns = dict(zip((dim.name for dim in dims), rows.T, strict=True))
    for rule in rules:
        kept = result_of(rule, columns)  # None for a rule on other dims
        if kept is not None:
            rows = rows[kept]
            columns = dict(zip((dim.name for dim in dims), rows.T, strict=True))
    found: np.ndarray = rows[np.argsort(rows.astype(float).prod(axis=1), kind="stable")]
    return found


def legal_sizes(dim: Dim, most: int) -> list[int]:
    """The legal sizes of a dim in order; where there are more than `most`, half of them the
    smallest, the others spread over the rest, the largest included."""
    every = range(dim.min, dim.max + 1, dim.multiple_of)
    return [every[k] for k in spread(len(every), most)]


def spread(count: int, most: int) -> list[int]:
    """At most `most` (4 or more) of `count` indices: half of them the first, the last included."""
    if count <= most:
        return list(range(count))
    half = most // 2
    return [*range(half), *(half + i * (count - half - 1) // (half - 1) for i in range(half))]


def recorded(
    program: torch.export.ExportedProgram, inputs: Sequence[Input]
) -> tuple[dict[str, Symbol], list[str]]:
    """torch's symbols of the inputs' dims, and the texts of all guards."""
    names = program.graph_signature.user_inputs
    values = {n.name: n.meta.get("val") for n in program.graph.nodes if n.op == "placeholder"}
    symbols: dict[str, Symbol] = {}
    guards: list[str] = []
    for name, declared in zip(names, inputs, strict=True):
        value: Any = values[str(name)]
        for size, dim in zip(value.shape, declared.shape, strict=True):
            if isinstance(dim, int) or isinstance(size, int):
                continue
            symbols[str(size.node._expr)] = Symbol(dim)
            expr = size.node.expr
            if isinstance(dim, Dim) and len(expr.free_symbols) == 1:
                (root,) = expr.free_symbols
                factor = expr / root
                if factor.is_Integer:
                    symbols.setdefault(str(root), Symbol(dim, int(factor)))
            guards = [str(g.expr) for g in size.node.shape_env.guards]
    return symbols, guards
