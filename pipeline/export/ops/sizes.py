"""Sizes and index ranges while torch's exporter translates a node to ONNX (opset 18).

A size is a Python int where the trace knows it, otherwise an int64 tensor of shape [1]. TensorRT
handles 2-D shape arithmetic badly, and each scalar needs a Squeeze.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import onnx
import torch
from onnxscript import opset18

from pipeline.errors import ExportError
from pipeline.export.declared import program_bounds

op: Any = opset18  # its annotations describe eager values, not the exporter's
Value = Any  # onnxscript's SymbolicTensor: an onnx_ir.Value that knows its dtype and shape
Size = Any  # int, or a Value [1] int64

INT64, FLOAT = onnx.TensorProto.INT64, onnx.TensorProto.FLOAT
_REACH = 1 << 15  # largest size at which a scale's fraction is checked, if max is unknown
_CHECKED = 1 << 26  # most sizes at which a scale's fraction is checked; 2 s
_CHUNK = 1 << 16  # of them at a time
TABLE = 1 << 13  # largest size in a table


def rank(x: Value) -> int:
    """The number of axes. Raises without a shape; torch 2.13 always gives one."""
    if x.shape is None:
        raise TypeError(f"{x.name} has no shape")
    return len(x.shape)


def size(x: Value, axis: int) -> Size:
    """One size of a tensor."""
    axis %= rank(x)
    known = x.shape[axis]
    return known if isinstance(known, int) else op.Shape(x, start=axis, end=axis + 1)


def as_size(value: Any) -> Size:
    """A size from an argument, which is an int, or a scalar or [1] tensor."""
    return value if isinstance(value, int) else op.Reshape(value, ints(-1))


def ints(*values: int) -> Value:
    """An int64 constant [len(values)]."""
    return op.Constant(value_ints=list(values))


def floats(value: float) -> Value:
    """A float32 scalar constant."""
    return op.Constant(value_float=float(np.float32(value)))


def number(value: float, dtype: int) -> Value:
    """A scalar constant of an ONNX dtype."""
    if dtype == onnx.TensorProto.BFLOAT16:
        return op.Cast(op.Constant(value_float=float(value)), to=dtype)
    kind = onnx.helper.tensor_dtype_to_np_dtype(dtype)
    return op.Constant(value=onnx.numpy_helper.from_array(np.array(value, kind)))


def tensor(value: Size) -> Value:
    """A size as a tensor [1] int64."""
    return ints(value) if isinstance(value, int) else value


def as_shape(*sizes: Size) -> Value:
    """A shape as a tensor [len(sizes)] int64."""
    return op.Concat(*map(tensor, sizes), axis=0)


def reshaped(x: Value, *sizes: Size) -> Value:
    """A tensor in another shape; one size may be -1."""
    return op.Reshape(x, as_shape(*sizes))


def as_float(value: Size) -> Value:
    """A size as float32 [1]."""
    return op.Cast(tensor(value), to=FLOAT)


def steps(length: Size) -> Value:
    """0, 1, ... length - 1: int64 [length]."""
    if isinstance(length, int):
        return ints(*range(length))
    zero, one = op.Constant(value_int=0), op.Constant(value_int=1)
    return op.Range(zero, op.Squeeze(length, ints(0)), one)


def source(value: Any) -> Any:
    """The node of torch's program that a value of the exporter comes from, or None."""
    producer = value.producer()
    return (value if producer is None else producer).meta.get("node")


def known(value: Any) -> Any:
    """Torch's record of a value of the exporter: a fake tensor, a SymInt, or None."""
    producer, node = value.producer(), source(value)
    fake = None if node is None else node.meta.get("val")
    if isinstance(fake, (list, tuple)):  # of an op with several outputs
        same = producer is not None and len(fake) == len(producer.outputs)
        fake = fake[value.index()] if same else None
    return fake


def bounds(size_: Any) -> tuple[float, float]:
    """The smallest and largest value of an int or a SymInt; infinite if nothing is known."""
    if not isinstance(size_, int | torch.SymInt):
        return -math.inf, math.inf
    return program_bounds(size_)


def largest(x: Value, axis: int) -> float:
    """The largest value that one size of a tensor can have."""
    fake = known(x)
    return bounds(fake.shape[axis])[1] if isinstance(fake, torch.Tensor) else math.inf


def times(
    length: Size, factor: float, most: float, *, up: bool = False, over: bool = False
) -> Size:
    """``int(length * factor)`` as torch computes it, in float64; its ``ceil`` if `up`.

    TensorRT has no float64, and float32 can differ by one (0.7 * 90 is 62.99999999999999). So
    integers compute it, ``length * p // q``, with a fraction that is right for every size. If no
    fraction is (0.7 * 10 is still 7), a table of the sizes replaces it.

    Args:
        length: the size, not negative.
        factor: the factor, not negative.
        most: the largest value that the size can have.
        up: round up, not down.
        over: ``length / factor`` in place of the product.

    Raises:
        ExportError: no fraction is right, and the sizes are too many for a table.
    """
    if isinstance(length, int):
        return int(products(factor, length, up=up, over=over)[-1])
    fraction = exact_fraction(factor, most, up=up, over=over)
    if fraction is None:
        table = products(factor, int(most), up=up, over=over)
        return op.Gather(ints(*table.tolist()), length, axis=0)
    product, bottom = op.Mul(length, ints(fraction.numerator)), fraction.denominator
    if bottom == 1:
        return product
    return op.Div(op.Add(product, ints(bottom - 1)) if up else product, ints(bottom))


def products(
    factor: float, most: int, *, first: int = 0, up: bool = False, over: bool = False
) -> np.ndarray:
    """The whole numbers of ``n * factor`` for n from `first` to `most`; see `times`."""
    sizes = np.arange(first, most + 1, dtype=np.int64)
    exact = sizes / np.float64(factor) if over else sizes * np.float64(factor)
    return (np.ceil(exact) if up else exact).astype(np.int64)


def exact_fraction(
    factor: float, most: float, *, up: bool = False, over: bool = False
) -> Fraction | None:
    """A fraction p/q with ``n * p / q``, made whole, right for every n up to `most`; see `times`.

    Returns None if no such fraction exists and a table can replace it. Without an upper bound,
    sizes up to 32768 are checked.

    Raises:
        ExportError: no fraction is right, or the sizes are too many to be checked; and they are
            too many for a table.
    """
    reach = int(most) if math.isfinite(most) else _REACH
    exact = 1 / Fraction(factor) if over else Fraction(factor)
    for denominator in (1, 16, 256, 4096, 65536):
        fraction = exact.limit_denominator(denominator)
        if fraction == exact and reach * fraction.numerator < 1 << 53:
            return fraction  # float64 holds n * p, so it rounds nothing that matters here
        if reach <= _CHECKED and _right(fraction, factor, reach, up=up, over=over):
            return fraction
    if most > TABLE:
        raise ExportError(
            f"no fraction gives the sizes of the scale factor {factor}, and the size it is applied "
            f"to may be above {TABLE}: declare a smaller max, or pass size= instead"
        )
    return None


def _right(fraction: Fraction, factor: float, reach: int, *, up: bool, over: bool) -> bool:
    """Whether a fraction gives the whole number of every n from 0 to `reach`; see `times`."""
    p, q = fraction.numerator, fraction.denominator
    for first in range(0, reach + 1, _CHUNK):
        last = min(reach, first + _CHUNK - 1)
        found = (np.arange(first, last + 1) * p + (q - 1 if up else 0)) // q
        if (found != products(factor, last, first=first, up=up, over=over)).any():
            return False
    return True
