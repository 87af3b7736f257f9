"""The named dims of a saved program, with the ranges of its export."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pipeline.errors import InputError
from pipeline.export.symbols import SymbolNames
from pipeline.source.program.guards import guard_rules
from pipeline.spec.dims import Dim, Size
from pipeline.spec.expressions import DimExpr

if TYPE_CHECKING:
    import torch

_ENDLESS = 1 << 31  # torch writes this or more if there is no largest size
_Axis = tuple[str, int, Any]  # input, axis, size


@dataclass(frozen=True)
class Axes:
    """The shape of every tensor input in terms of dims, and the rules on sizes."""

    shapes: Mapping[str, tuple[Size, ...]]
    rules: tuple[str, ...]


@dataclass
class _ProgramDim:
    """One of torch's symbols.

    Args:
        name: The name of its dim.
        step: The factor in ``dim = step*symbol + shift``.
        shift: The summand in that formula.
        low: The smallest size of the dim.
        high: The largest size of the dim; None if there is none.
        places: The axes that contain the symbol.
    """

    name: str
    step: int
    shift: int
    low: int
    high: int | None
    places: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The symbol in terms of the dim."""
        sign = "-" if self.shift > 0 else "+"
        top = f"({self.name} {sign} {abs(self.shift)})" if self.shift else self.name
        return top if self.step == 1 else f"{top}/{self.step}"


def named_axes(
    path: object, program: torch.export.ExportedProgram, given: Mapping[str, Dim]
) -> Axes:
    """Reads the dims of a program's inputs.

    Args:
        path: The file's path, for errors.
        program: The program.
        given: Ranges by dim name that replace the program's ranges, and lie inside of them.

    Raises:
        InputError: A dim has no largest size, or a dim in `given` does not exist or exceeds the
            program's range.
    """
    axes = _sizes(program)
    symbols = _symbols(program, axes)
    dims = _ranges(path, symbols, axes, given)
    names = SymbolNames({symbol: s.text for symbol, s in symbols.items()})
    texts = {(name, axis): names.size(size) for name, axis, size in axes if size is not None}
    rules = guard_rules(path, program, texts, dims)
    shapes: dict[str, tuple[Size, ...]] = {name: () for name, _, _ in axes}
    for (name, _), text in texts.items():
        shapes[name] += (_size(text, dims),)
    return Axes(shapes, rules)


def _size(text: int | str, dims: Mapping[str, Dim]) -> Size:
    if isinstance(text, int):
        return text
    if text in dims:
        return dims[text]
    return DimExpr(text, tuple(dims[name] for name in sorted(DimExpr(text).names)))


def _sizes(program: torch.export.ExportedProgram) -> list[_Axis]:
    """The size of every axis of every tensor input: a number or torch's expression.

    A scalar has one entry with axis -1 and size None.
    """
    import torch

    names = {s.arg.name for s in program.graph_signature.input_specs if s.kind.name == "USER_INPUT"}
    axes: list[_Axis] = []
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if node.op != "placeholder" or node.name not in names:
            continue
        if not isinstance(value, torch.Tensor):
            continue
        if not value.ndim:
            axes.append((node.name, -1, None))
        for axis, size in enumerate(value.shape):
            expr = size if isinstance(size, int) else size.node.expr
            number = isinstance(expr, int) or expr.is_number
            axes.append((node.name, axis, int(expr) if number else expr))
    return axes


