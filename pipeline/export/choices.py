"""What a model's code asks about its sizes while it is traced, and branches behind other branches.

torch.export follows one side of each branch. If the other side gives the same result, the program
may serve both. But on that other side the model may have one more branch, on another dim::

    if h == 64:
        if 110 < w < 150: ...

torch has not seen that one, and left no guard for it. So the model is traced once more on the other
side, and what it asks there is tried too. So are the guards of torch's ops there, since a model may
catch the error of an op.
"""

from __future__ import annotations

import linecache
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import sympy
import torch
from torch.fx.experimental.sym_node import SymNode

from pipeline.export.guards import Broken, Symbol, as_formula, in_dims
from pipeline.probe.code_files import is_framework
from pipeline.probe.evaluate import holds, symbols_in, where_holds
from pipeline.probe.grid import size_grid, spread
from pipeline.spec.dims import Dim, kept_rules

_TORCH = torch.__file__  # has SymBool
_LAYERS = str(Path(_TORCH).parent / "nn") + os.sep
_READ = 1 << 12  # most sizes at which a condition is evaluated one by one
_PAIRS = 200  # most sets of sizes that are tried for two choices at once
_ELEMENTS = 1 << 21  # most input elements of a comparison on the other side of a choice

Sizes = dict[str, int]
Line = tuple[str, int]  # a file and a line's number


class Asked(NamedTuple):
    """A condition on symbolic sizes that was evaluated, or a size that became a number.

    Args:
        condition: the condition, in torch's symbols.
        held: the condition or its opposite, whichever was true.
        line: the model's line, as ``file:line in function: code``.
        fixed: True if it is not a condition, but ``size == number`` for a number made of a size.
    """

    condition: str
    held: str
    line: str = ""
    fixed: bool = False


@dataclass(frozen=True)
class Choice:
    """A side of a branch that the model took, and that not all declared sizes take.

    Args:
        condition: the branch's condition in the dims.
        guard: the side that was taken, as a guard with the sizes that take the other side.
    """

    condition: str
    guard: Broken

    def holds(self, columns: Mapping[str, np.ndarray]) -> np.ndarray:
        """Where the model takes this side, at these sizes of the dims."""
        own = {dim.name: columns[dim.name] for dim in self.guard.dims}
        held: np.ndarray = _each_holds(self.guard.formula, own) == 1
        return held


def _each_holds(formula: str, columns: Mapping[str, np.ndarray]) -> np.ndarray:
    """1 where a condition holds, 0 where not, and -1 where it can't be evaluated.

    A division by zero, say, may be behind another condition.
    """
    kept = where_holds(formula, columns)
    if kept is not None:
        return kept.astype(np.int8)
    rows = zip(*(column.tolist() for column in columns.values()), strict=True)
    found = [holds(formula, dict(zip(columns, row, strict=True))) for row in rows]
    return np.array([-1 if one is None else int(one) for one in found], np.int8)


_heard: ContextVar[list[Asked] | None] = ContextVar("_heard", default=None)
_users: list[object] = []
_nodes: Any = SymNode
_torchs: dict[str, Callable[..., Any]] = {
    name: getattr(SymNode, name) for name in ("bool_", "guard_int", "guard_float")
}


@contextmanager
def listening() -> Iterator[list[Asked]]:
    """Records what the code of a model, or of a layer of torch.nn, asks about symbolic sizes.

    Conditions that torch's ops evaluate are left out: they choose ways to the same result, or fail.
    """
    heard: list[Asked] = []
    token = _heard.set(heard)
    _users.append(heard)
    _nodes.bool_, _nodes.guard_int, _nodes.guard_float = _bool, _int, _float
    try:
        yield heard
    finally:
        _users.remove(heard)
        if not _users:
            for name, own in _torchs.items():
                setattr(_nodes, name, own)
        _heard.reset(token)


def _bool(node: Any) -> bool:
    """`SymNode.bool_`, which Python's ``if`` calls; torch's ops in C++ call another method."""
    result: bool = _torchs["bool_"](node)
    heard = _heard.get()
    if heard is not None:
        asking = frame = _outside(sys._getframe(1), _TORCH)
        frame = _outside(frame, _LAYERS)
        if frame is not None and (frame is not asking or _is_of_model(frame)):
            held = node._expr if result else sympy.Not(node._expr)
            heard.append(Asked(str(node._expr), str(held), _line_of(frame)))
    return result


def _int(node: Any, file: str, line: int) -> int:
    """`SymNode.guard_int`, which makes a number of a size, for Python and for torch's ops."""
    _hear_number(node)
    return int(_torchs["guard_int"](node, file, line))


def _float(node: Any, file: str, line: int) -> float:
    """`SymNode.guard_float`."""
    _hear_number(node)
    return float(_torchs["guard_float"](node, file, line))


def _hear_number(node: Any) -> None:
    heard = _heard.get()
    if heard is not None and not node.expr.is_number:
        text = f"Eq({node.expr}, {node.hint})"
        heard.append(Asked(text, text, fixed=True))


