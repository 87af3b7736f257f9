"""A function's cache keeps no tensor of a run without values."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable
from pathlib import Path

import torch

from pipeline.convert.driver import run_export
from pipeline.probe.eager import EagerModule, inner_sizes
from pipeline.probe.torch_runner import TorchProbe
from pipeline.spec.config import Config
from pipeline.spec.dims import Dim
from pipeline.spec.model import Input, ModelSpec, Output


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


def test_neither_does_a_look_at_sizes_or_a_trace(tmp_path: Path) -> None:
    @functools.lru_cache(maxsize=8)
    def steps(size: int) -> torch.Tensor:
        return torch.arange(size).float()

    class Net(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + steps(6)

    net, inputs = Net(), (Input("x", (Dim("n", 2, 4, 8), 6)),)
    assert inner_sizes(EagerModule(inputs, net, 0), {"n": 4})
    assert steps.cache_info().currsize == 0
    probe = TorchProbe(inputs, net, 0)
    net(torch.zeros(2, 6))
    assert probe.shapes({"n": 4}) is True  # with the cached tensor
    steps.cache_clear()
    inner_sizes(EagerModule(inputs, net, 0), {"n": 5})
    assert steps.cache_info().currsize == 0  # also if an object counted as many misses before
    run_export(Config(ModelSpec("m", lambda _: net, inputs, (Output("y"),)), out=tmp_path / "m"))
    assert type(steps(6)) is torch.Tensor


def test_caches_in_a_cache_keep_no_tensor_either() -> None:
    @functools.lru_cache(maxsize=8)
    def steps_for(kind: int) -> Callable[[int], torch.Tensor]:
        @functools.lru_cache(maxsize=8)
        def steps(size: int) -> torch.Tensor:
            return torch.arange(size) * float(kind)

        return steps

    class Net(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + steps_for(x.shape[0])(6)

    eager = EagerModule((Input("x", (Dim("n", 2, 4, 8), 6)),), Net(), 0)
    for size in (4, 5, 6, 7):  # each run makes a cache
        assert inner_sizes(eager, {"n": size})
    assert [type(steps_for(size)(6)) for size in (4, 5, 6, 7)] == [torch.Tensor] * 4


def test_a_conversion_keeps_no_model_alive(tmp_path: Path) -> None:
    models: list[weakref.ref[torch.nn.Module]] = []

    class Net(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            # the search for the branch caches what it knows of the model
            if x.shape[0] > 3:
                x = torch.nn.functional.pad(x, (0, 0, 0, 1))
            return x * 2

    def make(_: object) -> torch.nn.Module:
        net = Net()
        models.append(weakref.ref(net))
        return net

    inputs = (Input("x", (Dim("n", 2, 4, 8), 6)),)
    for name in ("first", "second"):
        run_export(Config(ModelSpec(name, make, inputs, (Output("y"),)), out=tmp_path / name))
    gc.collect()
    assert [made() for made in models] == [None] * len(models) != []
