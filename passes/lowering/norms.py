"""GroupNormalization (opsets 18 and 21) becomes InstanceNormalization over the groups.

Opset 18's form is deprecated, and the checker refuses it. Opset 21's form has a scale per channel.
torch's exporter writes the same nodes at opset 18. The standard's function body is not used: it
computes the variance as E[x^2] - E[x]^2, which loses digits.
"""

from __future__ import annotations

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from pipeline.passes.infra import Refused
from pipeline.passes.lib.chain import Chain
from pipeline.passes.lowering._site import Converter, Site, Steps

_HALVES = (np.float16, onnx.TensorProto.BFLOAT16)


def _group_normalization(site: Site) -> Steps:
    """Half-precision data have float32 statistics, unless stash_type says otherwise."""
    node = site.node
    # opset 18 has a scale and a bias per group, opset 21 per channel
    per_channel = site.crosses(21)
    data, scale, bias = node.inputs
    if data.shape is None or data.dtype is None:
        raise Refused("the rank or the dtype of its input is not known: declare it in value_info")
    rank, groups = len(data.shape), int(node.attrs["num_groups"])
    stash = int(node.attrs.get("stash_type", onnx.TensorProto.FLOAT))
    if stash != onnx.TensorProto.FLOAT and data.dtype not in _HALVES:
        raise Refused(
            f"stash_type {stash} with data of {data.dtype} is not rewritten: use stash_type 1"
        )
    wide = data.dtype in _HALVES and (stash == onnx.TensorProto.FLOAT and per_channel)
    dtype = np.float32 if wide else data.dtype
    if not isinstance(dtype, type) and not isinstance(dtype, np.dtype):
        raise Refused("statistics in bfloat16 are not rewritten: use stash_type 1")
    yield f"InstanceNormalization over {groups} groups"
    chain = Chain(site.graph, node)
    whole = chain.op("Shape", data, short="shape", dtype=np.int64, shape=[rank])
    values = chain.cast(data, np.float32) if wide else data
    grouped = chain.op("Reshape", values, np.array([0, groups, -1]), short="groups", dtype=dtype)
    ones, zeros = (
        (np.ones(groups, dtype), np.zeros(groups, dtype)) if per_channel else (scale, bias)
    )
    normal = chain.op(
        "InstanceNormalization", grouped, ones, zeros, short="normal", dtype=dtype,
        epsilon=float(node.attrs.get("epsilon", 1e-5)),
    )  # fmt: skip
    result = chain.op("Reshape", normal, whole, short="whole", dtype=dtype, shape=data.shape)
    if per_channel:
        if wide:
            result = chain.cast(result, data.dtype, "narrow")
        result = chain.op("Mul", result, _channels(chain, scale, rank), dtype=data.dtype)
        chain.op("Add", result, _channels(chain, bias, rank), dtype=data.dtype)
    chain.finish()


def _channels(chain: Chain, values: gs.Tensor, rank: int) -> gs.Tensor:
    """``(C,)`` as ``(C, 1, ..., 1)``."""
    if rank == 2:
        return values
    return chain.op("Unsqueeze", values, np.arange(1, rank - 1), dtype=values.dtype)


CONVERTERS: dict[str, Converter] = {
    "GroupNormalization": Converter(_group_normalization, attrs=("stash_type",)),
}
