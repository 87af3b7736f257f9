"""The runs of a measured tolerance: an output may be empty or zero at most sizes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from pipeline.export.tolerance import with_tolerance
from pipeline.export.tolerance_runs import runs_of
from pipeline.spec.dims import Dim
from pipeline.spec.model import ModelSpec
from pipeline.spec.tensors import Input, Output, Tolerance

Late = Callable[[torch.Tensor], torch.Tensor]


class Model(torch.nn.Module):
    """A small network, and a function of its output."""

    def __init__(self, late: Late) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.net = torch.nn.Sequential(
                torch.nn.Linear(8, 64), torch.nn.GELU(), torch.nn.Linear(64, 16)
            )
        self.late = late

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.late(self.net(x))


def spec_of(module: torch.nn.Module, t: Dim) -> ModelSpec:
    return ModelSpec(
        "m", lambda _: module, (Input("x", (Dim("b", 1, 2, 4), t, 8)),), (Output("y"),)
    )


def measured(late: Late, t: Dim) -> Tolerance:
    module = Model(late)
    tolerance = with_tolerance(spec_of(module, t), module, 0).outputs[0].tolerance
    assert tolerance is not None
    return tolerance


@pytest.mark.parametrize(
    "late",
    [
        lambda y: y[:, 40:],
        lambda y: y * max(y.shape[1] - 40, 0),
        lambda y: y[:, : max(9 - y.shape[1], 0)],  # only at the smallest size
        lambda y: y[:, 59:],  # only at the largest
    ],
)
def test_a_tolerance_is_measured_where_an_output_is_not_empty_or_zero(late: Late) -> None:
    tolerance = measured(late, Dim("t", 8, 23, 60))
    assert 1e-7 < tolerance.atol < 1e-2


def test_an_empty_output_says_nothing_beside_whole_numbers() -> None:
    tolerance = measured(lambda y: y.argmax(-1)[:, 10:].float() + 20_000, Dim("t", 8, 23, 64))
    assert tolerance.rtol == 0


def test_a_part_has_its_own_atol_where_an_output_is_empty_at_small_sizes() -> None:
    tolerance = measured(
        lambda y: (y * torch.where(torch.arange(16) < 8, 1e-4, 1.0))[:, 10:], Dim("t", 8, 23, 64)
    )
    assert tolerance.axis == 2 and max(tolerance.parts[:8]) < min(tolerance.parts[8:])


def test_an_output_that_is_not_zero_needs_no_larger_run() -> None:
    module = Model(lambda y: y)
    sizes = [run.sizes["t"] for run in runs_of(spec_of(module, Dim("t", 8, 23, 60)), module, 0)]
    assert max(sizes) < 60
