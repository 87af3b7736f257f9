"""What it is worth that a guard holds at the sizes where it was evaluated: a proof, or a sample.

`pipeline.probe.evaluate` evaluates a guard at all legal sizes of its dims where these are few
enough, else at many of them. Most guards are comparisons of sums, products, ``//`` and ``%`` by
numbers. Along each symbol such an expression repeats but for a constant amount: with period P,
f(n + P) - f(n) is the same for all n of one residue, so that over one residue class it grows in
equal steps, up or down. What is so compared holds for all sizes if it holds for every residue at
both ends of every symbol's range.
"""

from __future__ import annotations

import ast
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from pipeline.export.guards import in_dims, recorded
from pipeline.probe.evaluate import result_of, symbols_in, where_kept
from pipeline.probe.grid import complete, size_grid
from pipeline.spec.dims import Dim
from pipeline.spec.tensors import Input

if TYPE_CHECKING:
    import torch

_MOST = 1 << 21  # combinations that are evaluated for one proof
_COMPARED = {"Eq": ast.Eq, "Ne": ast.NotEq}


def proved(guard: str, values: Mapping[str, range]) -> bool:
    """True if a guard is shown to hold for all values of its symbols.

    Args:
        guard: its text, as torch prints it.
        values: all values of each of its symbols, in equal steps.

    Every combination is evaluated where there are few enough; otherwise those of a full period
    at both ends of each range. False says nothing: the guard may be broken, or of another form.
    """
    if math.prod(map(len, values.values())) <= _MOST:
        return _hold(guard, [list(v) for v in values.values()], list(values))
    try:
        parts = _conjuncts(ast.parse(guard, mode="eval").body)
        return all(_part_proved(part, values) for part in parts)
    except (SyntaxError, ValueError, _OtherForm):
        return False


def evidence(total: int, evaluated: int, names: Sequence[str], *, is_proved: bool) -> str:
    """In words what a guard that held at all evaluated sizes stands on.

    Args:
        total: how many combinations of sizes are legal.
        evaluated: at how many of them the guard was evaluated.
        names: of the dims.
        is_proved: what `proved` says.
    """
    what = " and ".join(names)
    if evaluated >= total:
        return f"proved: it holds at all {total} sizes of {what}"
    if is_proved:
        return f"proved: it holds over a full period at both ends of the range of {what}"
    return f"holds at all {evaluated} sizes of {what} that were evaluated, of {total}"


