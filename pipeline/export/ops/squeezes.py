"""squeeze of an axis whose size follows an input (torch 2.13).

torch.export takes such a size for 2 or more, and keeps the axis. torch's exporter writes a Squeeze,
which fails at every size except 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from pipeline.export.ops.sizes import Value, ints, op, rank

aten: Any = torch.ops.aten


def squeeze(x: Value, dim: int | Sequence[int]) -> Value:
    """``squeeze.dim`` and ``squeeze.dims``: the axes that have 1 element at every size are dropped.

    Args:
        x: the tensor.
        dim: an axis, or some axes.
    """
    axes = [dim] if isinstance(dim, int) else list(dim)
    dropped = [n for n in axes if rank(x) and x.shape[n] == 1]
    return op.Squeeze(x, ints(*dropped)) if dropped else op.Identity(x)


TRANSLATIONS: dict[Any, Callable[..., Any]] = {
    aten.squeeze.dim: squeeze,
    aten.squeeze.dims: squeeze,
}
