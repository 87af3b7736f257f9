"""Adaptive pools to sizes above 1: torch's exporter bakes the example's window into the graph.

Row i of the output covers the input's rows from ``i * in // out`` up to, not including,
``ceil((i + 1) * in / out)`` (aten/src/ATen/native/AdaptivePooling.h). The number of rows depends on
the size, so no pool with a fixed kernel is equal. ``interpolate(mode="area")`` is the same op.

And average pools with a divisor of their own, which the exporter leaves out (torch 2.13).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from onnxscript.function_libs.torch_lib.ops import nn  # the exporter's own; torch 2.13
from torch.nn import functional

from pipeline.errors import ExportError
from pipeline.export.ops.axes import apply_matrices, in_float32
from pipeline.export.ops.sizes import (
    FLOAT,
    Size,
    Value,
    as_size,
    floats,
    ints,
    op,
    rank,
    size,
    steps,
    tensor,
)
from pipeline.plugins.base import DOMAIN

aten: Any = torch.ops.aten


def adaptive_avg_pool(x: Value, output_size: Sequence[Any]) -> Value:
    """Averages over the intervals of every axis, as a product with one matrix for each axis.

    A NaN or an infinity in the input reaches every output of its row and column (0 * inf is NaN).
    In torch it reaches only the windows that contain it.
    """
    spatial = len(output_size)
    outs = [as_size(s) for s in output_size]
    ins = [size(x, axis - spatial) for axis in range(spatial)]
    batched = rank(x) == spatial + 2
    if batched and all(isinstance(out, int) and out == 1 for out in outs):
        return op.GlobalAveragePool(x)
    if batched and _all_ints([*ins, *outs]):
        kernel = [i // o for i, o in zip(ins, outs, strict=True)]
        if [k * o for k, o in zip(kernel, outs, strict=True)] == ins:
            return op.AveragePool(x, kernel_shape=kernel, strides=kernel)
    pairs = zip(ins, outs, strict=True)
    matrices = [None if _same(i, o) else _averages(i, o) for i, o in pairs]
    return in_float32(x, lambda y: apply_matrices(y, matrices))


@torch.library.custom_op(f"{DOMAIN}::sized_max_pool", mutates_args=())
def sized_max_pool(x: torch.Tensor, output_size: Sequence[int]) -> torch.Tensor:
    """``adaptive_max_pool{1,2,3}d`` without indices, to symbolic sizes.

    torch's own ops take numbers only (`pipeline.export.torch_2_13.symbolic_steps` calls this one).

    Args:
        x: the tensor, [n, c, ...] or [c, ...].
        output_size: the new size of each of the last axes.
    """
    pool = getattr(functional, f"adaptive_max_pool{len(output_size)}d")
    result: torch.Tensor = pool(x, list(output_size))
    return result


@sized_max_pool.register_fake
def _(x: torch.Tensor, output_size: Sequence[int]) -> torch.Tensor:
    return x.new_empty((*x.shape[: -len(output_size)], *output_size))


def sized_max_values(x: Value, output_size: Sequence[Any]) -> Value:
    """``trt_pipeline::sized_max_pool``."""
    return adaptive_max_pool(x, output_size)[0]


def adaptive_max_pool(x: Value, output_size: Sequence[Any]) -> tuple[Value, Value]:
    """The largest values over the intervals, axis by axis, without indices.

    The rows of each interval are gathered side by side. A shorter interval repeats its last row,
    so no mask is needed. This needs about the input's memory again. The second output is a
    placeholder: `pipeline.export.ops.exporter` refuses programs that read it.
    """
    spatial = len(output_size)
    outs = [as_size(s) for s in output_size]
    placeholder = op.Constant(value_int=-1)
    if rank(x) == spatial + 2 and _all_ints(outs) and all(out == 1 for out in outs):
        return op.GlobalMaxPool(x), placeholder
    first = rank(x) - spatial
    for n, out in enumerate(outs):
        axis = first + n
        rows = op.Gather(x, _windows(size(x, n - spatial), out), axis=axis)
        x = _shaped(op.ReduceMax(rows, ints(axis + 1), keepdims=0), x)
    return x, placeholder


def avg_pool2d(x: Value, kernel_size: Sequence[int], *rest: Any) -> Value:
    """``avg_pool2d``; see `_avg_pool`."""
    return _avg_pool(nn.aten_avg_pool2d, 2, x, kernel_size, rest)


def avg_pool3d(x: Value, kernel_size: Sequence[int], *rest: Any) -> Value:
    """``avg_pool3d``; see `_avg_pool`."""
    return _avg_pool(nn.aten_avg_pool3d, 3, x, kernel_size, rest)


def _avg_pool(
    pool: Callable[..., Value], axes: int, x: Value, kernel_size: Sequence[int], rest: Sequence[Any]
) -> Value:
    """The sum of each window, divided by a given divisor or by the number of its elements.

    Args:
        pool: The exporter's translation, which leaves the divisor out.
        axes: The number of axes of a window.
        x: The tensor, [n, c, ...] or [c, ...].
        kernel_size: The window.
        rest: torch's other arguments: stride, padding, ceil_mode, count_include_pad, divisor.

    Raises:
        ExportError: A divisor with `ceil_mode`, whose last windows may be smaller.
    """
    defaults: tuple[Any, ...] = ((), [0] * axes, False, True, None)
    stride, padding, ceil_mode, _, divisor = (*rest, *defaults[len(rest) :])
    if divisor is None:
        return pool(x, kernel_size, *rest)
    if ceil_mode:
        raise ExportError(
            f"avg_pool{axes}d with divisor_override and ceil_mode can't be exported; leave "
            "ceil_mode out, or pad before the pool"
        )
    kernel = [*kernel_size] * (axes if len(kernel_size) == 1 else 1)
    mean = pool(x, kernel, stride, padding, False, True)
    return op.Mul(mean, op.CastLike(floats(math.prod(kernel) / divisor), mean))


def _shaped(new: Value, old: Value) -> Value:
    """Sets the shape that the exporter can't infer, for the axes that follow."""
    if new.shape is None:
        new.shape = old.shape
    return new


