"""Guards of torch.export that some of the declared sizes break."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils._sympy.value_ranges import ValueRanges

from pipeline.export.negative_bases import module_of
from pipeline.export.symbols import exact
from pipeline.probe.eager import EagerModule, example_args, flat_tensors
from pipeline.probe.evaluate import SYMBOL_NAME, holds, result_of, symbols_in, where_holds
from pipeline.probe.grid import MOST_SIZES, complete, evidence, legal_sizes, size_grid
from pipeline.spec.closeness import Difference
from pipeline.spec.dims import Dim, DimExpr, Size, size_text
from pipeline.spec.tensors import Input, Tolerance


@dataclass(frozen=True)
class Broken:
    """A guard that some of the declared sizes break.

    Args:
        text: the guard, in torch's symbols.
        words: the guard, in the dims.
        dims: the dims in the guard.
        sizes: the sizes that break it, int [combinations, dims], in the order of `dims`; the
            combination with the fewest elements comes first.
        formula: the guard in the dims, as `pipeline.probe.evaluate` reads it; empty if it can't be
            evaluated. Then it counts as broken at every size.
        line: the model's line that made it, if that is known.
        too_large: whether the model has a number there that ONNX can't hold.
    """

    text: str
    words: str
    dims: tuple[Dim, ...]
    sizes: np.ndarray
    formula: str = ""
    line: str = ""
    too_large: bool = False


@dataclass(frozen=True)
class Symbol:
    """One of torch's symbols, as a declared size divided by a step.

    Args:
        size: the declared size where torch has the symbol.
        step: the divisor; the symbol's value is the size divided by it.
    """

    size: Size
    step: int = 1

    @property
    def names(self) -> frozenset[str]:
        return DimExpr(size_text(self.size)).names

    def at(self, columns: Mapping[str, np.ndarray]) -> np.ndarray:
        """The symbol's values at these sizes of the dims."""
        values: np.ndarray = result_of(size_text(self.size), columns)
        return values // self.step

    @property
    def formula(self) -> str:
        """The symbol in terms of the dims, as `pipeline.probe.evaluate` reads it."""
        text = f"({size_text(self.size)})"
        return text if self.step == 1 else f"FloorDiv({text}, {self.step})"

    def __str__(self) -> str:
        text = size_text(self.size)
        text = f"({text})" if isinstance(self.size, DimExpr) else text
        return text if self.step == 1 else f"({text}/{self.step})"


def broken_guards(
    program: torch.export.ExportedProgram, inputs: Sequence[Input], rules: Sequence[str] = ()
) -> list[Broken]:
    """The guards of a program that not all declared sizes keep, or that can't be evaluated.

    Args:
        program: what torch exported.
        inputs: its inputs as declared.
        rules: the rules on sizes; sizes that break one are ignored.
    """
    symbols, guards = recorded(program, inputs)
    return broken_by(guards, symbols, inputs, rules)


def broken_by(
    texts: Sequence[str],
    symbols: Mapping[str, Symbol],
    inputs: Sequence[Input],
    rules: Sequence[str],
) -> list[Broken]:
    """The conditions, in torch's symbols, that not all declared sizes keep; see `broken_guards`."""
    every = {dim.name: dim for i in inputs for dim in i.dims}
    found = []
    for text in dict.fromkeys(texts):
        used = sorted(symbols_in(text))
        if not used and holds(text, {}):
            continue
        own = {name for n in used if n in symbols for name in symbols[n].names}
        dims = tuple(dim for name, dim in every.items() if name in own or not own)
        grid = size_grid(dims, tuple(rules))
        kept = None
        if used and all(name in symbols for name in used):
            columns = dict(zip((dim.name for dim in dims), grid.T, strict=True))
            kept = where_holds(text, {n: symbols[n].at(columns) for n in used})
        bad = grid if kept is None else grid[~kept]
        if len(bad):
            formula = "" if kept is None else as_formula(text, symbols)
            found.append(Broken(text, in_dims(text, symbols), dims, bad, formula))
    return found


def sampled_guards(
    program: torch.export.ExportedProgram, inputs: Sequence[Input], rules: Sequence[str] = ()
) -> list[str]:
    """Notes on guards that were evaluated only at a sample of sizes, one for each set of dims.

    Args:
        program, inputs, rules: see `broken_guards`.
    """
    symbols, guards = recorded(program, inputs)
    every = {dim.name: dim for i in inputs for dim in i.dims}
    counts: dict[tuple[Dim, ...], int] = {}
    for text in dict.fromkeys(guards):
        names = {n for s in symbols_in(text) if s in symbols for n in symbols[s].names}
        dims = tuple(dim for name, dim in every.items() if name in names)
        if not complete(dims):
            counts[dims] = counts.get(dims, 0) + 1
    return [
        f"torch.export made {count} assumption{'' if count == 1 else 's'} about "
        f"{' and '.join(d.name for d in dims)}, checked at {evidence(dims, tuple(rules))}"
        for dims, count in counts.items()
    ]


def in_dims(text: str, symbols: Mapping[str, Symbol]) -> str:
    """A guard's text with the dims in place of torch's symbols."""
    return SYMBOL_NAME.sub(lambda m: str(symbols.get(m[0], m[0])), text)


