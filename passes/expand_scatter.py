"""``ScatterElements``, ``ScatterND`` with a reduction become a one-hot comparison and a reduction.

TensorRT-RTX's parser refuses the reductions (add, mul, max, min). TensorRT 8.6's parser ignores
the attribute: the last of several updates of one element wins, and the data are lost. torch
exports index_add, index_put(accumulate=True), scatter_add and scatter_reduce as these ops.
Without a reduction both ops are right as they stand.

The indices are compared with a Range to find the element of each update. The number of compared
pairs is

- for ScatterElements: (updates along the axis) x (size of the axis) x (the other axes);
- for ScatterND: (index tuples) x (elements that a tuple can choose) x (size of a row). Float rows
  that are added use a MatMul, and the size of a row does not count.

TensorRT may fuse comparison, choice and reduction. In the worst case every pair takes memory. The
pass refuses more than 2**28 pairs, counted over static sizes.

Half precision is computed in float32. In the MatMul, a NaN or infinite update reaches every row,
since 0 * inf is NaN. All other forms choose with Where.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from pipeline.machine.target import EVERY
from pipeline.passes.infra import Pass, PassResult, Refused, each
from pipeline.passes.lib.chain import Chain
from pipeline.passes.lib.dims import (
    is_half,
    join,
    product,
    rank_of,
    reduce,
    size_of,
    unsqueeze,
    widen,
    work_dtype,
)
from pipeline.passes.lib.values import Value

_PAIRS = 2**28
_MAX_RANK = 8  # TensorRT's limit for tensors
# reduction -> the op that combines updates, the op that combines them with the data
_OPS = {
    "add": ("ReduceSum", "Add"),
    "mul": ("ReduceProd", "Mul"),
    "max": ("ReduceMax", "Max"),
    "min": ("ReduceMin", "Min"),
}


def run(graph: gs.Graph) -> PassResult:
    """Rewrites ScatterElements and ScatterND whose reduction is not ``none``.

    Data: float16, bfloat16, float32, float64, int32 or int64, of any sizes. Negative indices
    count from the end. The updates of ScatterElements may be smaller than the data. Refused:
    an unknown rank or dtype, other dtypes, a rank above 7 for ScatterElements, and more than
    2**28 static pairs.
    """
    return each(graph, ("ScatterElements", "ScatterND"), _rewrite)


def _rewrite(graph: gs.Graph, node: gs.Node) -> str | None:
    reduction = node.attrs.get("reduction", "none")
    if reduction == "none":
        return None
    if reduction not in _OPS:
        raise Refused(f"reduction {reduction!r} is not one of {', '.join(_OPS)}")
    rewrite = _elements if node.op == "ScatterElements" else _tuples
    return rewrite(Chain(graph, node), reduction)


def _elements(chain: Chain, reduction: str) -> str:
    data, indices, updates = chain.node.inputs
    rank = rank_of(data)
    if rank_of(indices) != rank:
        raise Refused(f"{indices.name} and {data.name} differ in rank: give both the same rank")
    if rank >= _MAX_RANK:
        raise Refused(
            f"{data.name} has {rank} axes, and the pass needs one more than TensorRT's limit of "
            f"{_MAX_RANK}: reshape it to fewer axes"
        )
    axis = int(chain.node.attrs.get("axis", 0)) % max(rank, 1)
    dtype = work_dtype(data, (np.float32, np.float64, np.int32, np.int64))
    _limit([*indices.shape, data.shape[axis]])
    size = size_of(chain, data, axis)
    # (..., size of the axis, updates along the axis, ...)
    positions = _column(size, rank - axis)
    place = unsqueeze(chain, _from_start(chain, indices, size), axis)
    hit = chain.op("Equal", positions, place, dtype=np.bool_)
    wide = widen(chain, updates, dtype)
    chosen = _choose(chain, hit, unsqueeze(chain, wide, axis), reduction, dtype)
    gathered = reduce(chain, _OPS[reduction][0], chosen, axis + 1)
    smaller = [n for n in range(rank) if n != axis and not _same(data, indices, n)]
    if smaller:
        gathered = _grow(chain, gathered, smaller, reduction, dtype)
    _join_data(chain, widen(chain, data, dtype), gathered, reduction)
    return f"one-hot of the indices along axis {axis}, {_OPS[reduction][0]}, {_OPS[reduction][1]}"


def _tuples(chain: Chain, reduction: str) -> str:
    data, indices, updates = chain.node.inputs
    rank = rank_of(data)
    depth = indices.shape[-1] if rank_of(indices) else None
    if not isinstance(depth, (int, np.integer)) or not 1 <= depth <= rank:
        raise Refused(
            f"the last axis of {indices.name} is {depth}: make it a static size from 1 to {rank}"
        )
    dtype = work_dtype(data, (np.float32, np.float64, np.int32, np.int64))
    by_matmul = reduction == "add" and dtype.kind == "f" and depth < rank
    counted = data.shape[:depth] if by_matmul else data.shape
    _limit([*counted, *indices.shape[:-1]])
    sizes = [size_of(chain, data, axis) for axis in range(rank)]
    count, row = product(sizes[:depth]), sizes[depth:]
    line = _linear(chain, indices, sizes[:depth])
    wide = chain.op(
        "Reshape",
        widen(chain, updates, dtype),
        join(chain, *([1, -1] if depth == rank else [-1, product(row)])),
        dtype=dtype,
    )
    positions = _column(count, 1)
    hit = chain.op("Equal", positions, line, dtype=np.bool_)  # (elements, tuples)
    if by_matmul:
        gathered = chain.op("MatMul", chain.cast(hit, dtype), wide, short="sum", dtype=dtype)
    else:
        if depth < rank:
            hit, wide = unsqueeze(chain, hit, 2), unsqueeze(chain, wide, 0)
        chosen = _choose(chain, hit, wide, reduction, dtype)
        gathered = reduce(chain, _OPS[reduction][0], chosen, 1)
    shaped = chain.op("Reshape", gathered, join(chain, *sizes), dtype=dtype)
    _join_data(chain, widen(chain, data, dtype), shaped, reduction)
    way = "MatMul (updates must be finite)" if by_matmul else _OPS[reduction][0]
    return f"one-hot of the linear indices, {way}, {_OPS[reduction][1]}"


def _linear(chain: Chain, indices: gs.Tensor, sizes: list[Value]) -> gs.Tensor:
    """Positions in the flattened data, one per index tuple, of shape ``(1, tuples)``."""
    flat = chain.op("Reshape", indices, np.array([-1, len(sizes)]), dtype=np.int64)
    line = None
    for n, size in enumerate(sizes):
        part = chain.op("Gather", flat, np.array([n]), short="index", dtype=np.int64, axis=1)
        part = _from_start(chain, part, size)
        if line is not None:
            line = chain.op("Mul", line, size.data, dtype=np.int64)
            part = chain.op("Add", line, part, dtype=np.int64)
        line = part
    return chain.op("Reshape", line, np.array([1, -1]), dtype=np.int64)


def _from_start(chain: Chain, indices: gs.Tensor, size: Value) -> gs.Tensor:
    """The indices as int64, with negative indices counted from the start."""
    wide = indices if indices.dtype in (np.int64, None) else chain.cast(indices, np.int64)
    negative = chain.op("Less", wide, np.array(0), dtype=np.bool_)
    moved = chain.op("Add", wide, size.data, dtype=np.int64)
    return chain.op("Where", negative, moved, wide, short="index", dtype=np.int64)


def _column(size: Value, ones: int) -> gs.Tensor | np.ndarray:
    """0, 1, ..., size - 1, followed by `ones` axes of size 1."""
    return size.upto().reshape(-1, *[1] * ones).data


def _choose(chain: Chain, hit: Any, updates: Any, reduction: str, dtype: np.dtype) -> Any:
    neutral = np.array(_neutral(reduction, dtype), dtype)
    return chain.op("Where", hit, updates, neutral, short="chosen", dtype=dtype)


def _neutral(reduction: str, dtype: np.dtype) -> float:
    if reduction in ("add", "mul"):
        return int(reduction == "mul")
    if dtype.kind == "f":
        return -math.inf if reduction == "max" else math.inf
    limits = np.iinfo(dtype)
    return int(limits.min if reduction == "max" else limits.max)


def _same(data: gs.Tensor, indices: gs.Tensor, axis: int) -> bool:
    """True if both have the same size along the axis: the same number, or the same name."""
    one, other = data.shape[axis], indices.shape[axis]
    return one is not None and one != "" and one == other


def _limit(sizes: list[Any]) -> None:
    pairs = math.prod(size for size in sizes if isinstance(size, (int, np.integer)))
    if pairs > _PAIRS:
        raise Refused(
            f"the pass would compare {pairs} pairs of an update and an element, more than "
            f"{_PAIRS}: scatter fewer updates, or into a smaller tensor"
        )


def _grow(
    chain: Chain, gathered: gs.Tensor, axes: list[int], reduction: str, dtype: np.dtype
) -> gs.Tensor:
    """Pads with neutral elements the axes along which the updates may be shorter."""
    data, indices = chain.node.inputs[:2]
    missing: list[int | Value] = [0] * (2 * len(data.shape))
    for axis in axes:
        missing[len(data.shape) + axis] = size_of(chain, data, axis) - size_of(chain, indices, axis)
    neutral = np.array(_neutral(reduction, dtype), dtype)
    return chain.op("Pad", gathered, join(chain, *missing), neutral, dtype=dtype)


def _join_data(chain: Chain, data: gs.Tensor, gathered: gs.Tensor, reduction: str) -> None:
    own = chain.node.inputs[0]
    result = chain.op(_OPS[reduction][1], data, gathered, dtype=data.dtype, shape=own.shape)
    if is_half(own.dtype):
        result = chain.cast(result, own.dtype, short="narrowed")
    chain.finish(result)


PASS = Pass(
    name="expand_scatter",
    run=run,
    targets=EVERY,
    summary="ScatterElements, ScatterND with a reduction -> one-hot of the indices, reduction",
    fault="the parser refuses it ('Unsupported reduction type'); 8.6 ignores the reduction",
    evidence=(
        "cases: rtx-1.7 does not parse any of the four reductions",
        "onnx-tensorrt 8.6 does not read the attribute: the last of several updates wins",
    ),
)
