"""roll by a shift that follows a size, or of an axis that may be empty.

torch's exporter writes only shifts that are numbers, and a remainder by the axis's length. ONNX
Runtime fails at a remainder by 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from onnxscript.function_libs.torch_lib.ops import core  # the exporter's own; torch 2.13

from pipeline.export.ops.sizes import Value, as_size, bounds, ints, known, op, rank, size, tensor

aten: Any = torch.ops.aten


def roll(x: Value, shifts: Sequence[Any], dims: Sequence[int] = ()) -> Value:
    """``roll``: the last `shifts` elements of each axis come first."""
    if all(isinstance(shift, int) for shift in shifts) and _never_empty(x, dims):
        return core.aten_roll(x, shifts, dims)
    if not dims:
        flat = op.Reshape(x, ints(-1))
        length = op.Shape(flat)
        turned = _rolled(flat, shifts[0], 0, length, op.Max(length, ints(1)))
        return op.Reshape(turned, op.Shape(x), allowzero=1)
    result = x
    for shift, axis in zip(shifts, dims, strict=True):
        length = tensor(size(x, axis))
        divisor = length if _never_empty(x, (axis,)) else op.Max(length, ints(1))
        result = _rolled(result, shift, axis % rank(x), length, divisor)
    return result


def _never_empty(x: Value, dims: Sequence[int]) -> bool:
    """True if these axes have elements at all sizes; all axes if `dims` is empty."""
    fake = known(x)
    if not isinstance(fake, torch.Tensor):
        return False
    return all(bounds(fake.shape[axis])[0] > 0 for axis in dims or range(fake.ndim))


def _rolled(x: Value, shift: Any, axis: int, length: Value, divisor: Value) -> Value:
    back = ints(-shift) if isinstance(shift, int) else op.Neg(as_size(shift))
    first = op.Mod(back, divisor)  # the length, or 1 where that is 0
    return op.Concat(
        op.Slice(x, first, length, ints(axis)), op.Slice(x, ints(0), first, ints(axis)), axis=axis
    )


TRANSLATIONS: dict[Any, Callable[..., Any]] = {aten.roll.default: roll}
