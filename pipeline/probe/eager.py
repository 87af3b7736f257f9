"""Example sizes and inputs for an export, and running a module on them without torch.export."""

from __future__ import annotations

import contextlib
import io
import itertools
import logging
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.probe.evaluate import Broken, legal_sizes, size_grid, spread
from pipeline.spec.dims import Dim, kept_rules, shape_at
from pipeline.spec.model import Input, Tolerance

if TYPE_CHECKING:
    import torch

_ELEMENTS = 1 << 21  # of the inputs for which a broken guard is tried out
_TOGETHER = 1 << 22  # of the inputs of all tries of a guard
_FIRST = 1 << 23  # of the inputs at the smallest sizes that break it
_EAGER = 1 << 18  # of the inputs up to which a model is run to see its output shapes
_SEARCHED = 1 << 12  # sets of sizes among which one that keeps the rules is looked for
_ROWS = 1 << 12  # sizes among which those to try are chosen
_CLOSE = 1e-4  # of an output's largest value: a guard that changes more than this matters


def example_args(
    inputs: Sequence[Input], seed: int, sizes: Mapping[str, int]
) -> tuple[torch.Tensor, ...]:
    """Random inputs at these dim sizes, in order."""
    import torch

    return tuple(torch.from_numpy(i.sample(sizes, seed)) for i in inputs)


def runs(
    inputs: Sequence[Input], module: torch.nn.Module, seed: int, sizes: Mapping[str, int]
) -> bool:
    """True if the module runs at these sizes without torch.export."""
    import torch

    try:
        with torch.no_grad(), quiet():
            module(*example_args(inputs, seed, sizes))
    except Exception:
        return False
    return True


def dims_of(inputs: Sequence[Input]) -> dict[str, Dim]:
    """The dims by name."""
    return {dim.name: dim for i in inputs for dim in i.dims}


def examples(inputs: Sequence[Input], rules: Sequence[str] = ()) -> list[dict[str, int]]:
    """Sets of legal sizes that keep the rules, to export at, in the order in which to try them.

    Small and different ones first; then round ones, different and equal; then the opts. None is
    the dim's first size where there is another: torch specialises a size of 0 or 1, and equal
    sizes may hide a mix-up.
    """

    def chosen(rounds: Sequence[int], *, distinct: bool) -> dict[str, int]:
        sizes: dict[str, int] = {}
        for name, dim in dims_of(inputs).items():
            legal = legal_sizes(dim, 1 << 12)[1:] or [dim.min]
            fresh = [n for n in legal if n > 1 and not (distinct and n in sizes.values())]
            fresh = fresh or legal[-1:]
            sizes[name] = next((n for step in rounds for n in fresh if n % step == 0), fresh[0])
        return sizes

    every = [
        chosen((1,), distinct=True),
        chosen((64, 32, 16, 8, 4, 2), distinct=True),
        {name: dim.opt for name, dim in dims_of(inputs).items()},
        chosen((64, 32, 16, 8, 4, 2), distinct=False),
    ]
    every = [sizes for n, sizes in enumerate(every) if sizes not in every[:n]]
    kept = [sizes for sizes in every if kept_rules(rules, sizes)]
    return kept or _kept_by_search(dims_of(inputs), rules) or every[:1]


def _kept_by_search(dims: Mapping[str, Dim], rules: Sequence[str]) -> list[dict[str, int]]:
    """The first sizes that keep the rules, if some do: few of each dim, not the first ones."""
    few = max(int(_SEARCHED ** (1 / len(dims))), 4) if dims else 4
    every = [
        [*(legal_sizes(dim, 2 * few)[1:] or [dim.min])[:few], dim.opt] for dim in dims.values()
    ]
    for row in itertools.product(*every):
        sizes = dict(zip(dims, row, strict=True))
        if kept_rules(rules, sizes):
            return [sizes]
    return []


def elements(inputs: Sequence[Input], sizes: Mapping[str, int]) -> int:
    """How many elements the inputs have at these sizes."""
    return sum(math.prod(shape_at(i.shape, sizes)) for i in inputs)


