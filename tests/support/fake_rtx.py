"""A pretended TensorRT-RTX on a pretended card, so that `pipeline.load` runs a real artifact.

The artifact's model has to be `Net`, which is the network of `fake_tensorrt`. A runtime cache holds
the shapes that ran, one line each, after a line with the card's name. `deserialize` refuses a cache
of another card, or one that is cut short, as the real one does.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fake_cuda import PretendedCuda
from fake_tensorrt import NewerContext, PretendedPlan, tensorrt

from pipeline.compare import stage
from pipeline.machine import gpu
from pipeline.machine.gpu import Gpu
from pipeline.runtime import cuda as _cuda
from pipeline.runtime import engine as runtime

TENSORS = {"x": 0, "z": 0, "y": 1, "s": 1}
_END = "end"


class Net(torch.nn.Module):
    """y = 3 x - z, and s = the sum of each row of 3 x."""

    def forward(self, x: torch.Tensor, z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return 3 * x - z, (3 * x).sum(1)


def net() -> torch.nn.Module:
    """The factory of the source ``fake_rtx.py:net``."""
    return Net()


class Cache:
    """A runtime cache."""

    def __init__(self, card: str) -> None:
        self.card, self.shapes = card, set[str]()

    def serialize(self) -> bytes:
        return "\n".join([self.card, *sorted(self.shapes), _END]).encode()

    def deserialize(self, blob: bytes) -> bool:
        card, *shapes = blob.decode(errors="replace").split("\n")
        if card != self.card or not shapes or shapes.pop() != _END:
            return False
        self.shapes = set(shapes)
        return True


class RuntimeConfig:
    """The settings of a run."""

    dynamic_shapes_kernel_specialization_strategy: str | None = None
    cache: Cache | None = None
    strategy: int | None = None

    def __init__(self, card: str) -> None:
        self.card = card

    def create_runtime_cache(self) -> Cache:
        return Cache(self.card)

    def set_runtime_cache(self, cache: Cache) -> bool:
        self.cache = cache
        return True

    def set_execution_context_allocation_strategy(self, strategy: int) -> None:
        self.strategy = strategy


class RtxContext(NewerContext):
    """A context that compiles a kernel for each new shape."""

    def __init__(self, cuda: PretendedCuda, config: RuntimeConfig | None) -> None:
        super().__init__(cuda, TENSORS)
        self.config = config

    def execute_async_v3(self, stream: int) -> bool:
        if self.config is not None and self.config.cache is not None:
            self.config.cache.shapes.add("x".join(map(str, self.shapes["x"])))
        return super().execute_async_v3(stream)


class RtxPlan(PretendedPlan):
    """A plan that keeps the last settings of its contexts."""

    def __init__(self, cuda: PretendedCuda, card: Gpu) -> None:
        super().__init__(cuda, TENSORS)
        self.card, self.config = card, None

    def create_runtime_config(self) -> RuntimeConfig:
        return RuntimeConfig(self.card.name)

    def create_execution_context(self, how: Any) -> RtxContext:
        self.config = how if isinstance(how, RuntimeConfig) else None
        assert self.config is None or self.config.strategy == 1
        return RtxContext(self.cuda, self.config)


def pretend(patch: pytest.MonkeyPatch, cuda: PretendedCuda, card: Gpu) -> RtxPlan:
    """Makes `pipeline.load` find the card, and TensorRT-RTX's module there. Returns the plan."""
    plan = RtxPlan(cuda, card)
    module = tensorrt(cuda, TENSORS, newer=True)
    module.__name__ = "tensorrt_rtx"
    module.Runtime = lambda _: SimpleNamespace(deserialize_cuda_engine=lambda _: plan)
    module.DynamicShapesKernelSpecializationStrategy = SimpleNamespace(
        LAZY="LAZY", EAGER="EAGER", NONE="NONE"
    )
    patch.setitem(sys.modules, "tensorrt_rtx", module)  # type: ignore[arg-type]
    for finder in (gpu, runtime, stage):
        patch.setattr(finder, "find_gpu", lambda _=0: card)
    patch.setattr(_cuda, "_gpu", lambda _: card)
    return plan


def right(engine: Any, b: int, w: int) -> None:
    """Runs an engine, and checks its numbers."""
    random = np.random.default_rng(b * 100 + w)
    x, z = (random.random(shape, np.float32) for shape in ((b, w), (w,)))
    got = engine(x=x, z=z)
    assert np.allclose(got["y"], 3 * x - z)
    assert np.allclose(got["s"], (3 * x).sum(1))
