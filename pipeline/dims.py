"""Named dynamic dimensions, and integer expressions of them.

A `Dim` is the one source of torch.export's dims, the ONNX ``dim_param`` names, TensorRT's
profiles, the sizes that are verified, and the checks on sizes at run time. An output's size
may be an expression of the inputs' dims (``4*h``, ``8*((h + 7)//8)``). Expressions are kept
as text, the same text that stands in the ONNX file and in the manifest, and are evaluated
without sympy or torch, so that a runtime can check sizes with nothing but this module.
"""

from __future__ import annotations

import ast
import keyword
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Union

from pipeline.errors import InputError

Size = Union[int, "Dim", "DimExpr"]

_LONGEST, _DEEPEST = 10_000, 200  # of an expression's text
_ALLOWED = (
    ast.BinOp, ast.UnaryOp, ast.Name, ast.Constant, ast.Call,
    ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Div, ast.Mod, ast.USub,
)  # fmt: skip
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*\Z")


class DimExpr:
    """An integer expression of dims, such as ``4*h + 1``; made by arithmetic on a `Dim`."""

    def __init__(self, text: str) -> None:
        self.text = text
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
        """The expression's value where the dims have these sizes.

        Raises:
            InputError: a dim has no size, or a division by ``/`` is not exact.
        """
        return _evaluate(self._tree, sizes, self.text)

    def __add__(self, other: Size) -> DimExpr:
        return _combine(self, "+", other)

    def __radd__(self, other: Size) -> DimExpr:
        return _combine(other, "+", self)

    def __sub__(self, other: Size) -> DimExpr:
        return _combine(self, "-", other)

    def __rsub__(self, other: Size) -> DimExpr:
        return _combine(other, "-", self)

    def __mul__(self, other: Size) -> DimExpr:
        return _combine(self, "*", other)

    def __rmul__(self, other: Size) -> DimExpr:
        return _combine(other, "*", self)

    def __floordiv__(self, other: Size) -> DimExpr:
        return _combine(self, "//", other)


@dataclass(frozen=True)
class Dim:
    """A dynamic dimension: a name and the sizes it may take.

    Args:
        name: an identifier, not starting with an underscore; stands in the ONNX file.
        min: smallest legal size.
        opt: the size that TensorRT tunes for.
        max: largest legal size.
        multiple_of: legal sizes are the multiples of this from `min` to `max`.

    Raises:
        InputError: sizes that contradict each other.
    """

    name: str
    min: int
    opt: int
    max: int
    multiple_of: int = 1

    def __post_init__(self) -> None:
        if not _NAME.match(self.name):
            raise InputError(f"dim name {self.name!r}: use a letter, then letters, digits or _")
        if self.name in ("min", "max") or keyword.iskeyword(self.name):
            raise InputError(f"dim name {self.name!r} has a meaning of its own in an expression")
        for word in ("min", "opt", "max", "multiple_of"):
            if type(getattr(self, word)) is not int:
                raise InputError(
                    f"dim {self.name}: {word}={getattr(self, word)!r} is no whole number"
                )
        if self.multiple_of < 1:
            raise InputError(f"dim {self.name}: multiple_of={self.multiple_of} must be at least 1")
        if self.min < 1:
            raise InputError(f"dim {self.name}: min={self.min} must be at least 1")
        if self.min > self.max:
            raise InputError(f"dim {self.name}: min={self.min} is greater than max={self.max}")
        if not self.min <= self.opt <= self.max:
            raise InputError(
                f"dim {self.name}: opt={self.opt} is outside min={self.min}..max={self.max}"
            )
        for word, size in (("min", self.min), ("opt", self.opt), ("max", self.max)):
            if size % self.multiple_of:
                raise InputError(
                    f"dim {self.name}: {word}={size} is not a multiple of {self.multiple_of}; "
                    f"next ones: {_neighbours(size, self.multiple_of)}"
                )

    def __str__(self) -> str:
        step = f" in steps of {self.multiple_of}" if self.multiple_of > 1 else ""
        return f"{self.name} in {self.min}..{self.max}{step}"

    @property
    def expr(self) -> DimExpr:
        return DimExpr(self.name)

    @property
    def static(self) -> bool:
        """True if there is only one legal size."""
        return self.min == self.max

    def check(self, size: int, where: str = "") -> None:
        """Raises `InputError` unless `size` is legal; `where` names who asks."""
        place = f"{where}: " if where else ""
        if not self.min <= size <= self.max:
            raise InputError(f"{place}{self.name}={size} is outside {self.min}..{self.max}")
        if size % self.multiple_of:
            raise InputError(
                f"{place}{self.name}={size} is not a multiple of {self.multiple_of}; next ones: "
                f"{_neighbours(size, self.multiple_of)}"
            )

    def legal(self, near: int, *, odd: bool = False) -> int:
        """The legal size nearest to `near`; an odd one where `odd` asks for it and one exists."""
        step = self.multiple_of
        size = min(max(_down(near, step), _up(self.min, step)), _down(self.max, step))
        if odd and size % 2 == 0:
            for other in (size + step, size - step):
                if other % 2 and self.min <= other <= self.max:
                    return other
        return size

    def padded(self, multiple: int, name: str) -> Dim:
        """The dim that a model sees whose inputs are padded up to multiples of `multiple`.

        It always has more than one size, so that it stays a dim where all sizes are padded to
        the same one.
        """
        low, high = _up(self.min, multiple), _up(self.max, multiple)
        return replace(
            self,
            name=name,
            min=low,
            opt=_up(self.opt, multiple),
            max=high if high > low else low + multiple,
            multiple_of=multiple,
        )

    def __add__(self, other: Size) -> DimExpr:
        return self.expr + other

    def __radd__(self, other: Size) -> DimExpr:
        return _combine(other, "+", self)

    def __sub__(self, other: Size) -> DimExpr:
        return self.expr - other

    def __rsub__(self, other: Size) -> DimExpr:
        return _combine(other, "-", self)

    def __mul__(self, other: Size) -> DimExpr:
        return self.expr * other

    def __rmul__(self, other: Size) -> DimExpr:
        return _combine(other, "*", self)

    def __floordiv__(self, other: Size) -> DimExpr:
        return self.expr // other


