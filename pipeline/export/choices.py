"""What a model's code asks about its sizes while it is traced, and branches behind other branches.

torch.export follows one side of each branch. If the other side gives the same result, the program
may serve both. But on that other side the model may have one more branch, on another dim::

    if h == 64:
        if 110 < w < 150: ...

torch has not seen that one, and left no guard for it. So the model is traced once more on the other
side, and what it asks there is tried too.
"""

from __future__ import annotations

import linecache
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from pipeline.probe.evaluate import symbols_in, where_holds
from pipeline.probe.grid import size_grid, spread
from pipeline.spec.dims import Dim, kept_rules

_TORCH = torch.__file__  # has SymBool
_LAYERS = str(Path(_TORCH).parent / "nn") + os.sep
_ROWS = 1 << 14  # most sets of sizes from which the next is chosen
_PAIRS = 200  # most sets of sizes that are tried for two choices at once
_ELEMENTS = 1 << 21  # most input elements of a comparison on the other side of a choice

Sizes = dict[str, int]
Line = tuple[str, int]  # a file and a line's number


class Asked(NamedTuple):
    """A condition on symbolic sizes that the model's code evaluated.

    Args:
        condition: the condition, in torch's symbols.
        held: the condition or its opposite, whichever was true.
        line: the model's line, as ``file:line in function: code``.
    """

    condition: str
    held: str
    line: str


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
        dims = self.guard.dims
        kept = where_holds(self.guard.formula, {d.name: columns[d.name] for d in dims})
        return np.zeros(len(columns[dims[0].name]), bool) if kept is None else kept


_heard: ContextVar[list[Asked] | None] = ContextVar("_heard", default=None)
_users: list[object] = []
_nodes: Any = SymNode
_bool: Callable[[Any], bool] = SymNode.bool_


@contextmanager
def listening() -> Iterator[list[Asked]]:
    """Records what the code of a model, or of a layer of torch.nn, asks about symbolic sizes.

    Conditions that torch's ops evaluate are left out: they choose ways to the same result.
    """
    heard: list[Asked] = []
    token = _heard.set(heard)
    _users.append(heard)
    _nodes.bool_ = _listening
    try:
        yield heard
    finally:
        _users.remove(heard)
        if not _users:
            _nodes.bool_ = _bool
        _heard.reset(token)


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
    """

    dims: tuple[Dim, ...]
    rules: tuple[str, ...]
    choices_at: Callable[[Sizes], list[Choice] | None]
    lines_at: Callable[[Sizes], set[Line]]
    differs_at: Callable[[Sizes], bool]
    elements: Callable[[Sizes], int]
    budget: int

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
                if choice.condition not in known:
                    known.add(choice.condition)
                    queue.append(_Side(path, index, origin or choice, at))

        add(choices, sizes)
        lines = self.lines_at(sizes) if queue else set()
        traces = pairs = 0
        while queue:
            side = queue.pop(0)
            rows = self.rows_of(side.taken(), side.sizes)
            if any(map(self.differs_at, rows)):
                return side.origin
            if not rows:
                continue
            more = self.lines_at(rows[0]) - lines
            lines |= more
            # what the model chooses after it: a trace tells, otherwise the program's own choices
            path, start, first = side.path, [(side.choice, False)], side.index + 1
            if more or traces < self.budget:
                traces += not more
                beyond = self.choices_at(rows[0])
                if beyond is None:
                    return side.origin
                add(beyond, rows[0], side.origin)
                path, start = beyond, []
                turned = [choice.condition == side.choice.condition for choice in path]
                first = turned.index(True) + 1 if True in turned else 0
            for index in range(first, len(path)):
                before = [] if start else [(choice, True) for choice in path[:index]]
                both = self.rows_of([*start, *before, (path[index], False)], rows[0])[-1:]
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
        rows = []
        for row in other[spread(len(other), 64)].tolist():
            changed = {**near, **dict(zip((d.name for d in own), row, strict=True))}
            rows += [changed, *self._with_equal(changed, own)]
        found = self._kept(rows, wanted)
        if not found:
            every = size_grid(self.dims, self.rules)
            every = every[~choice.holds(_columns(self.dims, every))]
            every = every[spread(len(every), _ROWS)]
            names = [dim.name for dim in self.dims]
            rows = [dict(zip(names, row, strict=True)) for row in every.tolist()]
            found = self._kept(rows, wanted)
        found.sort(key=self.elements)
        small = [row for row in found if self.elements(row) <= _ELEMENTS] or found[:1]
        chosen = {0, len(small) // 3, 2 * len(small) // 3, len(small) - 1}
        return [small[k] for k in sorted(chosen)] if small else []

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

    A condition on a tensor's values is left out.

    Args:
        asked: from `listening`.
        symbols: torch's symbols of the inputs' sizes.
        dims: the dims of the inputs.
        rules: the rules on sizes.
    """
    found = []
    for condition, held, line in dict.fromkeys(asked):
        used = symbols_in(held)
        if not used or not used <= symbols.keys():
            continue
        names = {name for symbol in used for name in symbols[symbol].names}
        own = tuple(dim for dim in dims if dim.name in names)
        formula = as_formula(held, symbols)
        grid = size_grid(own, tuple(rules))
        kept = where_holds(formula, _columns(own, grid)) if len(grid) else None
        if kept is not None and not kept.all():
            guard = Broken(held, in_dims(held, symbols), own, grid[~kept], formula, line)
            found.append(Choice(as_formula(condition, symbols), guard))
    return found


def _columns(dims: Sequence[Dim], rows: np.ndarray) -> dict[str, np.ndarray]:
    return dict(zip((dim.name for dim in dims), rows.T, strict=True))


def _legal(dim: Dim) -> range:
    return range(dim.min, dim.max + 1, dim.multiple_of)
