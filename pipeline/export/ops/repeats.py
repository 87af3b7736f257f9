"""repeat_interleave by a number that follows a size.

torch's exporter (onnxscript 0.7) repeats along the wrong axis, and the file fails to run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from onnxscript.function_libs.torch_lib.ops import core  # the exporter's own; torch 2.13

from pipeline.export.ops.sizes import Size, Value, as_shape, as_size, ints, op, rank, size, tensor

aten: Any = torch.ops.aten


def repeat_interleave(
    x: Value, repeats: Any, dim: int | None = None, output_size: Any = None
) -> Value:
    """``repeat_interleave`` by one number: each slice of the axis comes `repeats` times."""
    if isinstance(repeats, int):
        return core.aten_repeat_interleave_self_int(x, repeats, dim, output_size)
    if dim is None:
        x = op.Reshape(x, ints(-1))
        sizes, axis = [op.Shape(x)], 0
    else:
        sizes, axis = [size(x, n) for n in range(rank(x))], dim % rank(x)
    times = as_size(repeats)
    copies: list[Size] = [1] * (len(sizes) + 1)
    copies[axis + 1] = times
    wide = op.Expand(op.Unsqueeze(x, ints(axis + 1)), as_shape(*copies))
    sizes[axis] = op.Mul(tensor(sizes[axis]), times)
    return op.Reshape(wide, as_shape(*sizes), allowzero=1)


TRANSLATIONS: dict[Any, Callable[..., Any]] = {
    aten.repeat_interleave.self_int: repeat_interleave,
}
