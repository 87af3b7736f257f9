"""``take_along_dim`` and ``kron`` of tensors with symbolic sizes.

torch 2.13 makes numbers of the result's sizes in both. Here they are traced as ``gather``, and as a
product of broadcast tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true


def _take_along_dim(
    input: torch.Tensor, indices: torch.Tensor, dim: int | None = None, *, out: Any = None
) -> Any:
    if out is not None or not _symbolic(input, indices):
        return NotImplemented
    if dim is None:
        return input.reshape(-1).gather(0, indices.reshape(-1))
    if input.dim() != indices.dim():
        return NotImplemented
    dim = dim % input.dim()
    wide, long = list(input.shape), list(indices.shape)
    for axis, (size, other) in enumerate(zip(input.shape, indices.shape, strict=True)):
        if axis == dim or statically_known_true(size == other):
            continue
        if isinstance(size, int) and size == 1:
            wide[axis] = other
        elif isinstance(other, int) and other == 1:
            long[axis] = size
        else:
            return NotImplemented  # torch's own condition says that they are equal
    return input.expand(wide).gather(dim, indices.expand(long))


def _kron(input: torch.Tensor, other: torch.Tensor, *, out: Any = None) -> Any:
    if out is not None or not _symbolic(input, other):
        return NotImplemented
    axes = max(input.dim(), other.dim())
    first = input.reshape((1,) * (axes - input.dim()) + tuple(input.shape))
    second = other.reshape((1,) * (axes - other.dim()) + tuple(other.shape))
    sizes = [a * b for a, b in zip(first.shape, second.shape, strict=True)]
    for axis in range(axes):
        first, second = first.unsqueeze(2 * axis + 1), second.unsqueeze(2 * axis)
    return (first * second).reshape(sizes)


def _symbolic(*tensors: torch.Tensor) -> bool:
    return any(isinstance(size, torch.SymInt) for x in tensors for size in x.shape)


PRODUCTS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.take_along_dim: _take_along_dim,
    torch.Tensor.take_along_dim: _take_along_dim,
    torch.kron: _kron,
    torch.Tensor.kron: _kron,
}
