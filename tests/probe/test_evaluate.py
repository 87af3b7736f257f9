"""Which declared sizes break a guard, and which of these are tried."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from pipeline.export.guards import Broken, broken_guards, nan_alone, unguarded
from pipeline.export.tries import affordable_elements, tries
from pipeline.probe import evaluate as guards
from pipeline.probe import grid
from pipeline.probe.evaluate import result_of
from pipeline.probe.grid import legal_sizes
from pipeline.probe.sample_sizes import elements
from pipeline.spec.dims import Dim
from pipeline.spec.model import Input, Tolerance

H, W = Dim("h", 16, 64, 512), Dim("w", 20, 96, 640)
IMAGE = Input("x", (1, 3, H, W))


def traced(function, h=H, w=W):
    class One(torch.nn.Module):
        def forward(self, x):
            return function(x)

    dims = {a + 2: torch.export.Dim.DYNAMIC(min=d.min, max=d.max) for a, d in enumerate((h, w))}
    x = torch.rand(1, 3, 17, 21)
    return torch.export.export(One(), (x,), dynamic_shapes=(dims,), strict=False)


def rows(found: list[Broken]) -> set[tuple[int, int]]:
    (guard,) = found
    order = [[d.name for d in guard.dims].index(name) for name in ("h", "w")]
    return {(int(row[order[0]]), int(row[order[1]])) for row in guard.sizes}


@pytest.mark.parametrize(
    "breaks",
    [
        lambda h, w: h == w + 64,
        lambda h, w: (h + 5 * w) % 211 == 7,
        lambda h, w: h * w == 40 * 99,
    ],
)
def test_every_pair_that_breaks_a_guard_is_found(breaks) -> None:
    program = traced(lambda x: x * 2 if breaks(*x.shape[2:]) else x)
    want = {(h, w) for h in range(16, 513) for w in range(20, 641) if breaks(h, w)}
    found = rows(broken_guards(program, [IMAGE]))
    assert found <= want
    assert len(found) >= 0.9 * len(want)


def test_wide_ranges_are_scanned_whole_in_each_dim() -> None:
    h, w = Dim("h", 16, 64, 9000), Dim("w", 20, 96, 9000)
    program = traced(lambda x: x * 2 if x.shape[2] == x.shape[3] + 64 else x, h, w)
    found = rows(broken_guards(program, [Input("x", (1, 3, h, w))]))
    assert len(found) >= 40
    assert all(a == b + 64 for a, b in found)


def test_a_guard_on_one_long_dim_is_evaluated_at_all_its_sizes() -> None:
    t = Dim("t", 2, 1000, 400000)
    assert grid.complete([t])
    assert len(grid.size_grid((t,), ())) == 399999
    assert grid.evidence((t,), ()) == "all 399999 sizes of t"
    assert not grid.complete([Dim("t", 2, 1000, 4000000)])


def test_products_beyond_64_bits_are_right() -> None:
    dims = [Dim(f"d{k}", 1, 2, 1 << 20) for k in range(5)]
    sizes = grid.size_grid(tuple(dims), ())
    values = {f"s{k}": sizes[:, k] for k in range(5)}
    kept = guards.where_holds("s0*s1*s2*s3*s4 < 10**25", values)
    assert kept.tolist() == [math.prod(map(int, row)) < 10**25 for row in sizes]


@pytest.mark.parametrize(
    "text",
    ["s0**7 > 10**20", "1000000007*s0*1000000007 > 4*10**20", "*".join(["s0"] * 11) + " > 10**30"],
)
def test_powers_beyond_64_bits_are_right(text: str) -> None:
    sizes = np.arange(1, 1001)
    kept = guards.where_holds(text, {"s0": sizes})
    assert kept.tolist() == [eval(text, {"s0": int(size)}) for size in sizes]


def test_a_value_beyond_64_bits_is_right() -> None:
    sizes = np.arange(1, 1001)
    for text in (
        "*".join(["s0"] * 9),
        "IntTrueDiv(s0*9007199254740993, 3)",
        "FloorToInt(1.5*s0)**9 % 7",
        "CeilToInt(IntTrueDiv(s0, 2))**9",
        "FloorToInt(1/(1/(s0 + 2**30) - 1/(s0 + 2**30 + 1)))*s0**3",
    ):
        one_by_one = [result_of(text, {"s0": int(size)}) for size in sizes]
        assert all(type(number) in (int, float) for number in one_by_one)
        assert result_of(text, {"s0": sizes}).tolist() == one_by_one


def test_small_values_stay_in_numpy_s_integers() -> None:
    sizes = np.arange(1, 100000)
    found = result_of("Max(s0*s1, s0**2 - 3) + FloorDiv(s1, 2)", {"s0": sizes, "s1": sizes})
    assert found.dtype == np.int64


def test_a_division_by_zero_cannot_be_told() -> None:
    assert result_of("s0//(s1 - 5) > 1", {"s0": np.arange(9), "s1": np.arange(9)}) is None
    assert guards.where_holds("s0//(s1 - 5) > 1", {"s0": np.arange(9), "s1": np.arange(9)}) is None


def test_tries_reach_from_the_smallest_to_the_largest_that_fits() -> None:
    program = traced(lambda x: x * 2 if x.shape[2] % 7 == 0 else x)
    (guard,) = broken_guards(program, [IMAGE])
    assert [d.name for d in guard.dims] == ["h"]
    assert guard.sizes[:, 0].tolist() == [n for n in legal_sizes(H, 1000) if n % 7 == 0]
    sizes = tries([IMAGE], guard, program)
    heights = {s["h"] for s in sizes}
    assert heights <= set(range(21, 512, 7)) and {21, 28, 511} <= heights and len(heights) == 40
    assert {s["w"] for s in sizes} > {21, W.opt}
    assert all(elements([IMAGE], s) <= 1 << 21 for s in sizes)


def test_sizes_tried_before_stand_for_those_near_them() -> None:
    program = traced(lambda x: x * 2 if x.shape[2] % 7 == 0 else x)
    (guard,) = broken_guards(program, [IMAGE])
    first = tries([IMAGE], guard, program)
    again = tries([IMAGE], guard, program, tried=first)
    ends = {s["h"] for s in first[:1]} | {max(s["h"] for s in first)}
    assert {s["h"] for s in again} == ends  # the ends are tried with other sizes of w too
    others = [{"h": 16 + 7 * n + 1, "w": 21} for n in range(9)]  # none breaks the guard
    assert tries([IMAGE], guard, program, tried=others) == first


def test_a_model_with_more_work_is_tried_at_smaller_sizes() -> None:
    class Deep(torch.nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.inside = torch.nn.Sequential(
                torch.nn.Conv2d(3, width, 3, padding=1), torch.nn.Conv2d(width, 3, 3, padding=1)
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inside(x) if x.shape[2] % 7 else x

    dims = {a + 2: torch.export.Dim.DYNAMIC(min=d.min, max=d.max) for a, d in enumerate((H, W))}
    x, found = torch.rand(1, 3, 17, 21), []
    for width in (4, 4096):
        program = torch.export.export(Deep(width), (x,), dynamic_shapes=(dims,), strict=False)
        (guard,) = broken_guards(program, [IMAGE])
        most = affordable_elements(unguarded(program), [x])
        # two products of 3 * width * 9 for each pixel, which has three elements
        assert most == min(1 << 22, 10**11 // (2 * 2 * width * 9))
        found.append(tries([IMAGE], guard, program, together=most))
    light, heavy = found
    assert len(heavy) < len(light)
    assert sum(elements([IMAGE], s) for s in heavy[:-1]) <= most
    assert heavy[-1] == light[-1]  # the largest is tried all the same


def verdict(
    program: torch.nn.Module, other: Callable[..., Any], x: torch.Tensor, tolerance: Tolerance
) -> str:
    """How a module compares with a program."""
    masks = nan_alone(program, other, [x], tolerance)
    if masks is None:
        return "differs"
    return "NaN alone" if any(mask.any() for mask in masks) else "agrees"


def test_what_differs() -> None:
    program = unguarded(traced(lambda x: x * 1e-5))
    x = torch.rand(1, 3, 20, 30)
    loose = Tolerance(1e-2, 1e-1, "a test")
    assert verdict(program, lambda x: x * 1e-5, x, loose) == "agrees"
    assert verdict(program, lambda x: x * 1.000001e-5, x, loose) == "agrees"
    assert verdict(program, lambda x: x.mul_(1e-5), x, loose) == "agrees"
    assert verdict(program, lambda x: x * 1e-5, x[:, :2], loose) == "differs"
    for other in (
        lambda x: x * 2e-5,
        lambda x: (x * 1e-5)[:, :, 1:],
        lambda x: (x * 1e-5).double(),
        lambda x: (x, x),
        lambda x: x.no_such_thing,
    ):
        assert verdict(program, other, x, loose) == "differs"
    strict = Tolerance(0, 1e-12, "a test")
    assert verdict(program, lambda x: x * 1.000001e-5, x, strict) == "differs"


def test_nan_of_the_model_is_told_from_other_numbers() -> None:
    """A value may cause it, such as a length that hides a whole row."""
    program = unguarded(traced(lambda x: x * 1e-5))
    x = torch.rand(1, 3, 20, 30)
    loose = Tolerance(1e-2, 1e-1, "a test")

    def hidden(by: float) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: (x * by).index_fill(2, torch.tensor([3]), torch.nan)

    assert verdict(program, lambda x: x * torch.nan, x, loose) == "NaN alone"
    assert verdict(program, hidden(1e-5), x, loose) == "NaN alone"
    assert verdict(program, hidden(2e-5), x, loose) == "differs"
    nan = unguarded(traced(lambda x: x * torch.nan))
    assert verdict(nan, lambda x: x * 1e-5, x, loose) == "differs"
    assert verdict(nan, lambda x: x * torch.nan, x, loose) == "agrees"


def test_an_op_that_the_counter_does_not_know_counts_nothing() -> None:
    class Loop(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            loop = torch._higher_order_ops.while_loop
            start = (torch.tensor(0), x)
            return loop(lambda i, _: i < 5, lambda i, y: (i + 1, y * 1.5), start)[1]

    x = torch.rand(1, 3, 17, 21)
    dims = {a + 2: torch.export.Dim.DYNAMIC(min=d.min, max=d.max) for a, d in enumerate((H, W))}
    program = torch.export.export(Loop(), (x,), dynamic_shapes=(dims,), strict=False)
    with pytest.raises(TypeError, match="NotImplementedType"), FlopCounterMode(display=False):
        unguarded(program)(x)
    assert affordable_elements(unguarded(program), [x]) == 1 << 22