def _symbols(
    program: torch.export.ExportedProgram, axes: Sequence[_Axis]
) -> dict[str, _ProgramDim]:
    """A dim for each symbol: an axis of that size, or of a multiple of it.

    If the symbol occurs only in sums with others, no axis has the size of its dim.
    """
    found: dict[str, _ProgramDim] = {}
    uses: dict[Any, list[_Axis]] = {}
    for name, axis, size in axes:
        for symbol in sorted(getattr(size, "free_symbols", ()), key=str):
            uses.setdefault(symbol, []).append((name, axis, size))
    for symbol, places in uses.items():
        whole = [(*_affine(size, symbol), name, axis) for name, axis, size in places]
        forms = sorted(
            (form for form in whole if form[0]), key=lambda form: (form[0], form[1] != 0)
        )
        name, axis, _ = places[0]
        step, shift, label = 1, 0, f"{name}_{axis}_part"
        if forms:
            step, shift, name, axis = forms[0]
            label = f"{name}_{axis}"
        label = _fresh(label, {s.name for s in found.values()})
        low, high = _span(program, symbol)
        if step > 1 or shift:
            low = 0 if low <= 2 else low  # torch's smallest size of a symbol that is not an axis
        for size in {
            size for *_, size in places
        }:  # an expression such as 2*s may have another range
            slope, rest = _affine(size, symbol)
            if not slope:
                continue
            least, most = _span(program, size)
            low = max(low, -((rest - least) // slope))
            if most is not None:
                most = (most - rest) // slope
                high = most if high is None else min(high, most)
        found[str(symbol)] = _ProgramDim(
            label,
            step,
            shift,
            step * low + shift,
            None if high is None else step * high + shift,
            [f"{name} axis {axis}" for name, axis, _ in places],
        )
    return found


def _fresh(name: str, taken: set[str]) -> str:
    """A legal, new name for a dim."""
    base = name if name[0].isalpha() else f"d{name}"
    number, new = 2, base
    while new in taken:
        number, new = number + 1, f"{base}_{number}"
    return new


def _affine(size: Any, symbol: Any) -> tuple[int, int]:
    """(a, b) if a size is ``a*symbol + b`` with a positive a; otherwise (0, 0)."""
    if getattr(size, "free_symbols", None) != {symbol}:
        return 0, 0
    rest = size.subs(symbol, 0)
    slope = (size - rest) / symbol
    if not (slope.is_Integer and rest.is_Integer and slope > 0):
        return 0, 0
    return int(slope), int(rest)


def _span(program: torch.export.ExportedProgram, expr: Any) -> tuple[int, int | None]:
    """The range that torch stores for a size; the upper end is None if there is none."""
    span = program.range_constraints.get(expr)
    if span is None:
        return 0, None
    return _number(span.lower) or 0, _number(span.upper)


def _number(end: Any) -> int | None:
    """One end of a range as a number; None for infinity."""
    try:
        number = int(end)
    except (TypeError, ValueError, OverflowError, AttributeError):
        return None
    return number if abs(number) < _ENDLESS else None


def _ranges(
    path: object,
    symbols: Mapping[str, _ProgramDim],
    axes: Sequence[_Axis],
    given: Mapping[str, Dim],
) -> dict[str, Dim]:
    known = {s.name: s for s in symbols.values()}
    for name in given:
        if name not in known:
            if known:
                raise InputError(f"{path}: no dim {name}; its dims: {_list(known)}")
            shapes: dict[str, list[str]] = {}
            for input_, _, size in axes:
                shapes.setdefault(input_, []).append(str(size))
            words = ", ".join(f"{n}:{'x'.join(shape)}" for n, shape in shapes.items())
            raise InputError(
                f"{path}: no dim {name}: the program was exported for fixed sizes only ({words})"
            )
    open_ = {name: s for name, s in known.items() if s.high is None and name not in given}
    if open_:
        asked = " ".join(f"--dim {name}={_start(s)}:MAX" for name, s in open_.items())
        raise InputError(f"{path}: dims without a largest size ({_list(open_)}). Pass {asked}")
    return {name: _dim(path, symbol, given.get(name)) for name, symbol in known.items()}


def _list(symbols: Mapping[str, _ProgramDim]) -> str:
    words = []
    for name, symbol in symbols.items():
        text = f"{name} is {', '.join(symbol.places)}"
        if symbol.step > 1:
            text += f", a multiple of {symbol.step}"
            text += f" and {symbol.shift % symbol.step}" if symbol.shift % symbol.step else ""
        if symbol.high is not None:
            text += f", {_least(symbol)}..{symbol.high}"
        words.append(text)
    return "; ".join(words)


def _start(symbol: _ProgramDim) -> str:
    """The smallest size and an opt, as text: ``1:8``."""
    low = _least(symbol)
    return f"{low}:{low + -(-max(8 - low, 0) // symbol.step) * symbol.step}"


def _least(symbol: _ProgramDim) -> int:
    """The smallest size of the dim above 0."""
    step = symbol.step
    return symbol.low if symbol.low > 0 else symbol.shift % step or step


def _dim(path: object, symbol: _ProgramDim, given: Dim | None) -> Dim:
    """The dim of a symbol, with the program's range or the given one."""
    step, offset = symbol.step, symbol.shift % symbol.step
    if given is None:
        assert symbol.high is not None
        if symbol.low <= 0:  # torch stores this if there is no smallest size
            return Dim(symbol.name, max=symbol.high, multiple_of=step, offset=offset)
        return Dim(symbol.name, symbol.low, max=symbol.high, multiple_of=step, offset=offset)
    if step > 1 and (given.multiple_of % step or given.offset % step != offset):
        kept = {w: getattr(given, w) for w in ("min", "opt") if w not in given.defaulted}
        given = Dim(
            given.name, **kept, max=given.max, multiple_of=step, offset=offset, auto=given.auto
        )
    # torch accepts 0 and 1, unless the smallest size of the export is above 2
    least = symbol.low if symbol.low > 2 * step + symbol.shift else min(symbol.low, 0)
    if given.min < least or (symbol.high is not None and given.max > symbol.high):
        most = " and more" if symbol.high is None else f"..{symbol.high}"
        raise InputError(
            f"{path}: --dim {given.name}: {given.min}..{given.max} is more than the program was "
            f"exported for: {max(least, 1)}{most}. Narrow the dim, or export for a larger range"
        )
    return replace(given)
