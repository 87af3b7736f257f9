"""Branches on sizes whose other side gives NaN, in a part of the output or in all of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import pytest
import torch
from op_exports import Of, compare_op, spec_of

from pipeline.export.export import export
from pipeline.export.guards import differs, unguarded
from pipeline.probe.eager import EagerModule, example_args
from pipeline.spec.dims import Dim
from pipeline.spec.model import Input, Tolerance

Function = Callable[[torch.Tensor], torch.Tensor]
SHAPE = (Dim("h", 1, 3, 12, auto=True), Dim("w", 2, 7, 16, auto=True))
LOOSE = Tolerance(1e-5, 1e-5, "a test")


def first_column(x):
    y = x * 2
    return torch.cat([y[:, :1] * math.nan, y[:, 1:]], 1) if x.shape[1] == 5 else y


def all_of_it(x):
    return x * math.nan if x.shape[1] == 5 else x * 2


def three_more(x):
    return torch.cat([x, x * math.nan], 1) if x.shape[1] == x.shape[0] + 3 else x * 2


def behind(x):
    y = x * 2
    if x.shape[1] == 9:
        y = x + x  # the same
        if x.shape[0] == 11:
            y = torch.cat([y[:1] * math.nan, y[1:]])
    return y


def one_of_two(x):
    w = x.shape[1]
    return torch.where(torch.arange(w) < w - 2, x, math.nan) if w in (13, 15) else x


@pytest.mark.parametrize(
    "function", [first_column, all_of_it, three_more, behind, one_of_two], ids=lambda f: f.__name__
)
def test_no_size_has_other_numbers(tmp_path, function: Function) -> None:
    spec = spec_of(function, SHAPE)
    done = export(spec, None, tmp_path / "m.onnx")
    assert done.spec.rules
    dims, kept = done.spec.dims, 0
    for h in range(dims["h"].min, dims["h"].max + 1):
        for w in range(dims["w"].min, dims["w"].max + 1):
            if all(eval(rule, {"h": h, "w": w}) for rule in done.spec.rules):
                kept += 1
                x = torch.from_numpy(spec.sample({"h": h, "w": w}, 1)["x"])
                compare_op(Of(function), done.path, [x], near=1e-6)
    assert kept > 120


@cache
def doubled() -> torch.nn.Module:
    """The program of ``x * 2``, of any number of rows."""
    shapes = ({0: torch.export.Dim("n", min=2, max=9)},)
    args = (torch.rand(5, 4),)
    program = torch.export.export(Of(lambda x: x * 2), args, dynamic_shapes=(shapes,))
    return unguarded(program)


def different(function: Function, seed: int = 0) -> bool:
    """Whether a function and ``x * 2`` count as different at 7 rows; 5 rows break no guard."""
    inputs = (Input("x", (Dim("n", 2, 5, 9), 4)),)
    return differs(doubled(), EagerModule(inputs, Of(function), seed), {"n": 7}, LOOSE, {"n": 5})


def hidden(x: torch.Tensor) -> torch.Tensor:
    """NaN in some rows, by their values, as if a length hid them."""
    return torch.where(x[:, :1] < 0, x * 2, math.nan)


def at_seven(x: torch.Tensor) -> torch.Tensor:
    nan = torch.where(torch.arange(len(x))[:, None] == 1, math.nan, 0.0)
    return x * 2 + (nan if len(x) == 7 else 0.0)


@pytest.mark.parametrize("seed", range(5))
def test_nan_of_some_values_is_no_difference(seed: int) -> None:
    assert not different(hidden, seed)
    assert different(lambda x: hidden(x) + 1, seed)
    assert different(lambda x: hidden(x) + at_seven(x) - 2 * x, seed)


def test_nan_at_some_draws_of_one_size_is_a_difference() -> None:
    """The root of a number of any sign, at 7 rows only."""

    def lottery(x: torch.Tensor) -> torch.Tensor:
        return x * 2 + (0 * x[0, 0].sqrt() if len(x) == 7 else 0)

    inputs = (Input("x", (Dim("n", 2, 5, 9), 4)),)
    firsts = [example_args(inputs, seed, {"n": 7})[0][0, 0] for seed in range(40)]
    seeds = [n for n in range(38) if firsts[n] < 0 and max(firsts[n + 1], firsts[n + 2]) >= 0]
    assert len(seeds) > 5
    assert all(different(lottery, seed) for seed in seeds)
    assert all(different(at_seven, seed) for seed in range(5))
