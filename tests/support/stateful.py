"""Modules that keep something between calls: some remember it, others only cache it."""

from __future__ import annotations

import functools
import itertools
import random
import types

import numpy as np
import torch
from torch import nn

CALLS = 0


class Plain(nn.Module):
    """Keeps nothing."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        return self.norm(x) * 2


class LargestSize(nn.Module):
    """Doubles its scale at each size above all earlier ones, as dynamic NTK scaling does."""

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.scale = 64, 1.0

    def forward(self, x):
        if x.shape[-1] > self.seen:
            self.scale, self.seen = self.scale * 2, x.shape[-1]
        return x * self.scale


class Latch(nn.Module):
    """Its first size is what later ones are scaled by, if they are smaller."""

    def __init__(self) -> None:
        super().__init__()
        self.grid = None

    def forward(self, x):
        n = x.shape[-1]
        if self.grid is None:
            self.grid = n
        return x * (1.0 if n >= self.grid else n / self.grid)


class GrowingGrid(nn.Module):
    """A grid from 0 to 1 over the largest size so far."""

    def __init__(self) -> None:
        super().__init__()
        self.grid = None

    def forward(self, x):
        w = x.shape[-1]
        if self.grid is None or self.grid.shape[0] < w:
            self.grid = torch.linspace(0, 1, w)
        return x * self.grid[:w]


class LargestSizeUntilASmallOne(nn.Module):
    """As dynamic NTK scaling of transformers: a small size puts the scale back."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 200

    def forward(self, x):
        self.seen = 200 if x.shape[-1] < 200 else max(self.seen, x.shape[-1])
        return x * (self.seen / 200)