def _outside(frame: FrameType | None, place: str) -> FrameType | None:
    """The first caller whose file is not in a place."""
    while frame is not None and frame.f_code.co_filename.startswith(place):
        frame = frame.f_back
    return frame


def lines_of(call: Callable[[], object]) -> set[Line]:
    """The lines of a model's code that run in a call."""
    found: set[Line] = set()

    def line(frame: FrameType, event: str, _: object) -> Any:
        if event == "line":
            found.add((frame.f_code.co_filename, frame.f_lineno))
        return line

    before = sys.gettrace()
    sys.settrace(lambda frame, event, argument: line if _is_of_model(frame) else None)  # noqa: ARG005
    try:
        call()
    finally:
        sys.settrace(before)
    return found


def _listening(node: Any) -> bool:
    """`SymNode.bool_`, which Python's ``if`` calls; torch's ops in C++ call another method."""
    result = _bool(node)
    heard = _heard.get()
    if heard is not None:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename == _TORCH:
            frame = frame.f_back
        asking = frame
        while frame is not None and frame.f_code.co_filename.startswith(_LAYERS):
            frame = frame.f_back
        if frame is not None and (frame is not asking or _is_of_model(frame)):
            expr = node._expr
            held = expr if result else sympy.Not(expr)
            heard.append(Asked(str(expr), str(held), _line_of(frame)))
    return result


def _is_of_model(frame: FrameType) -> bool:
    return not is_framework(frame.f_code.co_filename)


def _line_of(frame: FrameType) -> str:
    code = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}: {code}"


@dataclass(frozen=True)
class _Side:
    """The other side of a choice.

    Args:
        path: the choices that the model makes at `sizes`.
        index: the choice's index in them.
        origin: the choice of the exported program behind whose other side it is.
        sizes: sizes at which the model makes the choice.
    """

    path: Sequence[Choice]
    index: int
    origin: Choice
    sizes: Sizes

    @property
    def choice(self) -> Choice:
        return self.path[self.index]

    def taken(self) -> list[tuple[Choice, bool]]:
        """The choices up to this one, each with whether it holds on the other side of this one."""
        return [*((choice, True) for choice in self.path[: self.index]), (self.choice, False)]


