"""Runs a torch module at sizes, with values or as shapes only."""

from __future__ import annotations

import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from pipeline.probe.eager import example_args, model_line, quiet
from pipeline.probe.fake_caches import FakeCaches
from pipeline.probe.held_values import is_plain
from pipeline.probe.runs import refusal
from pipeline.probe.state import ModuleState
from pipeline.spec.dims import shape_at
from pipeline.spec.rules import Refusal
from pipeline.spec.tensors import Input

_TORCH = str(Path(torch.__file__).parent)
# failures of FakeTensorMode, not of the model
_UNKNOWN = tuple(
    getattr(fake_tensor, name)
    for name in (
        "DataDependentOutputException",
        "DynamicOutputShapeException",
        "UnsupportedFakeTensorException",
        "UnsupportedOperatorException",
    )
    if hasattr(fake_tensor, name)
)


class TorchProbe:
    """Runs a torch module; see `pipeline.probe.runs.SizeProbe`.

    Every run begins with the module as it was given: what it keeps does not reach the next run.

    Args:
        inputs: The module's inputs, in order.
        module: The module, called with one tensor for each input.
        seed: The seed of the inputs' values.
    """

    def __init__(self, inputs: Sequence[Input], module: torch.nn.Module, seed: int) -> None:
        self._inputs, self._module, self._seed = inputs, module, seed
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._weights: dict[str, torch.Tensor] | None = None
        self._known: list[Any] = []
        self._state = ModuleState(module)
        self._caches = FakeCaches()

    def clock(self) -> float:
        return time.thread_time()  # what else the machine does costs none of it

    def run(self, sizes: Mapping[str, int]) -> None:
        with torch.no_grad(), quiet(), self._state.restored():
            self._module(*example_args(self._inputs, self._seed, sizes))

    def shapes(self, sizes: Mapping[str, int]) -> bool | Refusal | None:
        try:
            with torch.no_grad(), quiet(), self._state.restored(), self._fake:
                args = tuple(
                    torch.empty(
                        shape_at(i.shape, sizes),
                        dtype=torch.from_numpy(np.empty(0, i.dtype)).dtype,
                    )
                    for i in self._inputs
                )
                torch.func.functional_call(self._module, self._fake_weights(), args)
        except _UNKNOWN:
            return None
        except Exception as error:
            return refusal(sizes, error, self.line(error))
        finally:
            self._caches.clear()
        return True

    def _fake_weights(self) -> dict[str, torch.Tensor]:
        """The weights as shapes, kept: torch would make each one again at every use.

        They are made again if a run changed one.
        """
        if self._weights is None or self._known != _facts(self._weights):
            named = [*self._module.named_parameters(), *self._module.named_buffers()]
            plain = [(name, t) for name, t in named if is_plain(t)]
            self._weights = {name: self._fake.from_tensor(t) for name, t in plain}
            self._known = _facts(self._weights)
        return self._weights

    def line(self, error: Exception) -> str:
        return model_line(traceback.extract_tb(error.__traceback__), _TORCH)


def _facts(weights: Mapping[str, torch.Tensor]) -> list[Any]:
    """What a run may change in a tensor without values."""
    return [(t.shape, t.stride(), t.dtype, t._version) for t in weights.values()]
