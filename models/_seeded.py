"""Seeded random weights for models without a weights file."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

Module = TypeVar("Module", bound=torch.nn.Module)


def seeded(make: Callable[[], Module], seed: int) -> Module:
    """Calls `make` under this seed, and returns its module in eval mode.

    torch's own generator stays as it was. Every vector (a bias, a norm's scale) gets random values:
    scales that are all 1 and biases that are all 0 would hide a mix-up from the comparison.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        module = make()
        for parameter in module.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return module.eval()
