"""The sizes at which a guard is tried that some of the declared sizes break."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from pipeline.export.guards import Broken
from pipeline.export.ops.refusals import not_run
from pipeline.probe.evaluate import where_holds
from pipeline.probe.grid import size_grid, spread
from pipeline.probe.sample_sizes import dims_of, elements, examples
from pipeline.spec.dims import Dim, kept_rules
from pipeline.spec.tensors import Input

_TRIES = 40  # most sizes that are tried for one guard, without those at other sizes of the rest
_LEAST = 8  # tries of a guard that are always affordable, beside the largest
_ELEMENTS = 1 << 21  # most input elements of one try of a broken guard
_TOGETHER = 1 << 22  # most input elements of all tries of a guard
_FLOPS = 100 * 10**9  # most floating-point operations of all tries of a guard
_ROWS = 1 << 12  # most sizes from which those to try are chosen
_BESIDE = 8  # most sizes that are tried for one guard while others hold

Sizes = Mapping[str, int]


def affordable_elements(graph: torch.fx.GraphModule, args: Sequence[torch.Tensor]) -> int:
    """How many input elements all tries of a guard may have.

    A model that computes more for each element of its inputs is run at smaller sizes. The work is
    counted as torch counts it (matrix products and convolutions), and not as time, so that another
    machine finds the same.

    Args:
        graph: the program from `unguarded`.
        args: the example's inputs.

    Raises:
        ExportError: torch traces an op of the program, but can't run it.
    """
    try:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            graph(*(arg.clone() for arg in args))
    except Exception as error:  # any op's error
        found = not_run(graph, args, error)
        if found is not error:
            raise found from error
        with torch.no_grad():
            graph(*(arg.clone() for arg in args))
        return _TOGETHER  # the counter does not know an op, such as while_loop
    each = counter.get_total_flops() / max(sum(arg.numel() for arg in args), 1)
    return min(_TOGETHER, int(_FLOPS / each)) if each else _TOGETHER


def tries(
    inputs: Sequence[Input],
    guard: Broken,
    program: torch.export.ExportedProgram,
    rules: Sequence[str] = (),
    *,
    together: int = _TOGETHER,
    tried: Sequence[Sizes] = (),
) -> list[dict[str, int]]:
    """Sizes of all dims at which to try a broken guard.

    They include the smallest sizes that break it, and others up to the largest affordable run.
    The other dims are both small and large.

    Args:
        inputs: the inputs as declared.
        guard: the guard to break.
        program: what torch exported.
        rules: the rules on sizes.
        together: the most input elements of all tries, see `affordable_elements`.
        tried: sizes that were tried for other guards. They stand for sizes near them.
    """
    most = min(max(4000 // len(program.graph.nodes), _LEAST), _TRIES)
    names = [dim.name for dim in guard.dims]
    every = dims_of(inputs)
    base = examples(inputs, rules)[0]
    others = [
        base,
        {name: dim.max for name, dim in every.items()},
        {name: dim.opt for name, dim in every.items()},
        {name: dim.min for name, dim in every.items()},
    ]
    rows = guard.sizes[spread(len(guard.sizes), _ROWS)].tolist()
    small = [row for row in rows if elements(inputs, _with_row(base, names, row)) <= _ELEMENTS]
    found = [] if small else [_with_row(base, names, rows[0])]
    ends = (0, len(small) - 1)  # torch has no guards of later branches there
    place = {tuple(row): k for k, row in enumerate(small)}
    done = [(place.get(tuple(sizes[name] for name in names)), sizes) for sizes in tried]
    known = {at: sizes for at, sizes in done if at is not None}
    chosen = spread(len(small), most)
    for k, index in enumerate(chosen):
        apart = index - chosen[k - 1] if k else 0
        if index not in ends and any(2 * abs(at - index) <= apart for at in known):
            continue
        found.append(_with_row(base, names, small[index]))
        for other in others if index in ends else [others[k % 4]]:
            sizes = _with_row(other, names, small[index])
            if elements(inputs, sizes) <= _ELEMENTS:
                found.append(sizes)
    found = [sizes for n, sizes in enumerate(found) if sizes not in found[:n]]
    kept = [sizes for sizes in found if kept_rules(rules, sizes)]
    largest = max((elements(inputs, sizes) for sizes in known.values()), default=0)
    return _affordable(inputs, kept or _completed(guard, every, rules), together, largest)


def tries_beside(
    inputs: Sequence[Input],
    guard: Broken,
    others: Sequence[Broken],
    near: Sizes,
    rules: Sequence[str] = (),
) -> list[dict[str, int]]:
    """A few sizes that break a guard and keep some others; the smallest first.

    Args:
        inputs: the inputs as declared.
        guard: the guard to break.
        others: the guards to keep. If one of them can't be evaluated, no sizes are left.
        near: sizes at which all guards hold. Only the guard's own dims change.
        rules: the rules on sizes.
    """
    names = [dim.name for dim in guard.dims]
    rows = guard.sizes[spread(len(guard.sizes), _ROWS)].tolist()
    sets = [_with_row(near, names, row) for row in rows]
    kept = np.array([kept_rules(rules, sizes) for sizes in sets])
    for other in others:
        columns = {d.name: np.array([sizes[d.name] for sizes in sets]) for d in other.dims}
        holding = where_holds(other.formula, columns)
        kept &= False if holding is None else holding
    sets = [sizes for sizes, good in zip(sets, kept, strict=True) if good]
    small = [sizes for sizes in sets if elements(inputs, sizes) <= _ELEMENTS] or sets[:1]
    few = [small[k] for k in spread(len(small), _BESIDE)]
    return sorted(few, key=lambda sizes: elements(inputs, sizes))


def _completed(
    guard: Broken, every: Mapping[str, Dim], rules: Sequence[str]
) -> list[dict[str, int]]:
    """Some sizes that break a guard, with sizes of the other dims that keep the rules."""
    names = list(every)
    columns = [names.index(dim.name) for dim in guard.dims]
    grid = size_grid(tuple(every.values()), tuple(rules))
    broken = {tuple(row) for row in guard.sizes.tolist()}
    rows = [row for row in grid.tolist() if tuple(row[k] for k in columns) in broken]
    return [dict(zip(names, rows[k], strict=True)) for k in spread(len(rows), 16)]


def _affordable(
    inputs: Sequence[Input], sets: Sequence[dict[str, int]], together: int, largest: int
) -> list[dict[str, int]]:
    """The smallest of these sets of sizes that are affordable together, and the largest of all.

    The largest is left out if a set with half its elements was tried.
    """
    ranked = sorted(sets, key=lambda sizes: elements(inputs, sizes))
    total = 0
    for n, sizes in enumerate(ranked):
        total += elements(inputs, sizes)
        if n >= _LEAST and total > together:
            last = [] if 2 * largest >= elements(inputs, ranked[-1]) else [ranked[-1]]
            return [*ranked[:n], *last]
    return ranked


def _with_row(sizes: Sizes, names: Sequence[str], row: Sequence[int]) -> dict[str, int]:
    return {**sizes, **dict(zip(names, row, strict=True))}