def tries(
    inputs: Sequence[Input],
    guard: Broken,
    program: torch.export.ExportedProgram,
    rules: Sequence[str] = (),
) -> list[dict[str, int]]:
    """Sizes of all dims at which to try a broken guard out: the smallest that break it and
    others up to the largest that is not too much to run, the other dims small and large."""
    most = min(max(4000 // len(program.graph.nodes), 8), 128)
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
    small = [row for row in rows if elements(inputs, _placed(base, names, row)) <= _ELEMENTS]
    found = [] if small else [_placed(base, names, rows[0])]
    for k, index in enumerate(spread(len(small), most)):
        found.append(_placed(base, names, small[index]))
        other = _placed(others[k % 4], names, small[index])
        if elements(inputs, other) <= _ELEMENTS:
            found.append(other)
    found = [sizes for n, sizes in enumerate(found) if sizes not in found[:n]]
    kept = [sizes for sizes in found if kept_rules(rules, sizes)]
    return _affordable(inputs, kept or _completed(guard, every, rules))


def _completed(
    guard: Broken, every: Mapping[str, Dim], rules: Sequence[str]
) -> list[dict[str, int]]:
    """Some of the sizes that break a guard, with sizes of the other dims that keep the rules."""
    names = list(every)
    columns = [names.index(dim.name) for dim in guard.dims]
    grid = size_grid(tuple(every.values()), tuple(rules))
    broken = {tuple(row) for row in guard.sizes.tolist()}
    rows = [row for row in grid.tolist() if tuple(row[k] for k in columns) in broken]
    return [dict(zip(names, rows[k], strict=True)) for k in spread(len(rows), 16)]


def _affordable(inputs: Sequence[Input], sets: Sequence[dict[str, int]]) -> list[dict[str, int]]:
    """The smallest of these sets of sizes that are not too much together, 8 at least; and the
    largest of all."""
    ranked = sorted(sets, key=lambda sizes: elements(inputs, sizes))
    total = 0
    for n, sizes in enumerate(ranked):
        total += elements(inputs, sizes)
        if n >= 8 and total > _TOGETHER:
            return [*ranked[:n], ranked[-1]]
    return ranked


def _placed(sizes: Mapping[str, int], names: Sequence[str], row: Sequence[int]) -> dict[str, int]:
    return {**sizes, **dict(zip(names, row, strict=True))}


def matters(
    program: torch.export.ExportedProgram,
    module: torch.nn.Module,
    args: Sequence[torch.Tensor],
    tolerance: Tolerance,
) -> bool:
    """False if the exported program does as the module does at sizes that break a guard.

    Many guards only chose a faster way (memory layouts, sizes of 1). Where the inputs are too
    large to try, the guard is taken to matter.
    """
    if sum(arg.numel() for arg in args) > _FIRST:
        return True
    try:
        want = _flat(module(*(arg.clone() for arg in args)))
        got = _flat(program.module(check_guards=False)(*(arg.clone() for arg in args)))
    except Exception:  # the model, or the graph, fails at these sizes
        return True
    return len(want) != len(got) or not all(
        _same(a, b, tolerance) for a, b in zip(want, got, strict=True)
    )


def _same(want: torch.Tensor, got: torch.Tensor, tolerance: Tolerance) -> bool:
    """True if two outputs are equal but for the order of the sums: by the tolerance and by
    the scale of what the model gives."""
    import torch

    if want.shape != got.shape or want.dtype != got.dtype:
        return False
    if torch.equal(want, got):
        return True
    if not want.dtype.is_floating_point:
        return False
    a, b = want.double().numpy(), got.double().numpy()
    odd = ~np.isfinite(a)
    if not np.array_equal(a[odd], b[odd], equal_nan=True) or not np.isfinite(b[~odd]).all():
        return False
    a, b = a[~odd], b[~odd]
    off = abs(a - b)
    near = (off <= tolerance.atol) | (off <= tolerance.rtol * abs(a))
    return bool(near.all() and off.max(initial=0) <= _CLOSE * abs(a).max(initial=0))


def output_sizes(
    inputs: Sequence[Input], module: torch.nn.Module, seed: int, sizes: Mapping[str, int]
) -> list[tuple[int, ...]] | None:
    """The shapes that the module gives at these sizes, by running it without torch.export.

    Large inputs go through as shapes without values. None where the module does not run.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    try:
        with torch.no_grad(), quiet():
            if elements(inputs, sizes) <= _EAGER:
                result = module(*example_args(inputs, seed, sizes))
            else:
                with untouched(module), FakeTensorMode(allow_non_fake_inputs=True):
                    result = module(
                        *(
                            torch.empty(
                                shape_at(i.shape, sizes),
                                dtype=torch.from_numpy(np.empty(0, i.dtype)).dtype,
                            )
                            for i in inputs
                        )
                    )
            return [tuple(int(n) for n in t.shape) for t in _flat(result)]
    except Exception:
        return None


@contextlib.contextmanager
def untouched(module: torch.nn.Module) -> Iterator[None]:
    """Undoes what a run sets on the module: a cached tensor that has no values."""
    saved = [
        (part, {k: dict(v) if type(v) is dict else v for k, v in vars(part).items()})
        for part in module.modules()
    ]
    try:
        yield
    finally:
        for part, attributes in saved:
            vars(part).clear()
            vars(part).update(attributes)


def _flat(result: Any) -> list[torch.Tensor]:
    from torch.utils._pytree import tree_leaves

    return list(tree_leaves(result))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keeps torch's warnings, prints and logs out of the way; errors still come as exceptions."""
    handlers = [
        (handler, handler.level)
        for name, logger in list(logging.root.manager.loggerDict.items())
        if isinstance(logger, logging.Logger) and name.split(".")[0] == "torch"
        for handler in logger.handlers
        if isinstance(handler, logging.StreamHandler)
    ]
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        for handler, _ in handlers:
            handler.setLevel(logging.CRITICAL + 1)
        try:
            yield
        finally:
            for handler, level in handlers:
                handler.setLevel(level)
