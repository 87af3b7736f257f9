"""Integer expressions of dims, kept as text.

The ONNX file and the manifest contain the same text. This module evaluates it without sympy or
torch, so a runtime can check sizes.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from typing import Any

from pipeline.errors import InputError

_LONGEST, _DEEPEST = 10_000, 200  # of an expression's text
_ALLOWED = (
    ast.BinOp, ast.UnaryOp, ast.Name, ast.Constant, ast.Call,
    ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Div, ast.Mod, ast.USub,
)  # fmt: skip


class DimExpr:
    """An integer expression of dims, such as ``4*h + 1``; made by arithmetic on a `Dim`.

    Args:
        text: The expression.
        dims: The `Dim` objects in it; empty if only the text is known.

    Raises:
        InputError: The text is not such an expression. The message says where it fails.
    """

    def __init__(self, text: str, dims: tuple[Any, ...] = ()) -> None:
        self.text, self.dims = text, dims
        self._tree = _parse(text)
        self.names = frozenset(n.id for n in ast.walk(self._tree) if isinstance(n, ast.Name)) - {
            "min",
            "max",
        }

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"DimExpr({self.text!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DimExpr) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)

    def value(self, sizes: Mapping[str, int]) -> int:
        """The expression's value at these sizes of the dims.

        Raises:
            InputError: A dim has no size, or a division by ``/`` is not exact.
        """
        return _evaluate(self._tree, sizes, self.text)

    def __add__(self, other: Any) -> DimExpr:
        return combine(self, "+", other)

    def __radd__(self, other: Any) -> DimExpr:
        return combine(other, "+", self)

    def __sub__(self, other: Any) -> DimExpr:
        return combine(self, "-", other)

    def __rsub__(self, other: Any) -> DimExpr:
        return combine(other, "-", self)

    def __mul__(self, other: Any) -> DimExpr:
        return combine(self, "*", other)

    def __rmul__(self, other: Any) -> DimExpr:
        return combine(other, "*", self)

    def __floordiv__(self, other: Any) -> DimExpr:
        return combine(self, "//", other)

    def __mod__(self, other: Any) -> DimExpr:
        return combine(self, "%", other)


def size_text(size: Any) -> str:
    """The text of a number, a dim, an expression, or a text."""
    return str(getattr(size, "name", size))


def combine(left: Any, sign: str, right: Any) -> DimExpr:
    """``left sign right`` as an expression; each a number, a dim or an expression."""

    def wrap(size: Any) -> str:
        text = size_text(size)
        return text if re.fullmatch(r"\w+", text) else f"({text})"

    dims = (*getattr(left, "dims", ()), *getattr(right, "dims", ()))
    return DimExpr(f"{wrap(left)} {sign} {wrap(right)}", tuple(dict.fromkeys(dims)))


def _parse(text: str) -> ast.expr:
    if len(text) > _LONGEST:
        raise InputError(f"size expression {text[:40]!r}... is too long: {len(text)} characters")
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        column = getattr(error, "offset", None)
        at = f" at character {column}: {text[column - 1 :]!r}" if column else ""
        raise InputError(f"size expression {text!r} does not parse{at}") from error
    if _depth(tree) > _DEEPEST:
        raise InputError(f"size expression {text[:40]!r}... is too deeply nested")
    for node in ast.walk(tree):
        if isinstance(node, ast.Load):
            continue
        bad = not isinstance(node, _ALLOWED)
        bad = bad or (isinstance(node, ast.Constant) and type(node.value) is not int)
        if isinstance(node, ast.Call):
            names_ok = isinstance(node.func, ast.Name) and node.func.id in ("min", "max")
            bad = bad or not names_ok or bool(node.keywords) or not node.args
        if bad:
            what = ast.unparse(node) if isinstance(node, ast.expr) else type(node).__name__
            raise InputError(f"size expression {text!r}: {what!r} is not allowed")
    return tree


def _depth(tree: ast.AST) -> int:
    depth, level = 0, [tree]
    while level:
        depth, level = depth + 1, [c for node in level for c in ast.iter_child_nodes(node)]
    return depth


def _evaluate(node: ast.expr, sizes: Mapping[str, int], text: str) -> int:
    if isinstance(node, ast.Constant):
        assert isinstance(node.value, int)
        return node.value
    if isinstance(node, ast.Name):
        if node.id not in sizes:
            raise InputError(f"size expression {text!r}: no size given for {node.id}")
        return sizes[node.id]
    if isinstance(node, ast.Call):
        values = [_evaluate(arg, sizes, text) for arg in node.args]
        return min(values) if getattr(node.func, "id", "") == "min" else max(values)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_evaluate(node.operand, sizes, text)
    if isinstance(node, ast.BinOp):
        return _arithmetic(node, sizes, text)
    raise InputError(f"size expression {text!r}: {ast.unparse(node)!r} is not allowed")


def _arithmetic(node: ast.BinOp, sizes: Mapping[str, int], text: str) -> int:
    left, right = _evaluate(node.left, sizes, text), _evaluate(node.right, sizes, text)
    if isinstance(node.op, ast.Add):
        return left + right
    if isinstance(node.op, ast.Sub):
        return left - right
    if isinstance(node.op, ast.Mult):
        return left * right
    if isinstance(node.op, (ast.FloorDiv, ast.Mod, ast.Div)):
        if right == 0:
            raise InputError(f"size expression {text!r} divides by zero")
        if isinstance(node.op, ast.FloorDiv):
            return left // right
        if isinstance(node.op, ast.Mod):
            return left % right
        if left % right:
            raise InputError(f"size expression {text!r}: {left}/{right} is not a whole number")
        return left // right
    raise InputError(f"size expression {text!r}: {ast.unparse(node)!r} is not allowed")
