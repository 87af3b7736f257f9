"""A run in float64 has no float32 rounding in what the model makes itself."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from pipeline.export.module import built
from pipeline.export.tolerance import with_tolerance
from pipeline.export.wide_calls import WideCalls
from pipeline.spec.dims import Dim
from pipeline.spec.model import Input, ModelSpec, Output

T = Dim("t", 6, 10, 32)
MASK = torch.tensor([True, False, True])
attend = functional.scaled_dot_product_attention


class Masked(torch.nn.Module):
    def forward(self, q, m):
        return q + 1e-3 * attend(q, q, q, attn_mask=torch.where(m, 0.0, -1.0))


def test_a_made_mask_does_not_widen_the_tolerance() -> None:
    inputs = (Input("q", (1, 2, T, 4)), Input("m", (1, 1, 1, T), dtype="bool"))
    spec = ModelSpec("masked", lambda _: Masked(), inputs, (Output("y"),))
    spec, module = built(spec, None)
    (output,) = with_tolerance(spec, module, 0).outputs
    assert output.tolerance is not None and output.tolerance.atol < 2e-5


@pytest.mark.parametrize(
    "function",
    [
        lambda: torch.where(MASK, 0.0, -1.0),
        lambda: torch.zeros(3).masked_fill(MASK, -1.0),
        lambda: torch.empty(3).fill_(2.0),
        lambda: torch.arange(3) / 3,
        lambda: torch.full((3,), 0.1),
        lambda: torch.tensor([0.5]),
    ],
)
def test_what_is_made_of_no_floats_is_float64(function) -> None:
    with WideCalls():
        assert function().dtype == torch.float64


def test_a_dtype_that_the_model_states_stays() -> None:
    x = torch.randn(3, dtype=torch.float64)
    with WideCalls():
        assert torch.zeros(3, dtype=torch.float32).dtype == torch.float32
        assert x.float().dtype == torch.float32
        assert torch.arange(3).dtype == torch.int64


@pytest.mark.parametrize("by_name", [True, False])
def test_a_float32_mask_of_attention(by_name) -> None:
    q = torch.randn(1, 2, 3, 4, dtype=torch.float64)
    mask = torch.zeros(3, 3, dtype=torch.float32).masked_fill(~torch.ones(3, 3).tril().bool(), -9)
    want = attend(q, q, q, mask.double())
    with WideCalls():
        got = attend(q, q, q, attn_mask=mask) if by_name else attend(q, q, q, mask)
    torch.testing.assert_close(got, want)