def as_formula(text: str, symbols: Mapping[str, Symbol]) -> str:
    """A guard in the dims, as `pipeline.probe.evaluate` reads it."""
    return SYMBOL_NAME.sub(lambda m: symbols[m[0]].formula, text)


def good_sizes(dim: Dim, guards: Sequence[Broken]) -> list[int]:
    """The legal sizes of a dim that keep all of these guards; each guard has only this dim."""
    sizes = np.array(legal_sizes(dim, MOST_SIZES))
    good = np.ones(len(sizes), bool)
    for guard in guards:
        kept = where_holds(guard.formula, {dim.name: sizes})
        good &= False if kept is None else kept
    return [int(size) for size in sizes[good]]


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
            guards = [text for g in size.node.shape_env.guards for text in guard_parts(g.expr)]
    return symbols, guards


def guard_parts(guard: Any) -> list[str]:
    """The guard's text, or ``h >= 24`` and ``w >= 24`` for ``Min(h, w) >= 24``.

    A Dim can express each of the parts.
    """
    turned = guard if guard.is_Relational else None
    if turned is not None and turned.lhs.is_number:
        turned = turned.reversed
    if turned is None or not turned.rhs.is_number:
        return [exact(guard)]
    split = {("Min", ">="), ("Min", ">"), ("Max", "<="), ("Max", "<")}
    if (type(turned.lhs).__name__, turned.rel_op) not in split:
        return [exact(guard)]
    return [exact(turned.func(part, turned.rhs)) for part in turned.lhs.args]


_FIRST = 1 << 23  # most input elements at the smallest sizes that break a guard
_ANY = 1 << 40  # larger than every size
_DRAWS = 16  # of the inputs' values at most, where the module alone gives NaN
_CLOSE = 1e-4  # part of an output's largest value: a guard that changes more than this matters


def unguarded(program: torch.export.ExportedProgram) -> torch.fx.GraphModule:
    """The program as a module that also runs at sizes that break a guard.

    It runs outside of the ranges that torch.export concluded too.
    """
    graph = module_of(program)
    # the hook that checks the inputs reads it; torch types it as a submodule
    spans = dict.fromkeys(program.range_constraints, ValueRanges(0, _ANY))
    graph.range_constraints = spans  # type: ignore[assignment]
    return graph


def differs(
    graph: torch.nn.Module,
    eager: EagerModule,
    sizes: Mapping[str, int],
    tolerance: Tolerance,
    usual: Mapping[str, int],
) -> bool:
    """True if the exported program and the module do not agree at sizes that break a guard.

    Many guards only choose a faster way (memory layouts, sizes of 1). If the inputs are too large
    to try, the guard counts as one that matters.

    The module alone may give NaN because of values: a length hides a whole row. Or the sizes cause
    it. If it never does so at the usual sizes, the sizes cause it. Otherwise other values are
    drawn, until each element was a number once.

    Args:
        graph: the program from `unguarded`.
        eager: the module and its inputs.
        sizes: the sizes to try.
        tolerance: for outputs that differ by rounding.
        usual: sizes that break no guard, such as those of the export.
    """

    def masks(draw: int, at: Mapping[str, int]) -> list[torch.Tensor] | None:
        args = example_args(eager.inputs, eager.seed + draw, at)
        return nan_alone(graph, eager.module, args, tolerance)

    def by_values() -> bool:
        return any(_any(masks(draw, usual) or ()) for draw in range(_DRAWS))

    left: list[torch.Tensor] = []
    for draw in range(_DRAWS):
        found = masks(draw, sizes)
        if found is None:
            return True
        left = [a & b for a, b in zip(left, found, strict=True)] if draw else found
        if not _any(left):
            return False
        if draw == 0 and not by_values():
            return True
    return True


def _any(masks: Sequence[torch.Tensor]) -> bool:
    return any(bool(mask.any()) for mask in masks)


def nan_alone(
    graph: torch.nn.Module,
    module: torch.nn.Module,
    args: Sequence[torch.Tensor],
    tolerance: Tolerance,
) -> list[torch.Tensor] | None:
    """The elements of each output that are NaN in the module alone. None if others differ."""
    if sum(arg.numel() for arg in args) > _FIRST:
        return None
    try:
        want = flat_tensors(module(*(arg.clone() for arg in args)))
        got = flat_tensors(graph(*(arg.clone() for arg in args)))
    except Exception:  # the model, or the graph, fails at these sizes
        return None
    if len(want) != len(got):
        return None
    found = []
    for one, other in zip(want, got, strict=True):
        if one.shape != other.shape or one.dtype != other.dtype:
            return None
        if torch.equal(one, other):  # neither has a NaN
            found.append(torch.zeros_like(one, dtype=torch.bool))
            continue
        nan = one.isnan()
        if not _close(one[~nan], other[~nan], tolerance):
            return None
        found.append(nan & ~other.isnan())
    return found


def _close(want: torch.Tensor, got: torch.Tensor, tolerance: Tolerance) -> bool:
    """True if two sets of numbers differ only by rounding, within the tolerance and `_CLOSE`."""
    if torch.equal(want, got):
        return True
    if not want.dtype.is_floating_point:
        return False
    # numpy has no bfloat16
    difference = Difference(want.double().numpy(), got.double().numpy())
    return difference.within(tolerance) and difference.largest <= _CLOSE * difference.scale
