"""scaled_dot_product_attention: rows that attend to nothing, and inputs without a batch.

torch returns zeros for a query whose keys are all masked out (a bool mask; left padding). The
exporter adds ``Where(mask, 0, lowest float)``, which is finite, so such a row becomes the mean of
the values. It also refuses inputs that are not 4-D.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from onnx import TensorProto
from onnxscript.function_libs.torch_lib.ops import nn  # the exporter's own; torch 2.13

from pipeline.export.ops.sizes import FLOAT, Value, floats, ints, op, rank

aten: Any = torch.ops.aten


@wraps(nn.aten_scaled_dot_product_attention)  # the exporter matches parameters by their names
def attention(
    query: Value, key: Value, value: Value, attn_mask: Value | None = None, *rest: Any, **more: Any
) -> Value:
    """``scaled_dot_product_attention``: [..., heads, length, channels], 3-D or 4-D.

    The exporter handles float masks correctly: it guards against rows of -inf itself.
    """
    flat = rank(query) == 3
    if flat:
        query, key, value = (_batched(t) for t in (query, key, value))
        if attn_mask is not None and rank(attn_mask) == 3:
            attn_mask = _batched(attn_mask)
    out = nn.aten_scaled_dot_product_attention(query, key, value, attn_mask, *rest, **more)
    if attn_mask is not None and attn_mask.dtype == TensorProto.BOOL:
        # after the last product, so that TensorRT still finds the pattern of attention
        some = op.ReduceMax(op.Cast(attn_mask, to=FLOAT), ints(-1), keepdims=1)
        nothing = op.CastLike(floats(0.0), query)
        out = op.Where(op.Greater(some, floats(0.5)), out, nothing)
    return op.Squeeze(out, ints(0)) if flat else out


def _batched(x: Value) -> Value:
    new = op.Unsqueeze(x, ints(0))
    new.shape = type(x.shape)([1, *x.shape])
    new.dtype = x.dtype
    return new


TRANSLATIONS: dict[Any, Callable[..., Any]] = {aten.scaled_dot_product_attention.default: attention}