class FirstSize(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.size = None

    def forward(self, x):
        if self.size is None:
            self.size = x.shape[-1]
        return x * (self.size / 64)


class FirstMean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mean = None

    def forward(self, x):
        if self.mean is None:
            self.mean = x.mean()
        return x - self.mean


class FirstSizeAsTensor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("size", torch.zeros(()))

    def forward(self, x):
        if self.size == 0:
            self.size.fill_(float(x.shape[-1]))
        return x / self.size


class HundredCalls(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x if self.calls <= 100 else -x


class HundredEntries(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.log = []

    def forward(self, x):
        self.log.append(1)
        return x if len(self.log) <= 100 else -x


class RunningMean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x):
        self.mean.mul_(0.9).add_(0.1 * x.mean())
        return x - self.mean


class RunningMeanOfData(nn.Module):
    """Changes a tensor around its version counter."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(())

    def forward(self, x):
        self.mean.data.add_(x.mean())
        return x - self.mean


class GrowingWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x):
        self.weight.data *= 1.5
        return x * self.weight


class Momentum(nn.Module):
    """Keeps its values in a NumPy array of a nested object."""

    def __init__(self) -> None:
        super().__init__()
        self.state = types.SimpleNamespace(mean=np.zeros(1, np.float32))

    def forward(self, x):
        self.state.mean += float(x.abs().max())
        return x * float(self.state.mean[0])


class OwnObject:
    __slots__ = ("largest",)

    def __init__(self) -> None:
        self.largest = 1


class InSlots(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own = OwnObject()

    def forward(self, x):
        self.own.largest = max(self.own.largest, x.shape[-1])
        return x / self.own.largest


class InTheClass(nn.Module):
    largest = 1

    def forward(self, x):
        type(self).largest = max(type(self).largest, x.shape[-1])
        return x / self.largest


class InAGlobal(nn.Module):
    def forward(self, x):
        global CALLS  # noqa: PLW0603
        CALLS += 1
        return x if CALLS <= 100 else -x


def in_a_closure():
    calls = 0

    class InAClosure(nn.Module):
        def forward(self, x):
            nonlocal calls
            calls += 1
            return x if calls <= 100 else -x

    return InAClosure()


class Saturated(nn.Module):
    """Its iterator counts, and no later call gives another output."""

    def __init__(self) -> None:
        super().__init__()
        self.counter = itertools.count(1)

    def forward(self, x):
        return x * min(next(self.counter), 1)


class InAGenerator(nn.Module):
    """Its generator gives another number after 300 calls only."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = (1 if n < 300 else 2 for n in range(1000))

    def forward(self, x):
        return x * next(self.factors)


class InAListsIterator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factors = iter([1] * 300 + [2] * 300)

    def forward(self, x):
        return x * next(self.factors)


class LargestValue(nn.Module):
    """Every call writes to a buffer. Only a value beyond 1000 changes it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.tensor(1000.0))

    def forward(self, x):
        y = x / self.largest
        self.largest.copy_(torch.maximum(self.largest, x.abs().max()))
        return y


class InAnIterator(nn.Module):
    """Its state is an object from C."""

    def __init__(self) -> None:
        super().__init__()
        self.counter = itertools.count(1)

    def forward(self, x):
        return x * next(self.counter)


class InAnArgumentsDefault(nn.Module):
    def forward(self, x, seen=[]):  # noqa: B006
        seen.append(x.shape[-1])
        return x * max(seen)


class Hooked(nn.Module):
    """Adds a hook at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Identity()

    def forward(self, x):
        self.inner.register_forward_hook(lambda _, __, out: out + 1)
        return self.inner(x)


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([FirstSize()])

    def forward(self, x):
        return self.parts[0](x)


class Random(nn.Module):
    def forward(self, x):
        return x + torch.rand(())


class RandomOfPython(nn.Module):
    def forward(self, x):
        return x + random.random()


class OwnGenerator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.random = torch.Generator().manual_seed(0)

    def forward(self, x):
        return x + torch.rand((), generator=self.random)


class GridCache(nn.Module):
    """Keeps one grid, and makes it anew for another size."""

    def __init__(self) -> None:
        super().__init__()
        self.grid = None

    def forward(self, x):
        if self.grid is None or self.grid.shape[0] != x.shape[-1]:
            self.grid = torch.arange(x.shape[-1], dtype=torch.float32)
        return x + self.grid


class TableOfGrids(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.grids = {}

    def forward(self, x):
        size = x.shape[-1]
        if size not in self.grids:
            self.grids[size] = torch.arange(size, dtype=torch.float32)
        return x + self.grids[size]


@functools.lru_cache
def _grid(size: int) -> torch.Tensor:
    return torch.arange(size, dtype=torch.float32)


class CachedFunction(nn.Module):
    def forward(self, x):
        return x + _grid(x.shape[-1])


class HooksOnce(nn.Module):
    """Adds a hook at its first call, as models of transformers do to collect hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Identity()
        self.hooked = False

    def forward(self, x):
        if not self.hooked:
            self.inner.register_forward_hook(lambda *_: None)
            self.hooked = True
        return self.inner(x) * 2


class LastInput(nn.Module):
    """Keeps its last input and never reads it."""

    def forward(self, x):
        self.last = x
        return x * 2


class NewKeys(nn.Module):
    """Keeps a table whose keys are made anew at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = {}

    def forward(self, x):
        self.parts = {nn.Identity(): 1}
        return x * 2


class TransposedInPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.arange(1.0, 13).view(3, 4)

    def forward(self, x):
        self.table.t_()
        return x * self.table[1, 0]


class Lazy(nn.Module):
    """Has the values of its lazy layer, as after load_state_dict, but was not called."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LazyConv1d(3, 1)
        self.layer.load_state_dict({"weight": torch.ones(3, 4, 1), "bias": torch.ones(3)})

    def forward(self, x):
        return self.layer(x)


REMEMBERS = {
    "LargestSize": "seen", "LargestSizeUntilASmallOne": "seen", "FirstSize": "size",
    "Latch": "grid", "GrowingGrid": "grid",
    "FirstMean": "mean", "FirstSizeAsTensor": "size",
    "HundredCalls": "calls", "HundredEntries": "log", "RunningMean": "mean",
    "RunningMeanOfData": "mean", "GrowingWeight": "weight", "Momentum": "state.mean",
    "InSlots": "own.largest", "InTheClass": "InTheClass.largest", "InAGlobal": "CALLS",
    "in_a_closure": "calls", "InAnArgumentsDefault": "seen", "Hooked": "inner._forward_hooks",
    "Nested": "parts.0.size", "TransposedInPlace": "table",
}  # fmt: skip
ELSEWHERE = ("RandomOfPython", "OwnGenerator")
ITERATORS = {
    "InAnIterator": "counter", "Saturated": "counter", "InAGenerator": "factors",
    "InAListsIterator": "factors",
}  # fmt: skip
CACHES = {
    "GridCache": "grid", "TableOfGrids": "grids", "LastInput": "last", "NewKeys": "parts",
    "HooksOnce": "hooked,", "Lazy": "layer.__class__,",
}  # fmt: skip
NOTHING = ("Plain", "CachedFunction")
