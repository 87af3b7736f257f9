"""The choices that a model makes by its sizes, and branches behind other branches.

torch.export follows one side of each branch. If the other side gives the same result, the program
may serve both. But on that other side the model may have one more branch, on another dim::

    if h == 64:
        if 110 < w < 150: ...

torch has not seen that one, and left no guard for it. So the model is traced once more on the other
side, and what it asks there is tried too. So are the guards of torch's ops there, since a model may
catch the error of an op.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch.utils._sympy.value_ranges import ValueRanges

from pipeline.export.asked import Asked, Instruction
from pipeline.export.guards import Broken, Symbol, as_formula, in_dims
from pipeline.probe.evaluate import holds, result_of, symbols_in, where_holds
from pipeline.probe.grid import MOST_SIZES, size_grid, spread
from pipeline.spec.dims import Dim, kept_rules

_READ = 1 << 12  # most sizes at which a condition is evaluated one by one
PAIRS = 200  # see `SideSearch.pairs`
_ELEMENTS = 1 << 21  # most input elements of a comparison on the other side of a choice
_TOGETHER = 4  # fewer sets of sizes are evaluated one by one
_COSTLY = 10  # as many times the affordable elements may all sets of sizes for two choices have
_AGAIN = 4  # most sides that are traced because of code that ran on another side too
_VALUES = 32  # most values of a number that a model makes of a size

Sizes = dict[str, int]


@dataclass(frozen=True)
class Choice:
    """A side of a branch that the model took, and that not all declared sizes take.

    Args:
        condition: the branch's condition in the dims.
        guard: the side that was taken, as a guard with the sizes that take the other side.
        unseen: True if more may be asked on the other side though no other code of the model runs
            there, so that it is always traced. Either torch concluded the condition for all that
            follows, and its ops leave no guards that follow from it. Or see `Asked.inside`.
    """

    condition: str
    guard: Broken
    unseen: bool = False

    def holds(self, columns: Mapping[str, np.ndarray]) -> np.ndarray:
        """Where the model takes this side, at these sizes of the dims."""
        own = {dim.name: columns[dim.name] for dim in self.guard.dims}
        held: np.ndarray = _each_holds(self.guard.formula, own) == 1
        return held

    def fails(self, columns: Mapping[str, np.ndarray]) -> np.ndarray:
        """Where the model takes the other side. Elsewhere the condition may be unknown."""
        own = {dim.name: columns[dim.name] for dim in self.guard.dims}
        failed: np.ndarray = _each_holds(self.guard.formula, own) == 0
        return failed


@dataclass(frozen=True)
class Hidden:
    """A choice behind whose other side the model may have another result.

    Args:
        choice: the choice, of the exported program.
        untraced: True if torch can't trace the model on the other side, or if a condition there
            can't be evaluated; False if a result differs.
    """

    choice: Choice
    untraced: bool


def _each_holds(formula: str, columns: Mapping[str, np.ndarray]) -> np.ndarray:
    """1 where a condition holds, 0 where not, and -1 where it can't be evaluated.

    A division by zero, say, may be behind another condition.
    """
    kept = where_holds(formula, columns)
    if kept is not None:
        return kept.astype(np.int8)
    length = len(next(iter(columns.values())))
    if length > _TOGETHER:  # numpy evaluates the parts where it can
        halves = slice(length // 2), slice(length // 2, None)
        parts = ({name: column[half] for name, column in columns.items()} for half in halves)
        return np.concatenate([_each_holds(formula, part) for part in parts])
    rows = zip(*(column.tolist() for column in columns.values()), strict=True)
    found = [holds(formula, dict(zip(columns, row, strict=True))) for row in rows]
    return np.array([-1 if one is None else int(one) for one in found], np.int8)


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


class _Sides:
    """The sides that are still to be looked at, each once.

    Attributes:
        queue: the sides.
        known: the conditions and formulas of all choices so far.
    """

    def __init__(self) -> None:
        self.queue: list[_Side] = []
        self.known: set[str] = set()
        self._unseen: set[str] = set()  # those of them that were `Choice.unseen` at least once

    def add(self, path: Sequence[Choice], at: Sizes, origin: Choice | None = None) -> None:
        """Adds the sides of the choices that the model makes at some sizes."""
        unseen = {choice.condition for choice in path if choice.unseen} - self._unseen
        path = [replace(choice, unseen=choice.condition in unseen) for choice in path]
        for index, choice in enumerate(path):
            names = {choice.condition, choice.guard.formula}
            if not self.known & names or (choice.unseen and not self._unseen & names):
                self.known.update(names)
                self._unseen.update(names if choice.unseen else ())
                self.queue.append(_Side(path, index, origin or choice, at))


@dataclass(frozen=True)
class SideSearch:
    """Looks for branches of a model that its exported program does not know.

    Args:
        dims: the dims of the inputs.
        rules: the rules on sizes.
        choices_at: traces the model at sizes, and returns its choices there; None if they can't be
            known.
        instructions_at: the instructions of the model's code that run at sizes.
        differs_at: whether the program's outputs differ from the model's at sizes.
        elements: the number of elements of the inputs at sizes.
        budget: the number of traces besides those for code that did not run before.
        pairs: the number of sets of sizes that are tried for two choices at once.
        together: the number of input elements that several comparisons may have together.
        known: the formulas of guards that were tried before.
    """

    dims: tuple[Dim, ...]
    rules: tuple[str, ...]
    choices_at: Callable[[Sizes], list[Choice] | None]
    instructions_at: Callable[[Sizes], set[Instruction]]
    differs_at: Callable[[Sizes], bool]
    elements: Callable[[Sizes], int]
    budget: int
    pairs: int = PAIRS
    together: int = 2 * _ELEMENTS
    known: Set[str] = frozenset()

    def first_hidden(self, choices: Sequence[Choice], sizes: Sizes) -> Hidden | None:
        """The first choice of a program that hides another result; None if there is none.

        Args:
            choices: the choices made while the program was exported.
            sizes: the sizes of that export.
        """
        sides = _Sides()
        sides.add(choices, sizes)
        sides.known |= self.known
        first_run = self.instructions_at(sizes) if sides.queue else set()
        run_since: set[Instruction] = set()
        traces = again = pairs = spent = 0
        while sides.queue:
            side = sides.queue.pop(0)
            # earlier choices may exclude it (h is odd, then h == 44), and still not matter to it
            rows = self.rows_of(side.taken(), side.sizes)
            rows = rows or self.rows_of([(side.choice, False)], side.sizes)
            if any(map(self.differs_at, rows)):
                return Hidden(side.origin, untraced=False)
            if not rows:
                continue
            # torch makes a number of a size of 0 or 1, and then asks nothing
            at = min(rows, key=lambda row: sum(size < 2 for size in row.values()))
            other_run = self.instructions_at(at) - first_run
            more = other_run - run_since
            run_since |= more
            # what the model chooses after it: a trace tells, otherwise the program's own choices
            path, start, first = side.path, [(side.choice, False)], side.index + 1
            always = more or side.choice.unseen
            repeated = bool(other_run) and again < _AGAIN  # a loop, or another layer
            if always or repeated or traces < self.budget:
                again += repeated and not always
                traces += not always and not repeated
                beyond = self.choices_at(at)
                if beyond is None:
                    return Hidden(side.origin, untraced=True)
                sides.add(beyond, at, side.origin)
                path, start = beyond, []
                turned = [choice.condition == side.choice.condition for choice in path]
                first = turned.index(True) + 1 if True in turned else 0
            # those of the model's own lines first: the others are of torch's ops
            for index in sorted(range(first, len(path)), key=lambda k: not path[k].guard.line):
                most = self.pairs if path[index].guard.line else min(self.pairs, 16 * self.budget)
                if pairs >= most or spent > _COSTLY * self.together:
                    break
                before = start or [(choice, True) for choice in path[:index]]
                last = (path[index], False)
                both = self.rows_of([*before, last], at)
                both = both or self.rows_of([(side.choice, False), last], at)
                if not both:
                    continue
                share = _COSTLY * self.together // PAIRS
                cheap = [row for row in both if self.elements(row) <= share]
                sizes = cheap[-1] if cheap else both[0]
                pairs, spent = pairs + 1, spent + self.elements(sizes)
                if self.differs_at(sizes):
                    return Hidden(side.origin, untraced=False)
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
        most = min(_ELEMENTS, self.together // 2)
        return [row for row in rows if self.elements(row) <= most] or rows[:1]

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
) -> tuple[list[Choice], list[Asked]]:
    """The choices in what was asked, and the conditions that can't be evaluated at any size.

    Conditions on a tensor's values are left out.

    Args:
        asked: from `listening`.
        symbols: torch's symbols of the inputs' sizes.
        dims: the dims of the inputs.
        rules: the rules on sizes.
    """
    found, unknown = [], []
    for one in dict.fromkeys(asked):
        used = symbols_in(one.held)
        if not used or not used <= symbols.keys():
            continue
        names = {name for symbol in used for name in symbols[symbol].names}
        own = tuple(dim for dim in dims if dim.name in names)
        formula = as_formula(one.held, symbols)
        grid = size_grid(own, tuple(rules))
        kept = where_holds(formula, _columns(own, grid)) if len(grid) else None
        if kept is None and len(grid):
            grid = grid[spread(len(grid), _READ)]
            held = _each_holds(formula, _columns(own, grid))
            if (held < 0).all():
                unknown.append(one)
            kept = held != 0
        other = grid[~kept] if kept is not None else grid
        if len(other):
            guard = Broken(one.held, in_dims(one.held, symbols), own, other, formula, one.line)
            found.append(Choice(as_formula(one.condition, symbols), guard, one.inside))
    return found, unknown


def range_choices(
    spans: Mapping[str, ValueRanges[Any]],
    symbols: Mapping[str, Symbol],
    dims: Sequence[Dim],
    rules: Sequence[str],
) -> list[Choice]:
    """The choices that are ranges of sizes, as torch concluded them.

    Args:
        spans: the range of each symbol.
        symbols, dims, rules: see `choices`.
    """
    asked = []
    for symbol, span in spans.items():
        least, above = f"{symbol} >= {span.lower}", f"{symbol} >= {span.upper + 1}"
        if span.lower < span.upper:  # otherwise a condition says that they are equal
            asked.append(Asked(above, f"Not({above})"))
            asked += [Asked(least, least)] if span.lower > 2 else []  # see `small_choices`
    found, _ = choices(asked, symbols, dims, rules)
    return [replace(choice, unseen=True) for choice in found]


def small_choices(
    symbols: Mapping[str, Symbol], dims: Sequence[Dim], rules: Sequence[str]
) -> list[Choice]:
    """The choices of no size of 0 and of 1.

    torch takes for granted that a size is at least 2. So its ops decide without a guard what
    depends on a size of 1, and at 0 nothing is heard: ``past == 0`` is False at once.

    Args:
        symbols, dims, rules: see `choices`.
    """
    zeros, _ = choices([Asked(f"{s} >= 1", f"{s} >= 1") for s in symbols], symbols, dims, rules)
    ones, _ = choices([Asked(f"Eq({s}, 1)", f"Ne({s}, 1)") for s in symbols], symbols, dims, rules)
    return [*(replace(choice, unseen=True) for choice in zeros), *ones]


def number_choices(
    number: Asked,
    before: Sequence[Choice],
    symbols: Mapping[str, Symbol],
    dims: Sequence[Dim],
    rules: Sequence[str],
) -> list[Choice] | None:
    """A choice for each other value of a number that the model makes of a size.

    The model may do anything with a number, and torch does not see it. So each value counts as a
    side of a branch.

    Args:
        number: from `listening`.
        before: the choices that were made before it. It has other values only where they hold.
        symbols, dims, rules: see `choices`.

    Returns:
        The choices; None if the number has too many values, or if they can't be found.
    """
    used = symbols_in(number.held)
    if not used <= symbols.keys():
        return []
    names = {name for symbol in used for name in symbols[symbol].names}
    own = tuple(dim for dim in dims if dim.name in names)
    rows = _rows_where(own, before, rules)
    if rows is None:
        return None
    # Python's numbers are exact where int64 overflows
    values = result_of(as_formula(number.condition, symbols), _columns(own, rows.astype(object)))
    if values is None:
        return None
    values = np.broadcast_to(values, len(rows))
    others = sorted({*values.tolist()} - {number.number})
    if len(others) >= _VALUES:
        return None
    found = []
    for value in others:
        held = f"Ne({number.condition}, {value})"
        formula = as_formula(held, symbols)
        guard = Broken(held, in_dims(held, symbols), own, rows[values == value], formula)
        found.append(Choice(formula, guard))
    return found


def _rows_where(
    dims: tuple[Dim, ...], held: Sequence[Choice], rules: Sequence[str]
) -> np.ndarray | None:
    """All sizes of some dims that keep the rules and these choices; None if there are many.

    Choices that have other dims too are left out.
    """
    every = []
    for dim in dims:
        sizes = np.array(_legal(dim))[: MOST_SIZES + 1]
        for choice in held:
            if choice.guard.dims == (dim,):
                sizes = sizes[~choice.fails({dim.name: sizes})]
        every.append(sizes)
    if math.prod(map(len, every)) > _READ or max(map(len, every)) > MOST_SIZES:
        return None
    rows = np.stack([axis.ravel() for axis in np.meshgrid(*every)], axis=1)
    for choice in held:
        if set(choice.guard.dims) <= set(dims):
            rows = rows[~choice.fails(_columns(dims, rows))]
    for rule in rules:
        kept = result_of(rule, _columns(dims, rows))  # None for a rule on other dims
        rows = rows if kept is None else rows[kept]
    found: np.ndarray = rows[np.argsort(rows.prod(axis=1), kind="stable")]
    return found


def _columns(dims: Sequence[Dim], rows: np.ndarray) -> dict[str, np.ndarray]:
    return dict(zip((dim.name for dim in dims), rows.T, strict=True))


def _legal(dim: Dim) -> range:
    return range(dim.min, dim.max + 1, dim.multiple_of)
