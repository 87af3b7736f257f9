"""Takes the result's shape of batch_norm in eval mode from its input, instead of computing it.

torch finds the shape by computing with symbolic sizes, in each run of a module. The sizes of a deep
convolution network are long expressions, so this takes long.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._decomp import decomposition_table
from torch._subclasses import fake_tensor
from torch._subclasses.fake_impls import get_fast_op_impls

from pipeline.export.exchange import Exchange

_aten = torch.ops.aten
_NORM = _aten._native_batch_norm_legit_no_training.default


def _norm(
    mode: fake_tensor.FakeTensorMode,
    source: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    variance: torch.Tensor,
    *numbers: float,
) -> Any:
    """torch's fake kernel: the result, and two empty tensors in place of the statistics."""
    given = [t for t in (weight, bias, mean, variance) if t is not None]
    with mode:
        if not _plain(source, given):
            return decomposition_table[_NORM](source, weight, bias, mean, variance, *numbers)
        empty = source.new_zeros((0,))
        return _aten.empty_like.default(source), empty, empty.clone()


def _plain(source: torch.Tensor, given: list[torch.Tensor]) -> bool:
    """True if the arithmetic only gives another tensor like the first, on the CPU."""
    channels = source.shape[1] if source.dim() > 1 else None
    return (
        source.device.type == "cpu"
        and type(channels) is int
        and all(tuple(t.shape) == (channels,) and t.device == source.device for t in given)
    )


@functools.cache
def _kernels() -> dict[Any, Callable[..., Any]]:
    return {**get_fast_op_impls(), _NORM: _norm}


_exchange = Exchange({(fake_tensor, get_fast_op_impls.__name__): _kernels})


def from_input() -> AbstractContextManager[None]:
    """While it is active, the shape of batch_norm in eval mode is that of its input."""
    return _exchange.used()
