"""A float computed from a size gets its own ``Cast`` for every node that reads it.

Example: ``2 * x / float(w - 1) - 1`` at every level of RAFT's lookups. The exporter computes
``float(w - 1)`` once. TensorRT 8.6 compiles the network in regions, and the first region passes the
float to the others. With the FP16 flag, TensorRT offers only half precision at the end of such a
region, whatever the layers' precision is. If the layers must be float32, no implementation is left:
"Could not find any implementation for node {ForeignNode...}". The verbose log says "Mismatched type
for tensor ... f16 vs. expected type:f32". Integers may pass between regions.
"""

from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs

from pipeline.machine.target import Versions
from pipeline.passes.graph_ops import is_op, label, values_of, walk
from pipeline.passes.infra import Change, Pass, PassResult

_SIZES = ("Shape", "Size")
# ops whose integer result is computed from sizes if their inputs are
_ARITHMETIC = frozenset(
    {
        "Abs", "Add", "Cast", "Concat", "Div", "Gather", "Identity", "Max", "Min", "Mod", "Mul",
        "Neg", "ReduceProd", "Reshape", "Slice", "Split", "Squeeze", "Sub", "Unsqueeze",
    }
)  # fmt: skip


def run(graph: gs.Graph) -> PassResult:
    """Rewrites every Cast from sizes (integers of rank 0 or 1) to floats that several nodes of its
    graph read.

    Readers in the bodies of other nodes keep the first Cast. Values do not change. Nothing is
    refused."""
    rewritten = []
    sizes: set[int] = set()  # tensors computed from sizes; `walk` visits makers before readers
    for inner, node in walk(graph):
        if _makes_sizes(node, sizes):
            sizes.update(id(output) for output in node.outputs)
        if not is_op(node, "Cast") or not _is_size(node, sizes):
            continue
        readers = {id(reader): reader for reader in node.outputs[0].outputs}
        here = [other for other in inner.nodes if id(other) in readers]
        for number, reader in enumerate(here[1:], 2):
            _give(inner, node, reader, number)
        if len(here) > 1:
            detail = f"{len(here)} Casts, one for each node of this graph that reads the float"
            rewritten.append(Change(label(node), "Cast", detail))
    return PassResult(tuple(rewritten))


def _give(graph: gs.Graph, cast: gs.Node, reader: gs.Node, number: int) -> None:
    old = cast.outputs[0]
    new = gs.Variable(f"{old.name}/{number}", dtype=old.dtype, shape=old.shape)
    copy = gs.Node(
        "Cast", f"{label(cast)}/{number}", attrs=dict(cast.attrs),
        inputs=list(cast.inputs), outputs=[new],
    )  # fmt: skip
    place = next(n for n, other in enumerate(graph.nodes) if other is cast)
    graph.nodes.insert(place + 1, copy)
    for slot, tensor in enumerate(reader.inputs):
        if tensor is old:
            reader.inputs[slot] = new


def _is_size(cast: gs.Node, sizes: set[int]) -> bool:
    source, output = cast.inputs[0], cast.outputs[0]
    if output.dtype is None or isinstance(output.dtype, int) or output.shape is None:
        return False
    return (
        np.dtype(output.dtype).kind == "f"
        and len(output.shape) <= 1
        and source.dtype in (np.int32, np.int64)
        and id(source) in sizes
    )


def _makes_sizes(node: gs.Node, sizes: set[int]) -> bool:
    if any(is_op(node, op) for op in _SIZES):
        return True
    inputs = [tensor for tensor in node.inputs if not tensor.is_empty()]
    return (
        node.op in _ARITHMETIC
        and is_op(node, node.op)
        and any(id(tensor) in sizes for tensor in inputs)
        and all(id(tensor) in sizes or values_of(tensor) is not None for tensor in inputs)
    )


PASS = Pass(
    name="repeat_casts",
    run=run,
    # Seen on RAFT, not on a case: two lookups of one level are right without the pass.
    targets=(Versions("tensorrt", below=(10,), basis="read"),),
    summary="a Cast of sizes to floats that several nodes read -> one Cast for each node",
    fault="an fp16 build finds no implementation for the region that computes the float",
    evidence=("TensorRT 8.6.0, RAFT in fp16: docs/results/build-cost.md",),
)
