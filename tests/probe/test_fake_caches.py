"""A function's cache keeps no tensor of a run without values."""

from __future__ import annotations

import functools

import torch

from pipeline.probe.torch_runner import TorchProbe
from pipeline.spec.dims import Dim
from pipeline.spec.tensors import Input


def test_a_run_as_shapes_leaves_no_tensor_in_a_cache() -> None:
    # made here, because the tests' conftest hides older objects from gc
    @functools.lru_cache(maxsize=8)
    def table(size: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        steps = torch.arange(size).float()
        return steps, {"log": steps.log1p()}

    @functools.lru_cache(maxsize=8)
    def name(size: int) -> str:
        return f"of {size}"

    class Net(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            name(x.shape[0])
            steps, more = table(x.shape[0])
            return x + steps + more["log"]

    net = Net()
    probe = TorchProbe((Input("x", (Dim("n", 2, 4, 8),)),), net, 0)
    for size in (4, 5):
        assert probe.shapes({"n": size}) is True
        assert table.cache_info().currsize == 0
        found = net(torch.zeros(size))
        assert type(found) is torch.Tensor and found.tolist()[0] == 0
    assert name.cache_info().currsize == 2  # the other caches stay
