"""Named dynamic dimensions and the sizes that they may have.

torch.export's dims, the ONNX ``dim_param`` names and TensorRT's profiles all come from `Dim`. So do
the sizes that are verified and the checks on sizes at run time.

A size may also be an expression of dims (``4*h``, ``past + seq``; see
`pipeline.spec.expressions`). A `SizeRule` restricts several sizes: ``past + seq <= 128``.
"""

from __future__ import annotations

import keyword
import math
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal

from pipeline.errors import InputError
from pipeline.spec.expressions import DimExpr, combine, size_text
from pipeline.spec.given import named_fields

__all__ = [
    "Dim", "DimExpr", "Size", "SizeRule", "check_rules", "evaluate", "kept_rules", "read_size",
    "shape_at", "shape_texts", "size_text", "sizes_text", "solve_sizes",
]  # fmt: skip

Default = Literal["min", "opt"]

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*\Z")
_UNSET: int = None  # type: ignore[assignment]  # after construction every field is a number


@named_fields
@dataclass(frozen=True)
class Dim:
    """A dynamic dimension: a name and the sizes that it may have.

    Args:
        name: An identifier that does not start with an underscore. The ONNX file uses it.
        min: The smallest legal size. By default 1, or the first size that fits `multiple_of`.
            0 is legal: an empty cache.
        opt: The size that TensorRT tunes for. By default the geometric mean of min and max.
        max: The largest legal size. It is required.
        multiple_of: Legal sizes are `offset` plus a multiple of this, from `min` to `max`.
        offset: 0 or more, and less than `multiple_of`.
        auto: Whether the pipeline may narrow the dim to the sizes that the model accepts. It
            reports each such change.

    Raises:
        InputError: Max is missing, or the sizes contradict each other.
    """

    name: str
    min: int = _UNSET
    opt: int = _UNSET
    max: int = _UNSET
    multiple_of: int = 1
    offset: int = 0
    auto: bool = False
    defaulted: tuple[Default, ...] = field(default=(), init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            form = f'Write for example Dim("h", max={self.name!r})'
            raise InputError(f"dim name {self.name!r}: is not a text. {form}")
        if not _NAME.match(self.name):
            raise InputError(f"dim name {self.name!r}: use a letter, then letters, digits or _")
        if self.name in ("min", "max") or keyword.iskeyword(self.name):
            raise InputError(
                f"dim name {self.name!r} is reserved in expressions. Choose another name"
            )
        self._check_whole()
        if self.multiple_of < 1:
            raise InputError(f"dim {self.name}: multiple_of={self.multiple_of} must be at least 1")
        if not 0 <= self.offset < self.multiple_of:
            raise InputError(
                f"dim {self.name}: offset={self.offset} is outside 0..{self.multiple_of - 1}; "
                f"it must be less than multiple_of={self.multiple_of}"
            )
        if self.max is None:
            raise InputError(
                f"dim {self.name} has no max: TensorRT builds for a range of sizes. "
                f'Write Dim("{self.name}", max=...) with the largest size that you need'
            )
        self._fill()
        if self.min < 0:
            raise InputError(f"dim {self.name}: min={self.min} can't be negative")
        if self.max < 1:
            raise InputError(f"dim {self.name}: max={self.max} must be at least 1")
        if self.min > self.max:
            raise InputError(f"dim {self.name}: min={self.min} is greater than max={self.max}")
        if not self.min <= self.opt <= self.max:
            raise InputError(
                f"dim {self.name}: opt={self.opt} is outside min={self.min}..max={self.max}"
            )
        for word, size in (("min", self.min), ("opt", self.opt), ("max", self.max)):
            if not self._fits(size):
                raise InputError(
                    f"dim {self.name}: {word}={size} is not {self._form}; "
                    f"nearest: {self._neighbours(size)}"
                )

    def _check_whole(self) -> None:
        for word in ("min", "opt", "max", "multiple_of", "offset"):
            value = getattr(self, word)
            if type(value) is not int and not (value is None and word in ("min", "opt", "max")):
                raise InputError(f"dim {self.name}: {word}={value!r} is not a whole number")

    def _fill(self) -> None:
        """Sets min and opt to their defaults where they are missing."""
        said: list[Default] = []
        if self.min is None:
            object.__setattr__(self, "min", self._up(1))
            said.append("min")
        if self.opt is None and 0 <= self.min <= self.max:
            middle = round(math.sqrt(max(self.min, 1) * self.max))
            object.__setattr__(self, "opt", self.legal(middle))
            said.append("opt")
        object.__setattr__(self, "defaulted", tuple(said))

    def __str__(self) -> str:
        step = f" in steps of {self.multiple_of}" if self.multiple_of > 1 else ""
        return f"{self.name} in {self.min}..{self.max}{step}"

    @property
    def dims(self) -> tuple[Dim, ...]:
        """The dim itself, as a `DimExpr` gives the dims in it."""
        return (self,)

    @property
    def expr(self) -> DimExpr:
        return DimExpr(self.name, (self,))

    @property
    def static(self) -> bool:
        """True if there is only one legal size."""
        return self.min == self.max

    @property
    def _form(self) -> str:
        if self.offset == 0:
            return f"a multiple of {self.multiple_of}"
        return f"{self.offset} more than a multiple of {self.multiple_of}"

    def _fits(self, size: int) -> bool:
        return (size - self.offset) % self.multiple_of == 0

    def _up(self, size: int) -> int:
        return size + (self.offset - size) % self.multiple_of

    def _down(self, size: int) -> int:
        return size - (size - self.offset) % self.multiple_of

    def _neighbours(self, size: int) -> str:
        return ", ".join(str(n) for n in (self._down(size), self._up(size)) if n > 0)

    def check(self, size: int, where: str = "") -> None:
        """Raises `InputError` unless `size` is legal; the message starts with `where`."""
        place = f"{where}: " if where else ""
        if not self.min <= size <= self.max:
            raise InputError(f"{place}{self.name}={size} is outside {self.min}..{self.max}")
        if not self._fits(size):
            raise InputError(
                f"{place}{self.name}={size} is not {self._form}; nearest: {self._neighbours(size)}"
            )

    def legal(self, near: int, *, odd: bool = False) -> int:
        """The legal size nearest to `near`. With `odd`, an odd size beside it, if there is one."""
        step = self.multiple_of
        size = min(max(self._down(near), self._up(self.min)), self._down(self.max))
        if odd and size % 2 == 0:
            for other in (size + step, size - step):
                if other % 2 and self.min <= other <= self.max:
                    return other
        return size

    def settled(self, defaulted: Sequence[Default] | None = None) -> Dim:
        """The same dim with `auto` off, so that the pipeline does not narrow it any more.

        Args:
            defaulted: The fields that have their default. None keeps those of this dim.
        """
        dim = replace(self, auto=False)
        kept = self.defaulted if defaulted is None else tuple(defaulted)
        object.__setattr__(dim, "defaulted", kept)
        return dim

    def padded(self, multiple: int, name: str) -> Dim:
        """The dim inside a model whose inputs are padded up to multiples of `multiple`.

        It always has more than one size. So it stays dynamic even if all sizes are padded to
        the same one.
        """
        low, opt, high = (-(-n // multiple) * multiple for n in (self.min, self.opt, self.max))
        return replace(
            self,
            name=name,
            min=low,
            opt=opt,
            max=high if high > low else low + multiple,
            multiple_of=multiple,
            offset=0,
        )

    def __add__(self, other: Size) -> DimExpr:
        return self.expr + other

    def __radd__(self, other: Size) -> DimExpr:
        return combine(other, "+", self)

    def __sub__(self, other: Size) -> DimExpr:
        return self.expr - other

    def __rsub__(self, other: Size) -> DimExpr:
        return combine(other, "-", self)

    def __mul__(self, other: Size) -> DimExpr:
        return self.expr * other

    def __rmul__(self, other: Size) -> DimExpr:
        return combine(other, "*", self)

    def __floordiv__(self, other: Size) -> DimExpr:
        return self.expr // other

    def __mod__(self, other: Size) -> DimExpr:
        return self.expr % other


Size = int | Dim | DimExpr

_COMPARE = {
    "<=": operator.le, ">=": operator.ge, "==": operator.eq, "!=": operator.ne,
    "<": operator.lt, ">": operator.gt,
}  # fmt: skip


class SizeRule:
    """A rule on sizes: two expressions and a comparison, as text.

    Args:
        text: The rule, such as ``past + seq <= 128`` or ``h*w < 10000``.

    Raises:
        InputError: The text is not a comparison of two expressions.
    """

    def __init__(self, text: str) -> None:
        parts = re.split(r"(<=|>=|==|!=|<|>)", text)
        if len(parts) != 3:
            raise InputError(
                f"size rule {text!r}: expected two expressions and one of {' '.join(_COMPARE)}, "
                "such as past + seq <= 128"
            )
        self.text = text
        self.left, self.sign, self.right = (
            DimExpr(parts[0].strip()), parts[1], DimExpr(parts[2].strip()),
        )  # fmt: skip
        self.names = self.left.names | self.right.names

    def __str__(self) -> str:
        return self.text

    def kept(self, sizes: Mapping[str, int]) -> bool:
        """True if these sizes keep the rule."""
        left, right = self.left.value(sizes), self.right.value(sizes)
        return bool(_COMPARE[self.sign](left, right))


def kept_rules(rules: Sequence[str], sizes: Mapping[str, int]) -> bool:
    """True if the sizes keep every rule whose dims all have a size."""
    parsed = (SizeRule(text) for text in rules)
    return all(rule.kept(sizes) for rule in parsed if rule.names <= sizes.keys())


def check_rules(rules: Sequence[str], sizes: Mapping[str, int], where: str = "") -> None:
    """Raises `InputError` for the first rule that the sizes break."""
    for text in rules:
        if not kept_rules([text], sizes):
            names = SizeRule(text).names
            words = sizes_text({name: sizes[name] for name in sorted(names)})
            raise InputError(f"{where}{': ' if where else ''}{text} does not hold at {words}")


def evaluate(size: Size | str, sizes: Mapping[str, int]) -> int:
    """The value of a number, a dim, an expression or its text at given dim sizes."""
    if isinstance(size, int):
        return size
    return _expression(size_text(size)).value(sizes)


@lru_cache(maxsize=4096)
def _expression(text: str) -> DimExpr:
    return DimExpr(text)


def read_size(size: Size | str, dims: Mapping[str, Dim]) -> Size:
    """A size from its text: the dim of that name, or an expression of the dims.

    Names that are not in `dims` stay in the expression.

    Raises:
        InputError: The text is not an expression.
    """
    if isinstance(size, int):
        return size
    text = size_text(size)
    if text in dims:
        return dims[text]
    names = DimExpr(text).names
    return DimExpr(text, tuple(dim for name, dim in dims.items() if name in names))


def shape_texts(shape: Sequence[Size | str]) -> tuple[int | str, ...]:
    """A shape as numbers and text: dims and expressions become text."""
    return tuple(size if isinstance(size, int) else size_text(size) for size in shape)


def sizes_text(sizes: Mapping[str, int], none: str = "") -> str:
    """``h=440,w=1024``, as ``--shape`` reads it.

    Args:
        sizes: The sizes of dims, by name.
        none: The text for a model without dims.
    """
    return ",".join(f"{name}={size}" for name, size in sizes.items()) or none


def shape_at(shape: Sequence[Size | str], sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The shape with numbers in place of its dims."""
    return tuple(evaluate(size, sizes) for size in shape)


def solve_sizes(
    shapes: Mapping[str, Sequence[Size]],
    actual: Mapping[str, Sequence[int]],
    rules: Sequence[str] = (),
    dims: Mapping[str, Dim] | None = None,
) -> dict[str, int]:
    """Finds the dims' sizes in actual input shapes and checks each of them.

    Args:
        shapes: The declared shape of each input by its name.
        actual: The actual shape of each input by its name.
        rules: The rules that the sizes have to keep.
        dims: The dims by name. They are needed for dims that occur only inside expressions.

    Returns:
        The size of each dim by its name.

    Raises:
        InputError: A rank is wrong, a size is outside its dim, two inputs disagree, or a rule is
            broken.
    """
    sizes: dict[str, int] = {}
    seen: dict[str, str] = {}
    later: list[tuple[str, DimExpr, int]] = []
    for name, shape in shapes.items():
        if name not in actual:
            raise InputError(f"{name}: this input is missing; given: {', '.join(actual)}")
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
            elif isinstance(declared, DimExpr):
                later.append((where, declared, size))
            elif declared != size:
                raise InputError(f"{where}: size {size}, expected {declared}")
    for where, expr, size in later:
        for missing in sorted(expr.names - sizes.keys()):
            sizes[missing] = _solved(expr, missing, size, sizes, (dims or {}).get(missing), where)
        want = expr.value(sizes)
        if want != size:
            known = sizes_text({name: sizes[name] for name in sorted(expr.names)})
            raise InputError(f"{where}: size {size}, expected {expr} = {want} with {known}")
    check_rules(rules, sizes)
    return sizes


def _solved(
    expr: DimExpr, name: str, size: int, sizes: Mapping[str, int], dim: Dim | None, where: str
) -> int:
    """The first legal size of an unknown dim for which the expression equals `size`."""
    dim = dim or next((d for d in expr.dims if d.name == name), None)
    if dim is None or not expr.names <= {*sizes, name}:
        raise InputError(f"{where}: {expr}: can't compute {name} from the inputs' shapes")
    for n in range(dim.min, dim.max + 1, dim.multiple_of):
        if expr.value({**sizes, name: n}) == size:
            return n
    raise InputError(f"{where}: size {size} does not equal {expr} for any {dim}")
