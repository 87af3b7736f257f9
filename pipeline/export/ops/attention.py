"""scaled_dot_product_attention: rows that attend to nothing, and inputs that are not 4-D.

torch returns zeros for a query whose keys are all masked out (left padding). For a bool mask, the
exporter adds ``Where(mask, 0, lowest float)``, which is finite, so such a row becomes the mean of
the values. For a float mask it adds -inf, so the row becomes NaN. It also refuses inputs that are
not 4-D: here, the axes before the heads become one.

A row of the mask that has a NaN is NaN, as in torch. One difference stays: if a row has no key, and
its query is NaN or a value is infinite, the result is 0 and torch's is NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from onnx import TensorProto
from onnxscript.function_libs.torch_lib.ops import nn  # the exporter's own; torch 2.13

from pipeline.errors import ExportError
from pipeline.export.ops.bounded import bounds_of, constant
from pipeline.export.ops.sizes import FLOAT, Value, floats, ints, op, rank, reshaped, size, source

aten: Any = torch.ops.aten


@wraps(nn.aten_scaled_dot_product_attention)  # the exporter matches parameters by their names
def attention(
    query: Value, key: Value, value: Value, attn_mask: Value | None = None, *rest: Any, **more: Any
) -> Value:
    """``scaled_dot_product_attention``: [..., heads, length, channels], 3-D and up."""
    kept = attn_mask is not None and _kept(attn_mask)
    flat = rank(query) == 3
    wide = [size(query, n) for n in range(rank(query) - 1)] if rank(query) > 4 else []
    if flat:
        query, key, value = (_batched(t) for t in (query, key, value))
        if attn_mask is not None and rank(attn_mask) == 3:
            attn_mask = _batched(attn_mask)
    elif wide:
        query, key, value, attn_mask = _merged(query, key, value, attn_mask)
    out = nn.aten_scaled_dot_product_attention(query, key, value, attn_mask, *rest, **more)
    if attn_mask is not None and not kept:
        # after the last product, so that TensorRT still finds the pattern of attention
        seen = attn_mask
        if attn_mask.dtype != TensorProto.BOOL:  # a NaN is not equal to -inf, so it stays
            seen = op.Not(op.Equal(attn_mask, op.CastLike(floats(-math.inf), attn_mask)))
        some = op.ReduceMax(op.Cast(seen, to=FLOAT), ints(-1), keepdims=1)
        nothing = op.CastLike(floats(0.0), query)
        out = op.Where(op.Greater(some, floats(0.5)), out, nothing)
    if wide:
        return reshaped(out, *wide, size(value, -1))
    return op.Squeeze(out, ints(0)) if flat else out


def _kept(mask: Value) -> bool:
    """True if no row of a float mask can be -inf as a whole, as far as its makers show."""
    if mask.dtype == TensorProto.BOOL:
        return False
    node = source(mask)
    values = constant(node)
    if values is not None:
        return not bool((values == -math.inf).all(-1).any())
    return bounds_of(node)[0] > -math.inf


def _batched(x: Value) -> Value:
    new = op.Unsqueeze(x, ints(0))
    new.shape = type(x.shape)([1, *x.shape])
    new.dtype = x.dtype
    return new


def _merged(query: Value, *others: Value | None) -> list[Value | None]:
    """The inputs in 4-D: all axes before the heads are one. They must be the same in each."""
    batch = [*query.shape[:-3]]
    found = []
    for x in (query, *others):
        if x is None or rank(x) < 4:  # no mask, or one that all share
            found.append(x)
            continue
        own = [*x.shape[:-3]]
        if own != batch and any(n != 1 for n in own):
            raise ExportError(f"the axes before the heads differ: {batch} and {own}")
        new = reshaped(x, -1, *(size(x, n) for n in (-3, -2, -1)))
        count = math.prod(own) if all(isinstance(n, int) for n in own) else None
        new.shape, new.dtype = type(x.shape)([count, *x.shape[-3:]]), x.dtype
        found.append(new)
    return found


TRANSLATIONS: dict[Any, Callable[..., Any]] = {aten.scaled_dot_product_attention.default: attention}
