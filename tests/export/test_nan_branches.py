"""Branches on sizes whose other side gives NaN, in a part of the output or in all of it."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from op_exports import Of, compare_op, spec_of

from pipeline.export.export import export
from pipeline.export.guards import differs, unguarded
from pipeline.probe.eager import EagerModule
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


def test_nan_of_some_values_is_no_difference() -> None:
    """As if a length hid a whole row."""
    inputs = (Input("x", (Dim("n", 2, 5, 9), 4)),)
    args = (torch.rand(5, 4),)
    shapes = ({0: torch.export.Dim("n", min=2, max=9)},)
    program = torch.export.export(Of(lambda x: x * 2), args, dynamic_shapes=(shapes,))
    graph = unguarded(program)

    def some(x):
        return x * 2 if x[0, 0] < 0 else (x * 2).index_fill(0, torch.tensor([1]), math.nan)

    firsts = [EagerModule(inputs, Of(some), seed).args({"n": 7})[0][0, 0] for seed in range(20)]
    seed = next(n for n in range(17) if firsts[n] >= 0 and min(firsts[n : n + 4]) < 0)

    def different(function: Function) -> bool:
        return differs(graph, EagerModule(inputs, Of(function), seed), {"n": 7}, LOOSE)

    assert not different(some)
    assert different(lambda x: (x * 2).index_fill(0, torch.tensor([1]), math.nan))
    assert different(lambda x: some(x) + 1)
