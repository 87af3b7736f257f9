"""Evaluates the guards of an export at every declared size.

torch.export checks a guard only on a single dim that is passed unchanged. For a derived dim
(``8*_h``) or two dims (``h*w < 10000``), it assumes that the example's result holds for the whole
range (torch 2.13). So each recorded guard is evaluated at the dims' legal sizes. A guard that can't
be evaluated counts as broken everywhere.
"""

from __future__ import annotations

import ast
import functools
import math
import operator
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from types import CodeType
from typing import Any

import numpy as np


def _each(function: Callable[..., Any], kind: Any) -> Callable[..., Any]:
    """Applies Python's function to numbers and arrays, because numpy may round differently.

    Arrays of Python's numbers and single numbers give Python's numbers, which have no limit.
    """
    plain, exact = (np.vectorize(function, otypes=[each]) for each in (kind, object))

    def apply(*args: Any) -> Any:
        arrays = [arg for arg in args if isinstance(arg, np.ndarray)]
        if not arrays:
            return function(*args)
        return (exact if any(array.dtype == object for array in arrays) else plain)(*args)

    return apply


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
# the names that torch.utils._sympy.functions and sympy print
_WORDS: dict[str, Any] = {
    "__builtins__": {},  # none
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
    "RShift": _each(lambda a, b: int(a) >> int(b), object),
    "BitwiseFn_bitwise_and": operator.and_,
    "BitwiseFn_bitwise_or": operator.or_,
    "BitwiseFn_bitwise_xor": operator.xor,
    "Abs": abs,
    "Identity": lambda x: x,
    "Max": _fold(np.maximum),
    "Min": _fold(np.minimum),
    "max": _fold(np.maximum),  # in an expression of dims
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
_EXACT = 1 << 53  # above it, int64 or float64 may not hold a number, and Python's numbers are used
SYMBOL_NAME = re.compile(r"\b[a-z]+\d+\b(?!\()")


class _Logic(ast.NodeTransformer):
    """Replaces ``~``, ``&`` and ``|`` by functions: they are logic in sympy, and bits in Python."""

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
    """The value of an expression in torch's text; None if it can't be evaluated.

    Args:
        text: The expression as torch prints it.
        values: The values of its symbols, numbers or numpy arrays of one shape.
    """
    code = _compiled(text)
    if code is None:
        return None
    if any(isinstance(v, np.ndarray) and v.dtype != object for v in values.values()):
        most = {name: int(np.abs(np.asarray(v)).max(initial=0)) for name, v in values.items()}
        if not fits(text, most):
            values = {name: np.asarray(v).astype(object) for name, v in values.items()}
    try:
        with np.errstate(divide="raise", invalid="raise", over="raise"):
            return eval(code, _WORDS, dict(values))
    except (ArithmeticError, NameError, TypeError, ValueError, AttributeError):
        return None


def holds(guard: str, values: Mapping[str, int]) -> bool | None:
    """The value of a guard's text at given values of its symbols; None if it is unknown."""
    result = result_of(guard, values)
    return None if result is None else bool(result)


def symbols_in(guard: str) -> set[str]:
    """The names of the symbols in a guard's text."""
    return set(SYMBOL_NAME.findall(guard))


@lru_cache(maxsize=4096)
def _compiled(guard: str) -> CodeType | None:
    try:
        tree = ast.parse(guard, mode="eval")
        if any(isinstance(node, (ast.Attribute, ast.Subscript)) for node in ast.walk(tree)):
            return None
        return compile(ast.fix_missing_locations(_Logic().visit(tree)), "<guard>", "eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


@lru_cache(maxsize=4096)
def _parsed(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def _bound(node: ast.AST, most: Mapping[str, int]) -> float:
    """A number that no number on the way to a part's value is above, if it is at most `_EXACT`.

    Symbols are at most `most`. A bound is at least 2, so a product is at least a sum. A divisor is
    a whole number or a constant, and its bound is at least its inverse.
    """
    match node:
        case ast.Name(id=name):
            return max(most.get(name, 0), 4)  # 4 is above pi
        case ast.Constant(value=int() | float() as number):
            return max(abs(number), 2, 1 / abs(number) if number else 0)
        case ast.BinOp(left=base, op=ast.Pow(), right=ast.Constant(value=int() as power)):
            return _bound(base, most) ** power if 0 < power < 64 else math.inf
        case ast.BinOp(op=ast.Div() | ast.FloorDiv() | ast.Mod(), right=divisor) if _real(divisor):
            return math.inf
        case ast.Call(func=ast.Name(id=called), args=[_, divisor, *_]) if (
            called in _DIVIDING and _real(divisor)
        ):
            return math.inf
        case ast.Call(func=ast.Name(id=called), args=inner):
            name = called.removeprefix("OpaqueUnaryFn_")
        case _:
            name = type(getattr(node, "op", node)).__name__
            inner = [part for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr)]
    return float(_GROWTH.get(name, math.prod)([_bound(part, most) for part in inner]))


def _real(divisor: ast.expr) -> bool:
    """Whether a divisor may be a fraction that is no constant, and so have a large inverse."""
    return not isinstance(divisor, ast.Constant) and any(
        isinstance(part, ast.Div | ast.Call) or isinstance(getattr(part, "value", None), float)
        for part in ast.walk(divisor)
    )


def _unless_large(parts: list[float]) -> float:
    return 2 if max(parts) <= _EXACT else math.inf


_DIVIDING = ("Mod", "PythonMod", "FloorDiv", "CleanDiv", "CeilDiv", "IntTrueDiv", "FloatTrueDiv")
# by the names of torch's functions and of Python's syntax; the others multiply
_GROWTH: dict[str, Callable[[list[float]], float]] = {
    **dict.fromkeys(("Add", "Sub"), sum),
    **dict.fromkeys(("Max", "Min", "max", "min"), max),
    **dict.fromkeys(("Eq", "Ne", "Not", "And", "Or", "Xor", "Compare"), _unless_large),
    **dict.fromkeys(
        ("PowByNatural", "FloatPow", "LShift", "Pow", "exp", "sinh", "cosh", "tan"),
        lambda _: math.inf,
    ),
}


def fits(text: str, most: Mapping[str, int], limit: int = _EXACT) -> bool:
    """Whether all numbers on the way to an expression's value are surely at most `limit`.

    Args:
        text: The expression.
        most: The largest absolute value of each symbol.
        limit: By default, the largest number that both int64 and float64 hold.
    """
    try:
        return _bound(_parsed(text), most) <= limit
    except (ArithmeticError, RecursionError, SyntaxError, ValueError):
        return False


def where_holds(text: str, values: Mapping[str, np.ndarray]) -> np.ndarray | None:
    """Where a guard holds, as a bool array; None if it can't be evaluated everywhere."""
    (length,) = {len(v) for v in values.values()}
    if not length:
        return np.zeros(0, bool)
    result = result_of(text, values)
    return None if result is None else np.broadcast_to(np.asarray(result, bool), length)
