"""Seeded random weights for models without a weights file."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

Module = TypeVar("Module", bound=torch.nn.Module)


def seeded(make: Callable[[], Module], seed: int) -> Module:
    """What `make` returns under this seed, in eval mode; torch's own generator stays as it was.

    Every vector (a bias, a norm's scale) is moved off its start: norms that are 1 and 0 all
    over and biases that are 0 would hide a mix-up from the comparison.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        module = make()
        for parameter in module.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return module.eval()
