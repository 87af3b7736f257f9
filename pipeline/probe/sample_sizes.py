"""Chooses sets of sizes at which to export and run a model."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from pipeline.probe.grid import legal_sizes
from pipeline.spec.dims import Dim, kept_rules, shape_at
from pipeline.spec.tensors import Input

_SEARCHED = 1 << 12  # most sets of sizes in the search for one that keeps the rules


def dims_of(inputs: Sequence[Input]) -> dict[str, Dim]:
    """The dims of the inputs, by name."""
    return {dim.name: dim for i in inputs for dim in i.dims}


def examples(inputs: Sequence[Input], rules: Sequence[str] = ()) -> list[dict[str, int]]:
    """Sets of legal sizes at which to export, in the order in which to try them.

    The order is: small, different sizes; round, different sizes; the opts; round sizes that may be
    equal. Equal sizes may hide that two dims are mixed up. A dim's first size is used only if there
    is no other, because torch specialises sizes of 0 and 1.
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
    legal_sets = [sizes for sizes in every if kept_rules(rules, sizes)]
    return legal_sets or _search(dims_of(inputs), rules) or every[:1]


def _search(dims: Mapping[str, Dim], rules: Sequence[str]) -> list[dict[str, int]]:
    """The first set that keeps the rules, among a few sizes of each dim, or nothing."""
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
    """The number of elements of the inputs at these sizes."""
    return sum(math.prod(shape_at(i.shape, sizes)) for i in inputs)