def size_text(size: Size | str) -> str:
    """The text of a size as it stands in the manifest and in an ONNX ``dim_param``."""
    return size.name if isinstance(size, Dim) else str(size)


def evaluate(size: Size | str, sizes: Mapping[str, int]) -> int:
    """The value of a size (a number, a dim, an expression or its text) at given dim sizes."""
    if isinstance(size, int):
        return size
    return DimExpr(size_text(size)).value(sizes)


def shape_at(shape: Sequence[Size | str], sizes: Mapping[str, int]) -> tuple[int, ...]:
    """`shape` with numbers in place of its dims."""
    return tuple(evaluate(size, sizes) for size in shape)


def solve_sizes(
    shapes: Mapping[str, Sequence[Size]], actual: Mapping[str, Sequence[int]]
) -> dict[str, int]:
    """Reads the dims' sizes off actual input shapes and checks every one of them.

    Args:
        shapes: the declared shape by input name.
        actual: the shape that came, by input name.

    Returns:
        The size of each dim.

    Raises:
        InputError: a wrong rank, a size outside its dim, or two inputs that disagree.
    """
    sizes: dict[str, int] = {}
    seen: dict[str, str] = {}
    for name, shape in shapes.items():
        if name not in actual:
            raise InputError(f"{name}: no such input was given; given: {', '.join(actual)}")
        got = actual[name]
        if len(got) != len(shape):
            raise InputError(f"{name}: rank {len(got)}, expected {len(shape)}")
        for axis, (declared, size) in enumerate(zip(shape, got, strict=True)):
            where = f"{name} axis {axis}"
            if isinstance(declared, Dim):
                declared.check(size, where)
                if sizes.setdefault(declared.name, size) != size:
                    raise InputError(
                        f"{where}: {declared.name}={size}, but {seen[declared.name]} has "
                        f"{declared.name}={sizes[declared.name]}"
                    )
                seen.setdefault(declared.name, where)
            elif isinstance(declared, int) and declared != size:
                raise InputError(f"{where}: size {size}, expected {declared}")
    return sizes


def _up(size: int, step: int) -> int:
    return -(-size // step) * step


def _down(size: int, step: int) -> int:
    return size // step * step


def _neighbours(size: int, step: int) -> str:
    return ", ".join(str(n) for n in (_down(size, step), _up(size, step)) if n > 0)


def _combine(left: Size, sign: str, right: Size) -> DimExpr:
    def wrap(size: Size) -> str:
        text = size_text(size)
        return text if re.fullmatch(r"\w+", text) else f"({text})"

    return DimExpr(f"{wrap(left)} {sign} {wrap(right)}")


def _parse(text: str) -> ast.expr:
    if len(text) > _LONGEST:
        raise InputError(f"size expression {text[:40]!r}... is {len(text)} characters long")
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise InputError(f"size expression {text!r} does not parse") from error
    if _depth(tree) > _DEEPEST:
        raise InputError(f"size expression {text[:40]!r}... is nested too deep")
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