def _all_ints(sizes: Sequence[Size]) -> bool:
    return all(isinstance(s, int) for s in sizes)


def _same(one: Size, other: Size) -> bool:
    return isinstance(one, int) and isinstance(other, int) and one == other


def _intervals(length: Size, out: Size) -> tuple[Value, Value]:
    """The first and last row of each interval, int64 [out, 1] each."""
    i = op.Unsqueeze(steps(out), ints(1))
    products = op.Mul(i, tensor(length))
    first = op.Div(products, tensor(out))
    last = op.Div(op.Add(products, op.Sub(tensor(length), ints(1))), tensor(out))
    return first, last


def _averages(length: Size, out: Size) -> Value:
    """The averaging matrix, float32 [out, in]."""
    first, last = _intervals(length, out)
    row = op.Unsqueeze(steps(length), ints(0))
    inside = op.And(op.GreaterOrEqual(row, first), op.LessOrEqual(row, last))
    count = op.Cast(op.Add(op.Sub(last, first), ints(1)), to=FLOAT)
    return op.Div(op.Cast(inside, to=FLOAT), count)


def _windows(length: Size, out: Size) -> Value:
    """The rows that each output reads, the last one repeated: int64 [out, longest]."""
    first, last = _intervals(length, out)
    if isinstance(length, int) and isinstance(out, int):
        longest: Size = -(-length // out) + 1
    else:  # ceil(in / out) + 1 is enough: an interval may begin and end inside a row
        above = op.Sub(op.Add(tensor(length), tensor(out)), ints(1))
        longest = op.Add(op.Div(above, tensor(out)), ints(1))
    row = op.Add(first, op.Unsqueeze(steps(longest), ints(0)))
    return op.Min(row, last)


TRANSLATIONS: dict[Any, Callable[..., Any]] = {
    aten.adaptive_avg_pool1d.default: adaptive_avg_pool,
    aten.adaptive_avg_pool2d.default: adaptive_avg_pool,
    aten.adaptive_avg_pool3d.default: adaptive_avg_pool,
    aten.adaptive_max_pool1d.default: adaptive_max_pool,
    aten.adaptive_max_pool2d.default: adaptive_max_pool,
    aten.adaptive_max_pool3d.default: adaptive_max_pool,
    aten.avg_pool2d.default: avg_pool2d,
    aten.avg_pool3d.default: avg_pool3d,
    torch.ops.trt_pipeline.sized_max_pool.default: sized_max_values,
}
WITHOUT_INDICES = frozenset(t for t, f in TRANSLATIONS.items() if f is adaptive_max_pool)