def unproved(
    program: torch.export.ExportedProgram, inputs: Sequence[Input], rules: Sequence[str] = ()
) -> list[str]:
    """The guards of a program that hold wherever they were evaluated, and are not proved to hold
    at every declared size; one line each.

    Args:
        program, inputs, rules: see `pipeline.export.guards.broken_guards`.
    """
    symbols, guards = recorded(program, inputs)
    every = {dim.name: dim for i in inputs for dim in i.dims}
    lines = []
    for text in dict.fromkeys(guards):
        used = {name: symbols[name] for name in symbols_in(text) if name in symbols}
        dims = tuple(d for n, d in every.items() if any(n in s.names for s in used.values()))
        total = math.prod(len(range(d.min, d.max + 1, d.multiple_of)) for d in dims)
        evaluated = len(size_grid(dims, tuple(rules))) if dims else 0
        if not dims or complete(dims):
            continue
        columns = dict(zip((d.name for d in dims), size_grid(dims, tuple(rules)).T, strict=True))
        kept = where_kept(text, {name: s.at(columns) for name, s in used.items()})
        if kept is None or not kept.all():  # broken somewhere: it was tried out, or is a rule
            continue
        plain = all(isinstance(symbol.size, Dim) for symbol in used.values())
        values = {
            name: range(d.min // s.step, d.max // s.step + 1, max(d.multiple_of // s.step, 1))
            for name, s in used.items()
            for d in [every[next(iter(s.names))]]
        }
        if plain and proved(text, values):
            continue
        names = [dim.name for dim in dims]
        lines.append(
            f"{in_dims(text, symbols)}: {evidence(total, evaluated, names, is_proved=False)}"
        )
    return lines


class _OtherForm(Exception):
    """An expression that does not repeat, or is not known to."""


def _conjuncts(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd):
        return [*_conjuncts(node.left), *_conjuncts(node.right)]
    if isinstance(node, ast.Call) and _name(node) == "And":
        return [part for arg in node.args for part in _conjuncts(arg)]
    return [node]


def _name(node: ast.Call) -> str:
    return node.func.id if isinstance(node.func, ast.Name) else ""


def _part_proved(part: ast.expr, values: Mapping[str, range]) -> bool:
    """One comparison: at both ends it must hold, and for ``Ne`` on one side of zero."""
    sign = _comparison(part)
    left, right = (part.left, part.comparators[0]) if isinstance(part, ast.Compare) else (
        part.args[0], part.args[1],  # type: ignore[attr-defined]
    )  # fmt: skip
    difference = ast.BinOp(left, ast.Sub(), right)
    periods = _periods(difference)
    ends = []
    for name, every in values.items():
        # the values come in steps: as many of them as make up the period
        count = math.lcm(periods.get(name, 1), every.step) // every.step
        if len(every) <= 2 * count:
            ends.append(list(every))
        else:
            ends.append([*every[:count], *every[len(every) - count :]])
    if math.prod(map(len, ends)) > _MOST:
        return False
    if not _hold(ast.unparse(part), ends, list(values)):
        return False
    if sign is not ast.NotEq:
        return True
    text = ast.unparse(difference)
    return _hold(f"({text}) > 0", ends, list(values)) or _hold(f"({text}) < 0", ends, list(values))


def _comparison(node: ast.expr) -> type[ast.cmpop]:
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        return type(node.ops[0])
    if isinstance(node, ast.Call) and _name(node) in _COMPARED and len(node.args) == 2:
        return _COMPARED[_name(node)]
    raise _OtherForm


def _hold(guard: str, values: Sequence[Sequence[int]], names: Sequence[str]) -> bool:
    grids = list(np.meshgrid(*(np.array(v, dtype=np.int64) for v in values), indexing="ij"))
    largest = math.prod(max(map(abs, (v[0], v[-1]))) + 1 for v in values)
    if largest > 1 << 25:  # a square of the product might leave int64
        grids = [grid.astype(np.object_) for grid in grids]
    result = result_of(guard, {n: g.ravel() for n, g in zip(names, grids, strict=True)})
    return result is not None and bool(np.all(np.asarray(result, bool)))


def _periods(node: ast.expr) -> dict[str, int]:
    """The period by symbol of an expression that is of degree one in each symbol.

    Raises:
        _OtherForm: it is not made of sums, products of different symbols, and ``//`` and ``%`` by
            positive numbers.
    """
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return {}
    if isinstance(node, ast.Name):
        return {node.id: 1}
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return _periods(node.operand)
    if isinstance(node, ast.BinOp):
        return _joined(type(node.op), node.left, node.right)
    if isinstance(node, ast.Call) and len(node.args) == 2:
        kind = {"FloorDiv": ast.FloorDiv, "Mod": ast.Mod, "PythonMod": ast.Mod}.get(_name(node))
        if kind is not None:
            return _joined(kind, *node.args)
    raise _OtherForm


def _joined(kind: type[ast.operator], left: ast.expr, right: ast.expr) -> dict[str, int]:
    a, b = _periods(left), _periods(right)
    if kind in (ast.FloorDiv, ast.Mod):
        divisor = right.value if isinstance(right, ast.Constant) else 0
        if type(divisor) is not int or divisor < 1:
            raise _OtherForm
        return {name: period * divisor for name, period in a.items()}
    if kind is ast.Mult and a.keys() & b.keys():
        raise _OtherForm
    if kind not in (ast.Add, ast.Sub, ast.Mult):
        raise _OtherForm
    return {n: math.lcm(a.get(n, 1), b.get(n, 1)) for n in itertools.chain(a, b)}