@dataclass(frozen=True)
class SideSearch:
    """Looks for branches of a model that its exported program does not know.

    Args:
        dims: the dims of the inputs.
        rules: the rules on sizes.
        choices_at: traces the model at sizes, and returns its choices there; None if torch can't.
        lines_at: the lines of the model's code that run at sizes.
        differs_at: whether the program's outputs differ from the model's at sizes.
        elements: the number of elements of the inputs at sizes.
        budget: the number of traces besides those for lines that did not run before.
        known: the formulas of guards that were tried before.
    """

    dims: tuple[Dim, ...]
    rules: tuple[str, ...]
    choices_at: Callable[[Sizes], list[Choice] | None]
    lines_at: Callable[[Sizes], set[Line]]
    differs_at: Callable[[Sizes], bool]
    elements: Callable[[Sizes], int]
    budget: int
    known: Set[str] = frozenset()

    def first_hidden(self, choices: Sequence[Choice], sizes: Sizes) -> Choice | None:
        """The first choice of a program that hides another result; None if there is none.

        Args:
            choices: the choices made while the program was exported.
            sizes: the sizes of that export.
        """
        known: set[str] = set()
        queue: list[_Side] = []

        def add(path: Sequence[Choice], at: Sizes, origin: Choice | None = None) -> None:
            for index, choice in enumerate(path):
                if not known & {choice.condition, choice.guard.formula}:
                    known.update((choice.condition, choice.guard.formula))
                    queue.append(_Side(path, index, origin or choice, at))

        add(choices, sizes)
        known |= self.known
        lines = self.lines_at(sizes) if queue else set()
        traces = pairs = 0
        while queue:
            side = queue.pop(0)
            rows = self.rows_of(side.taken(), side.sizes)
            if any(map(self.differs_at, rows)):
                return side.origin
            if not rows:
                continue
            # torch makes a number of a size of 1, and then asks nothing
            at = next((row for row in rows if min(row.values()) > 1), rows[0])
            more = self.lines_at(at) - lines
            lines |= more
            # what the model chooses after it: a trace tells, otherwise the program's own choices
            path, start, first = side.path, [(side.choice, False)], side.index + 1
            if more or traces < self.budget:
                traces += not more
                beyond = self.choices_at(at)
                if beyond is None:
                    return side.origin
                add(beyond, at, side.origin)
                path, start = beyond, []
                turned = [choice.condition == side.choice.condition for choice in path]
                first = turned.index(True) + 1 if True in turned else 0
            for index in range(first, len(path)):
                before = [] if start else [(choice, True) for choice in path[:index]]
                both = self.rows_of([*start, *before, (path[index], False)], at)[-1:]
                pairs += len(both)
                if pairs <= _PAIRS and any(map(self.differs_at, both)):
                    return side.origin
        return None

    def rows_of(self, wanted: Sequence[tuple[Choice, bool]], near: Sizes) -> list[Sizes]:
        """A few sets of sizes at which these choices hold or do not hold, the smallest first.

        Args:
            wanted: choices, and whether each has to hold; the last one does not at `near`.
            near: sizes from which as few as possible change.
        """
        choice, _ = wanted[-1]
        own, other = choice.guard.dims, choice.guard.sizes
        names = [dim.name for dim in own]
        chosen: list[Sizes] = []
        for n, base in enumerate((near, *self._others(near))):
            rows = []
            for row in other[spread(len(other), 64)].tolist():
                changed = {**base, **dict(zip(names, row, strict=True))}
                rows += [changed, *(self._with_equal(changed, own) if n == 0 else ())]
            found = self._affordable(self._kept(rows, wanted))
            part = (0, len(found) // 2, len(found) - 1) if n == 0 else (n * len(found) // 5,)
            chosen += [found[k] for k in part] if found else []
        if not chosen:
            every = size_grid(self.dims, self.rules)
            columns = _columns(self.dims, every)
            for other_choice, held in wanted:
                every = every[other_choice.holds(columns) == held]
                columns = _columns(self.dims, every)
            every = every[spread(len(every), 64)]
            rows = [dict(zip(columns, row, strict=True)) for row in every.tolist()]
            chosen = self._affordable(rows)[:: max(1, len(rows) // 4)]
        unique = {tuple(row[d.name] for d in self.dims): row for row in chosen}
        return sorted(unique.values(), key=self.elements)

    def _affordable(self, rows: list[Sizes]) -> list[Sizes]:
        """Those of few elements, the smallest first, or the smallest of all."""
        rows = sorted(rows, key=self.elements)
        return [row for row in rows if self.elements(row) <= _ELEMENTS] or rows[:1]

    def _others(self, near: Sizes) -> list[Sizes]:
        """Sizes that differ from these in every dim: the next ones, the opts, two at the top."""
        following = {d.name: min(near[d.name] + d.multiple_of, d.max) for d in self.dims}
        largest = {d.name: d.max for d in self.dims}
        below = {d.name: max(d.max - d.multiple_of, d.min) for d in self.dims}
        return [following, {d.name: d.opt for d in self.dims}, below, largest]

    def _with_equal(self, sizes: Sizes, changed: Sequence[Dim]) -> Iterator[Sizes]:
        """The sizes with other dims made equal to one that changed: the model may need that."""
        for size in {sizes[dim.name] for dim in changed}:
            fit = [d for d in self.dims if d not in changed and size in _legal(d)]
            for dims in [fit, *([d] for d in fit)] if len(fit) > 1 else [fit]:
                yield {**sizes, **dict.fromkeys((d.name for d in dims), size)}

    def _kept(self, rows: Sequence[Sizes], wanted: Sequence[tuple[Choice, bool]]) -> list[Sizes]:
        """Those of the sizes at which the choices are as wanted, each once."""
        rows = list({tuple(row[d.name] for d in self.dims): row for row in rows}.values())
        rows = [row for row in rows if kept_rules(self.rules, row)]
        if not rows:
            return []
        columns = {d.name: np.array([row[d.name] for row in rows]) for d in self.dims}
        good = np.ones(len(rows), bool)
        for choice, held in wanted:
            good &= choice.holds(columns) == held
        return [row for row, kept in zip(rows, good, strict=True) if kept]


def choices(
    asked: Sequence[Asked],
    symbols: Mapping[str, Symbol],
    dims: Sequence[Dim],
    rules: Sequence[str],
) -> list[Choice]:
    """The choices in what was asked.

    Left out are conditions on a tensor's values, and those that can't be evaluated at any size.

    Args:
        asked: from `listening`.
        symbols: torch's symbols of the inputs' sizes.
        dims: the dims of the inputs.
        rules: the rules on sizes.
    """
    found = []
    for condition, held, line, _ in dict.fromkeys(asked):
        used = symbols_in(held)
        if not used or not used <= symbols.keys():
            continue
        names = {name for symbol in used for name in symbols[symbol].names}
        own = tuple(dim for dim in dims if dim.name in names)
        formula = as_formula(held, symbols)
        grid = size_grid(own, tuple(rules))
        kept = where_holds(formula, _columns(own, grid)) if len(grid) else None
        if kept is None and len(grid):
            grid = grid[spread(len(grid), _READ)]
            kept = _each_holds(formula, _columns(own, grid)) != 0
        other = grid[~kept] if kept is not None else grid
        if len(other):
            guard = Broken(held, in_dims(held, symbols), own, other, formula, line)
            found.append(Choice(as_formula(condition, symbols), guard))
    return found


def _columns(dims: Sequence[Dim], rows: np.ndarray) -> dict[str, np.ndarray]:
    return dict(zip((dim.name for dim in dims), rows.T, strict=True))


def _legal(dim: Dim) -> range:
    return range(dim.min, dim.max + 1, dim.multiple_of)
