"""Gives the shapes of the results of norms, activations, interpolation and grid_sample at once.

torch finds them by computing with symbolic sizes, one small op after another, in each run of a
module. The sizes of a deep convolution network are long expressions, so this takes long. But these
ops have no size of their own: the result is like the input, or has the size that the model or the
grid gives.

What is not plain (other types, a dynamic number of channels, weights that do not fit) is left to
torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._decomp import decomposition_table
from torch._prims_common import compute_elementwise_output_strides, suggest_memory_format
from torch._subclasses import fake_tensor
from torch._subclasses.fake_impls import get_fast_op_impls
from torch.fx.experimental.symbolic_shapes import guard_or_true

from pipeline.export.exchange import Exchange

_aten = torch.ops.aten
_NORM = _aten._native_batch_norm_legit_no_training.default
_LAYER_NORM = _aten.native_layer_norm.default
_GROUP_NORM = _aten.native_group_norm.default
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

# their other arguments are numbers
ELEMENTWISE = (
    _aten.abs.default, _aten.clamp.default, _aten.clamp_max.default, _aten.clamp_min.default,
    _aten.elu.default, _aten.erf.default, _aten.exp.default, _aten.gelu.default,
    _aten.hardsigmoid.default, _aten.hardswish.default, _aten.hardtanh.default,
    _aten.leaky_relu.default, _aten.mish.default, _aten.neg.default, _aten.relu.default,
    _aten.rsqrt.default, _aten.sigmoid.default, _aten.silu.default, _aten.softplus.default,
    _aten.sqrt.default, _aten.tanh.default,
)  # fmt: skip
INTERPOLATION = (
    _aten.upsample_bilinear2d.vec,
    _aten.upsample_trilinear3d.vec,
    _aten.upsample_bicubic2d.vec,
)


def _batch_norm(
    source: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    variance: torch.Tensor,
    *numbers: float,  # noqa: ARG001
) -> Any:
    """The result, and two empty tensors in place of the statistics."""
    if source.dim() < 2 or not _fit([weight, bias, mean, variance], source.shape[1:2], source):
        return NotImplemented
    empty = source.new_zeros((0,))
    return _aten.empty_like.default(source), empty, empty.clone()


def _layer_norm(
    source: torch.Tensor,
    shape: Sequence[int],
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    *numbers: float,  # noqa: ARG001
) -> Any:
    """The result, which is contiguous, and the two statistics."""
    first = source.dim() - len(shape)
    own = source.shape[first:] if 0 <= first < source.dim() else None
    if own is None or tuple(shape) != own or not _fit([weight, bias], own, source):
        return NotImplemented
    reduced = [*source.shape[:first], *([1] * len(shape))]
    return source.new_empty(source.shape), source.new_empty(reduced), source.new_empty(reduced)


def _group_norm(
    source: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    batch: int,
    channels: int,
    inner: int,  # noqa: ARG001
    groups: int,
    *numbers: float,  # noqa: ARG001
) -> Any:
    """The result, and the two statistics."""
    own = source.shape[1:2] if source.dim() > 2 else ()
    if weight is None or tuple(own) != (channels,) or channels % groups:
        return NotImplemented
    if not _fit([weight, bias], own, source):
        return NotImplemented
    statistics = [batch, groups]
    return (
        _aten.empty_like.default(source),
        source.new_empty(statistics),
        source.new_empty(statistics),
    )


def _elementwise(source: Any, *args: Any, **kwargs: Any) -> Any:
    """The result of an op that changes each element by itself."""
    if any(isinstance(arg, torch.Tensor) for arg in (*args, *kwargs.values())):
        return NotImplemented
    return _aten.empty_like.default(source) if _plain(source) else NotImplemented


def _clone(source: Any, *, memory_format: torch.memory_format | None = None) -> Any:
    if not _plain(source):
        return NotImplemented
    if memory_format is torch.contiguous_format:
        return source.new_empty(source.shape)
    if memory_format not in (None, torch.preserve_format):
        return NotImplemented
    return source.new_empty_strided(source.shape, compute_elementwise_output_strides(source))


def _interpolated(source: Any, size: Sequence[Any] | None, *args: Any) -> Any:  # noqa: ARG001
    """The result of an interpolation to a size that the model gave."""
    if size is None or not _plain(source) or len(size) != source.dim() - 2:
        return NotImplemented
    made = source.new_empty([*source.shape[:2], *size])
    return made.contiguous(memory_format=suggest_memory_format(source))


def _sampled_2d(
    source: Any,
    grid: Any,
    interpolation_mode: int,
    padding_mode: int,
    align_corners: bool,  # noqa: ARG001
) -> Any:
    """The result of grid_sample: contiguous, with the grid's height and width."""
    if not (_plain(source) and _plain(grid)) or source.dtype != grid.dtype:
        return NotImplemented
    if source.dim() != 4 or grid.dim() != 4 or guard_or_true(source.shape[0] != grid.shape[0]):
        return NotImplemented
    if type(grid.shape[3]) is not int or grid.shape[3] != 2:
        return NotImplemented
    if {interpolation_mode, padding_mode} - {0, 1, 2}:
        return NotImplemented
    return source.new_empty([*source.shape[:2], *grid.shape[1:3]])


def _sampled(source: Any, grid: Any, *args: Any) -> Any:
    """The same, for the op of images and volumes."""
    made = _sampled_2d(source, grid, *args)
    if made is not NotImplemented:
        return made
    own = _aten.grid_sampler_2d if source.dim() == 4 else _aten.grid_sampler_3d
    return own.default(source, grid, *args)


def _plain(source: torch.Tensor) -> bool:
    return source.device.type == "cpu" and source.dtype in _FLOATS


def _fit(given: Sequence[torch.Tensor | None], shape: Sequence[Any], source: torch.Tensor) -> bool:
    """True if the arithmetic only gives another tensor like the first."""
    return (
        _plain(source)
        and all(type(size) is int for size in shape)
        and all(
            tuple(t.shape) == tuple(shape) and t.device == source.device
            for t in given
            if t is not None
        )
    )


def _kernel(op: Any, known: Callable[..., Any]) -> Callable[..., Any]:
    """torch's fake kernel of an op: what is known of the result, or what torch computes."""

    def kernel(mode: fake_tensor.FakeTensorMode, *args: Any, **kwargs: Any) -> Any:
        with mode:
            made = known(*args, **kwargs)
            return decomposition_table[op](*args, **kwargs) if made is NotImplemented else made

    return kernel


@functools.cache
def _kernels() -> dict[Any, Callable[..., Any]]:
    own: dict[Any, Callable[..., Any]] = {
        _NORM: _batch_norm,
        _LAYER_NORM: _layer_norm,
        _GROUP_NORM: _group_norm,
        _aten.clone.default: _clone,
        _aten.grid_sampler.default: _sampled,
        _aten.grid_sampler_2d.default: _sampled_2d,
        **dict.fromkeys(ELEMENTWISE, _elementwise),
        **dict.fromkeys(INTERPOLATION, _interpolated),
    }
    return {**get_fast_op_impls(), **{op: _kernel(op, known) for op, known in own.items()}}


_exchange = Exchange({(fake_tensor, get_fast_op_impls.__name__): _kernels})


def at_once() -> AbstractContextManager[None]:
    """While it is active, torch takes these shapes from what is known of the ops."""
    return _exchange.used()
