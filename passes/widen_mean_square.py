"""A mean or sum of squares in half precision is computed in float32.

A half-precision square overflows from 256 on, and a sum of squares much earlier. The result is 0
or NaN. This affects the root mean square norm ``x * rsqrt(mean(x * x) + eps)``, layer norms that
`fuse_layer_norm` leaves, norms over channels, variances and ReduceL2. If the graph fixes the
precision (TensorRT-RTX, TensorRT 11, strongly typed networks of 10), only a rewrite helps.
TensorRT itself warns "Running layernorm after self-attention with FP16 Reduce or Pow may cause
overflow", and asks for Reduce and Pow in float32.

The square, the reduction, following additions and factors, the root and its inverse run in
float32. The root fits in half precision again. bfloat16 has float32's range and is left alone.
"""

from __future__ import annotations

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from pipeline.machine.target import EVERY_READ
from pipeline.passes.graph_ops import drop_unused, is_op, label, values_of, walk
from pipeline.passes.infra import Change, Pass, PassResult
from pipeline.passes.lib.chain import Chain

_HALF = np.dtype(np.float16)
_FLOAT16 = int(onnx.TensorProto.FLOAT16)
# reductions of a square that another node computes, and reductions that square by themselves
_REDUCTIONS = ("ReduceMean", "ReduceSum", "GlobalAveragePool")
_SQUARING = ("ReduceL2", "ReduceSumSquare")


def run(graph: gs.Graph) -> PassResult:
    """Rewrites reductions of float16 squares; nothing is refused."""
    rewritten = []
    outputs = {id(o) for g in (graph, *graph.subgraphs(recursive=True)) for o in g.outputs}
    for inner, node in walk(graph):
        if not node.outputs or not is_op(node, node.op):
            continue
        data = _squared(node)
        if data is None or not _is_half(data, node.outputs[0]):
            continue
        steps = _steps(node, inner, outputs)
        name, op, old = label(node), node.op, list(steps[-1].inputs)
        _write(inner, node, data, steps)
        along = ", ".join(["the square", *(step.op for step in steps[1:])])
        rewritten.append(Change(name, op, f"in float32, with {along}"))
        for tensor in old:
            if tensor.inputs and not tensor.outputs:
                drop_unused(graph, tensor)
    return PassResult(tuple(rewritten))


def _squared(node: gs.Node) -> gs.Tensor | None:
    """The tensor whose squares the node reduces, or None."""
    if node.op in _SQUARING:
        return node.inputs[0]
    if node.op not in _REDUCTIONS:
        return None
    if len(node.inputs[0].inputs) != 1:
        return None
    (square,) = node.inputs[0].inputs
    if is_op(square, "Mul") and square.inputs[0] is square.inputs[1]:
        return square.inputs[0]
    if is_op(square, "Pow"):
        power = values_of(square.inputs[1])
        if power is not None and power.shape in ((), (1,)) and float(power.reshape(-1)[0]) == 2:
            return square.inputs[0]
    return None


def _is_half(data: gs.Tensor, result: gs.Tensor) -> bool:
    return any(t.dtype is not None and t.dtype == _HALF for t in (data, result))


def _steps(node: gs.Node, graph: gs.Graph, outputs: set[int]) -> list[gs.Node]:
    """The reduction and the nodes after it, up to the root and its inverse."""
    steps, own = [node], {id(n) for n in graph.nodes}
    while True:
        result = steps[-1].outputs[0]
        if id(result) in outputs or len(result.outputs) != 1 or _ends(steps):
            return steps
        reader = result.outputs[0]
        if id(reader) not in own or not _follows(steps[-1], reader):
            return steps
        steps.append(reader)


def _ends(steps: list[gs.Node]) -> bool:
    """True after an inverse root, and after ReduceL2, which is a root itself."""
    last = steps[-1]
    return last.op in ("Reciprocal", "Pow", "ReduceL2") or (
        len(steps) > 1 and steps[-2].op == "Sqrt"
    )


def _follows(last: gs.Node, reader: gs.Node) -> bool:
    result = last.outputs[0]
    others = [t for t in reader.inputs if t is not result]
    if last.op == "Sqrt":
        inverse = is_op(reader, "Div") and reader.inputs[1] is result
        return is_op(reader, "Reciprocal") or (inverse and _is_number(others))
    if is_op(reader, "Sqrt"):
        return True
    first = reader.inputs[0] is result
    scales = any(is_op(reader, op) for op in ("Add", "Mul", "Max"))
    divides = first and (is_op(reader, "Div") or is_op(reader, "Pow"))
    return (scales or divides) and _is_number(others)


def _is_number(others: list[gs.Tensor]) -> bool:
    """True for one tensor of one element, which does not change the result's shape."""
    if len(others) != 1:
        return False
    values = values_of(others[0])
    shape = others[0].shape if values is None else values.shape
    return shape is not None and tuple(shape) in ((), (1,))


def _write(graph: gs.Graph, node: gs.Node, data: gs.Tensor, steps: list[gs.Node]) -> None:
    c = Chain(graph, steps[-1])
    old = node.inputs[0]
    wide = c.cast(data, np.float32, short="wide")
    if node.op in _SQUARING:
        square = wide
    else:
        square = c.op("Mul", wide, wide, short="square", dtype=np.float32, shape=data.shape)
    made = {id(old): square}
    for step in steps:
        inputs = [made[id(t)] if id(t) in made else _widened(c, t) for t in step.inputs]
        result = step.outputs[0]
        made[id(result)] = c.op(
            step.op, *inputs, dtype=np.float32, shape=result.shape, **step.attrs
        )  # fmt: skip
    result = steps[-1].outputs[0]
    c.op("Cast", made[id(result)], short="narrow", dtype=_HALF, shape=result.shape, to=_FLOAT16)
    c.finish()


def _widened(c: Chain, tensor: gs.Tensor) -> gs.Tensor:
    """A number as float32; the axes of a reduction unchanged."""
    values = values_of(tensor)
    if values is not None:
        return c.constant(values.astype(np.float32)) if values.dtype == _HALF else tensor
    return c.cast(tensor, np.float32) if tensor.dtype == _HALF else tensor


PASS = Pass(
    name="widen_mean_square",
    run=run,
    targets=EVERY_READ,
    summary="mean or sum of float16 squares, and its root -> in float32",
    fault="in half precision the square of a value from 256 on overflows; the result is 0 or NaN",
    evidence=(
        "https://github.com/pytorch/TensorRT/issues/4061",
        "https://github.com/NVIDIA/TensorRT/issues/3692",
        "tests/passes/test_widen_mean_square.py shows the overflow in ONNX's reference evaluator",
    ),
)
