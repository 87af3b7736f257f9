"""``OneHot`` and ``EyeLike`` of dynamic sizes become comparisons with a Range; ``ArgMax`` and
``ArgMin`` of rank 1 get a second axis.

- OneHot: TensorRT needs the depth at build time (``Depth input of IOneHotLayer must be a build
  time constant``).
- EyeLike, which torch.eye exports: it needs static sizes (``Eyelike does not work for dynamically
  shaped tensors``).
- ArgMax and ArgMin of rank 1 do not parse (``at least 2 dimensions are required``).
"""

from __future__ import annotations

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from pipeline.machine.target import EVERY
from pipeline.passes.infra import Pass, PassResult, Refused, each
from pipeline.passes.lib.chain import Chain
from pipeline.passes.lib.known import depends_on_data
from pipeline.passes.lib.sizes import elements_of


def run(graph: gs.Graph) -> PassResult:
    """Rewrites OneHot of a computed depth, EyeLike of a dynamic shape, ArgMax and ArgMin of rank 1.

    Refused: a OneHot whose depth depends on the values of the inputs, or whose rank is not known;
    opsets before 13.
    """
    return each(graph, ("OneHot", "EyeLike", "ArgMax", "ArgMin"), _rewrite)


def _rewrite(graph: gs.Graph, node: gs.Node) -> str | None:
    """Describes the replacement; None if the node needs none."""
    chain = Chain(graph, node)
    if node.op == "OneHot" and _is_open(node.inputs[1]):
        _one_hot(chain, node)
        return "comparison with a Range"
    sizes = node.inputs[0].shape or ()
    if node.op == "EyeLike" and any(not isinstance(size, (int, np.integer)) for size in sizes):
        _eye(chain, node)
        return "comparison of two Ranges"
    if node.op in ("ArgMax", "ArgMin") and len(sizes) == 1:
        _arg(chain, node)
        return f"{node.op} over the second of two axes"
    return None


def _is_open(depth: gs.Tensor) -> bool:
    elements = elements_of(depth)
    computed = elements is not None and not all(value.is_Integer for value in elements.values)
    return computed or depends_on_data(depth)


def _check_opset(chain: Chain) -> None:
    if (chain.graph.opset or 0) < 13:
        raise Refused(f"opset {chain.graph.opset} is too old for the pass: export with opset 13")


def _one_hot(chain: Chain, node: gs.Node) -> None:
    _check_opset(chain)
    indices, depth, values = node.inputs
    if depends_on_data(depth):
        raise Refused(
            "its depth depends on the values of the inputs, so its size is not known before the "
            "run: give the number of classes as a constant"
        )
    if indices.shape is None:
        raise Refused(f"the rank of {indices.name} is not known: declare it in value_info")
    rank = len(indices.shape)
    axis = int(node.attrs.get("axis", -1))
    axis += rank + 1 if axis < 0 else 0
    whole = chain.cast(indices, np.int64)
    # depth is a scalar or has one element
    length = chain.op("Reshape", chain.cast(depth, np.int64), np.array([1]), dtype=np.int64)
    # an index below 0 counts from the back; an index out of range sets no element
    below = chain.op("Less", whole, np.array([0]), dtype=np.bool_)
    back = chain.op("Add", whole, length, dtype=np.int64)
    place = chain.op("Where", below, back, whole, dtype=np.int64)
    places = chain.op("Unsqueeze", place, np.array([axis]), dtype=np.int64)
    steps = _range(chain, length)
    if axis < rank:
        after = np.arange(1, rank - axis + 1)
        steps = chain.op("Unsqueeze", steps, after, dtype=np.int64)
    on = chain.op("Equal", places, steps, dtype=np.bool_)
    off_value = chain.op("Gather", values, np.array([0]), short="off", dtype=values.dtype, axis=0)
    on_value = chain.op("Gather", values, np.array([1]), short="on", dtype=values.dtype, axis=0)
    chain.finish(chain.op("Where", on, on_value, off_value, dtype=values.dtype))


def _eye(chain: Chain, node: gs.Node) -> None:
    _check_opset(chain)
    data = node.inputs[0]
    rows, columns = (_range(chain, chain.size(data, axis)) for axis in (0, 1))
    offset = np.array([int(node.attrs.get("k", 0))])
    column = chain.op("Unsqueeze", chain.op("Add", rows, offset, dtype=np.int64), np.array([1]))
    on = chain.op("Equal", column, columns, dtype=np.bool_)
    kind = node.attrs.get("dtype") or data.dtype or node.outputs[0].dtype
    if kind is None:
        raise Refused(f"the dtype of {data.name} is not known: declare it in value_info")
    if not isinstance(kind, int):
        kind = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(kind))
    chain.finish(chain.op("Cast", on, to=int(kind)))


def _arg(chain: Chain, node: gs.Node) -> None:
    _check_opset(chain)
    attrs = {**node.attrs, "axis": 1, "keepdims": 1}
    row = chain.op("Unsqueeze", node.inputs[0], np.array([0]), dtype=node.inputs[0].dtype)
    found = chain.op(node.op, row, dtype=np.int64, shape=[1, 1], **attrs)
    gone = [0] if node.attrs.get("keepdims", 1) else [0, 1]
    chain.finish(chain.op("Squeeze", found, np.array(gone), dtype=np.int64))


def _range(chain: Chain, length: gs.Tensor) -> gs.Tensor:
    """0, 1, ..., length - 1. The length has the shape ``(1,)``."""
    limit = chain.op("Squeeze", length, np.array([0]), dtype=np.int64, shape=[])
    # gs.Constant, since `constant` turns rank 0 into rank 1
    start, step = (
        gs.Constant(f"{limit.name}_{word}", np.array(value))
        for word, value in (("start", 0), ("step", 1))
    )
    return chain.op("Range", start, limit, step, dtype=np.int64)


PASS = Pass(
    name="expand_one_hot",
    run=run,
    targets=EVERY,
    summary="OneHot, EyeLike of dynamic sizes -> Equal with a Range; ArgMax of rank 1 -> of rank 2",
    fault="OneHot of a dynamic depth does not build; EyeLike of dynamic sizes and ArgMax of rank 1 "
    "do not parse",
    evidence=(
        "tensorrt-rtx 1.7.1 and TensorRT 8.6.0 fail on each",
        "onnx-tensorrt docs/operators.md for 10.15: depth must be a build-time constant, EyeLike "
        "must have static dimensions",
    ),
)
