"""A layer norm written out as mean, square, root and division becomes ``LayerNormalization``.

In half precision the square overflows if a value is 256 or more from the mean, and the norm
becomes 0 or NaN. TensorRT up to 10 may choose half precision for a float32 graph too, and warns of
it. LayerNormalization (opset 17) always computes its statistics in float32. Exporters of opset 16
and below write the chain. Models that define their own norm do so at every opset.

The chain also has nine layers instead of four: TensorRT-RTX 1.7 parses twelve pairs of MatMul and
norm into 63 layers instead of 172.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from pipeline.machine.target import EVERY_READ
from pipeline.passes.graph_ops import drop_unused, holder, is_op, label, maker, values_of, walk
from pipeline.passes.infra import Change, Pass, PassResult
from pipeline.passes.lib.chain import Chain

# not float64: LayerNormalization's float32 statistics would lose digits
_DTYPES = (np.dtype(np.float32), np.dtype(np.float16), onnx.TensorProto.BFLOAT16)


def run(graph: gs.Graph) -> PassResult:
    """Rewrites norms over the last axes, with or without scale and bias, from opset 17 on.

    Left alone: other axes (also those of an instance norm), float64, dynamic normalised sizes (the
    scale would have to be computed in the graph), and anything below opset 17.
    `widen_mean_square` fixes the rest in half precision.
    """
    rewritten: list[Change] = []
    if graph.opset < 17:
        return PassResult(())
    outputs = {id(o) for g in (graph, *graph.subgraphs(recursive=True)) for o in g.outputs}
    for inner, node in walk(graph):
        norm = _match(node) if node.outputs else None
        if norm is None:
            continue
        norm = _with_affine(norm, outputs)
        name, op, old = label(norm.last), norm.last.op, list(norm.last.inputs)
        place = inner if norm.last is node else holder(graph, norm.last)
        _write(place, norm)
        rewritten.append(Change(name, op, f"LayerNormalization over the last {norm.axes} axes"))
        for tensor in old:
            if tensor.inputs and not tensor.outputs:
                drop_unused(graph, tensor)
    return PassResult(tuple(rewritten))


@dataclass(frozen=True)
class _Norm:
    """A norm: its data, the number of last axes that it covers, and its last node."""

    data: gs.Tensor
    axes: int
    sizes: tuple[int, ...]
    epsilon: float
    last: gs.Node
    scale: gs.Tensor | None = None
    bias: gs.Tensor | None = None


def _match(node: gs.Node) -> _Norm | None:
    """Matches ``(x - mean) / sqrt(variance + epsilon)`` at its last node."""
    if is_op(node, "Div"):
        pairs = [(node.inputs[0], _under_root(node.inputs[1], 0.5))]
    elif is_op(node, "Mul"):
        one, other = node.inputs
        pairs = [(one, _under_root(other, -0.5)), (other, _under_root(one, -0.5))]
    else:
        return None
    for centred, sum_ in pairs:
        variance, epsilon = _plus_number(sum_)
        data, axes = _centred(centred)
        if variance is None or data is None or axes is None:
            continue
        squared = _mean_of(variance, axes)
        if squared is None or not _is_square_of(squared, data, axes):
            continue
        shape = data.shape
        if shape is None or axes != list(range(len(shape) - len(axes), len(shape))):
            continue
        sizes = tuple(shape[axes[0] :])
        static = all(isinstance(size, (int, np.integer)) for size in sizes)
        # numpy reads the dtype None as float64
        if static and data.dtype is not None and data.dtype in _DTYPES:
            return _Norm(data, len(axes), sizes, epsilon, node)
    return None


def _with_affine(norm: _Norm, outputs: set[int]) -> _Norm:
    """Adds the Mul and the Add that follow the norm, if they have the shape of its last axes."""
    found: dict[str, gs.Tensor] = {}
    last = norm.last
    for op, role in (("Mul", "scale"), ("Add", "bias")):
        result = last.outputs[0]
        if id(result) in outputs or len(result.outputs) != 1 or not is_op(result.outputs[0], op):
            break
        reader = result.outputs[0]
        factors = [t for t in reader.inputs if t is not result]
        if len(factors) != 1 or not _has_shape(factors[0], norm.sizes):
            break
        found[role], last = factors[0], reader
    return _Norm(norm.data, norm.axes, norm.sizes, norm.epsilon, last, **found)


def _write(graph: gs.Graph, norm: _Norm) -> None:
    c = Chain(graph, norm.last)
    dtype, output = norm.data.dtype, norm.last.outputs[0]
    scale: gs.Tensor = norm.scale if norm.scale is not None else _ones(c, norm.sizes, dtype)
    inputs = [norm.data, scale] if norm.bias is None else [norm.data, scale, norm.bias]
    c.op(
        "LayerNormalization", *inputs, short="norm", dtype=output.dtype or dtype,
        shape=norm.data.shape, axis=-norm.axes, epsilon=norm.epsilon, stash_type=1,
    )  # fmt: skip
    c.finish()


def _ones(c: Chain, sizes: tuple[int, ...], dtype: Any) -> gs.Tensor:
    if dtype == onnx.TensorProto.BFLOAT16:
        return c.cast(c.constant(np.ones(sizes, np.float32)), int(onnx.TensorProto.BFLOAT16))
    return c.constant(np.ones(sizes).astype(dtype), short="ones")


def _has_shape(tensor: gs.Tensor, sizes: tuple[int, ...]) -> bool:
    values = values_of(tensor)
    shape = values.shape if values is not None else tensor.shape
    return shape is not None and tuple(shape) == sizes


def _under_root(tensor: gs.Tensor, power: float) -> gs.Tensor | None:
    """The x for which `tensor` is the square root (power 0.5) or the inverse root (-0.5)."""
    node = maker(tensor)
    if node is None:
        return None
    if is_op(node, "Pow"):
        return node.inputs[0] if _number(node.inputs[1]) == power else None
    if power > 0:
        return node.inputs[0] if is_op(node, "Sqrt") else None
    if is_op(node, "Reciprocal"):
        return _under_root(node.inputs[0], 0.5)
    if is_op(node, "Div") and _number(node.inputs[0]) == 1:
        return _under_root(node.inputs[1], 0.5)
    return None


def _plus_number(tensor: gs.Tensor | None) -> tuple[gs.Tensor | None, float]:
    node = None if tensor is None else maker(tensor)
    if node is not None and is_op(node, "Add"):
        for one, other in (node.inputs, node.inputs[::-1]):
            number = _number(other)
            if number is not None and number >= 0:
                return one, number
    return None, 0.0


def _centred(tensor: gs.Tensor) -> tuple[gs.Tensor | None, list[int] | None]:
    """The x and the axes of ``x - mean(x)``."""
    node = maker(tensor)
    if node is None or not is_op(node, "Sub"):
        return None, None
    data, mean = node.inputs
    reduce = maker(mean)
    if reduce is None or not reduce.inputs or reduce.inputs[0] is not data:
        return None, None
    axes = _mean_axes(reduce)
    return (None, None) if axes is None else (data, axes)


def _mean_of(tensor: gs.Tensor, axes: list[int]) -> gs.Tensor | None:
    node = maker(tensor)
    return None if node is None or _mean_axes(node) != axes else node.inputs[0]


def _mean_axes(node: gs.Node) -> list[int] | None:
    """The axes of a ReduceMean that keeps its rank, counted from the front."""
    if not is_op(node, "ReduceMean") or not node.attrs.get("keepdims", 1):
        return None
    axes, rank = node.attrs.get("axes"), _rank_of(node.inputs[0])
    if len(node.inputs) > 1:
        values = values_of(node.inputs[1])
        axes = None if values is None else values.reshape(-1).tolist()
    return sorted(axis % rank for axis in axes) if axes and rank else None


def _rank_of(tensor: gs.Tensor) -> int | None:
    """The rank along elementwise ops whose first input has the most axes."""
    node = maker(tensor)
    if tensor.shape is not None:
        return len(tensor.shape)
    if node is not None and node.op in ("Sub", "Pow", "Mul", "Cast"):
        return _rank_of(node.inputs[0])
    return None


def _is_square_of(squared: gs.Tensor, data: gs.Tensor, axes: list[int]) -> bool:
    node = maker(squared)
    if node is None:
        return False
    if is_op(node, "Pow"):
        base = node.inputs[0] if _number(node.inputs[1]) == 2 else None
    else:
        base = node.inputs[0] if is_op(node, "Mul") and node.inputs[0] is node.inputs[1] else None
    if base is None:
        return False
    source, own = _centred(base)
    return source is data and own == axes


def _number(tensor: gs.Tensor) -> float | None:
    values = values_of(tensor)
    one = values is not None and values.shape in ((), (1,))
    return float(values.reshape(-1)[0]) if one and values is not None else None


PASS = Pass(
    name="fuse_layer_norm",
    run=run,
    targets=EVERY_READ,
    summary="mean, square, root and division over the last axes -> LayerNormalization",
    fault="in half precision the square of a value from 256 on overflows; the result is 0 or NaN",
    evidence=(
        "https://github.com/NVIDIA/TensorRT/issues/2564",
        "https://github.com/NVIDIA/TensorRT/issues/2781",
        "https://github.com/NVIDIA/TensorRT/issues/3692",
        "https://github.com/NVIDIA/TensorRT/issues/4493",
        "tests/passes/test_fuse_layer_norm.py shows the overflow in ONNX's reference evaluator",
    ),
)
