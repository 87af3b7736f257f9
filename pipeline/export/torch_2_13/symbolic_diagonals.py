"""Diagonals at an offset that follows a size, and fill_diagonal_ of symbolic sizes.

torch's schemas say ``int`` for the offset, and ``fill_diagonal_`` reads the sizes as numbers, so
torch.export makes numbers of the sizes (2.13). `pipeline.export.torch_2_13.symbolic_steps` calls
these functions in place of torch's. Each returns ``NotImplemented`` where torch's own serves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

Size = Any  # int or torch.SymInt
_most: Any = torch.sym_max


def _diagonal(input: torch.Tensor, offset: Size = 0, dim1: int = 0, dim2: int = 1) -> Any:
    """``diagonal``, as the main one of a part of the matrix: a view, so writes reach `input`."""
    if not isinstance(offset, torch.SymInt):
        return NotImplemented
    x = input.movedim((dim1, dim2), (-2, -1))
    return x[..., _most(-offset, 0) :, _most(offset, 0) :].diagonal(0, -2, -1)


def _linalg_diagonal(A: torch.Tensor, *, offset: Size = 0, dim1: int = -2, dim2: int = -1) -> Any:
    return _diagonal(A, offset, dim1, dim2)


def _diag_embed(input: torch.Tensor, offset: Size = 0, dim1: int = -2, dim2: int = -1) -> Any:
    """``diag_embed``: a square with the main diagonal, padded."""
    if not isinstance(offset, torch.SymInt):
        return NotImplemented
    down, right = _most(-offset, 0), _most(offset, 0)
    square = torch.diag_embed(input)
    return functional.pad(square, (right, down, down, right)).movedim((-2, -1), (dim1, dim2))


def _diag(input: torch.Tensor, diagonal: Size = 0) -> Any:
    if input.dim() == 1:
        return _diag_embed(input, diagonal)
    found = _diagonal(input, diagonal)
    return found if found is NotImplemented else found.clone()  # torch's is no view


def _diagflat(input: torch.Tensor, offset: Size = 0) -> Any:
    return _diag_embed(input.flatten(), offset)


def _fill_diagonal_(input: torch.Tensor, fill_value: float, wrap: bool = False) -> Any:
    """``fill_diagonal_`` of a matrix, by a mask."""
    sizes = any(isinstance(n, torch.SymInt) for n in input.shape)
    if wrap or input.dim() != 2 or not sizes:
        return NotImplemented
    rows, columns = (torch.arange(n, device=input.device) for n in input.shape)
    return input.masked_fill_(rows[:, None] == columns, fill_value)


DIAGONALS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.diagonal: _diagonal,
    torch.Tensor.diagonal: _diagonal,
    torch.linalg.diagonal: _linalg_diagonal,
    torch.diag: _diag,
    torch.Tensor.diag: _diag,
    torch.diag_embed: _diag_embed,
    torch.Tensor.diag_embed: _diag_embed,
    torch.diagflat: _diagflat,
    torch.Tensor.diagflat: _diagflat,
    torch.Tensor.fill_diagonal_: _fill_diagonal_,
}
