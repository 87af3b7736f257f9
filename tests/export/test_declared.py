"""The ends of a number of sizes hold at all declared sizes."""

from __future__ import annotations

import pytest
import torch

from pipeline.export.declared import declaring, ends_of
from pipeline.spec.dims import Dim, Size

Q, LONG = Dim("q", 7, 11, 23), Dim("t", 1, 5, 1 << 40)
ENDS: list[tuple[Size, tuple[float, float]]] = [
    (Q, (7, 23)),
    (Q + 3, (10, 26)),
    (Dim("q", 7, 11, 40) + 3, (10, 43)),  # an equal expression, of another range
    (Q % 8 + 1, (1, 8)),  # 8 and 8 at the ends of q
    (Dim("p", 2, 3, 9) * Q, (14, 207)),
    (LONG % 8 + 1, (-torch.inf, torch.inf)),  # too many to try
    (LONG, (1, 1 << 40)),
]


@pytest.mark.parametrize(("size", "ends"), ENDS, ids=str)
def test_ends_are_of_all_sizes(size: Size, ends: tuple[float, float]) -> None:
    found = []

    class Net(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found.append(ends_of(2 * x.shape[0] - 1))
            return x + 1

    free = torch.export.Dim.DYNAMIC
    with declaring({("x", 0): size}):
        torch.export.export(Net(), (torch.ones(5),), dynamic_shapes=({0: free},), strict=False)
    assert found[-1] == (2 * ends[0] - 1, 2 * ends[1] - 1)
