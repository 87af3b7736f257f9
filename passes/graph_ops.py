"""Operations on onnx-graphsurgeon graphs that passes share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import onnx_graphsurgeon as gs
from onnx_graphsurgeon.ir.tensor import LazyValues


def walk(graph: gs.Graph) -> Iterator[tuple[gs.Graph, gs.Node]]:
    """Every node with the graph that holds it, the bodies of If, Loop and Scan included."""
    for inner in (graph, *graph.subgraphs(recursive=True)):
        for node in list(inner.nodes):
            yield inner, node


def is_op(node: gs.Node, op: str) -> bool:
    """True for the standard ONNX op of this name (not of another domain)."""
    return node.op == op and (node.domain or "") in ("", "ai.onnx")


def label(node: gs.Node) -> str:
    """The node's name, or else its first output's name. Names of new nodes begin with it."""
    return str(node.name or node.outputs[0].name)


def constant(name: str, values: np.ndarray) -> gs.Constant:
    """A new initializer."""
    # ascontiguousarray turns a scalar into a vector of one element
    return gs.Constant(name, values.copy() if values.ndim == 0 else np.ascontiguousarray(values))


def values_of(tensor: gs.Tensor) -> np.ndarray | None:
    """The tensor's values if it is an initializer or a Constant node's output, else None."""
    if isinstance(tensor, gs.Constant):
        # not `tensor.values`, which caches the array: a later export writes bfloat16 as float32
        lazy = tensor._values
        return np.asarray(lazy.load() if isinstance(lazy, LazyValues) else lazy)
    if len(tensor.inputs) == 1 and is_op(tensor.inputs[0], "Constant"):
        attrs = tensor.inputs[0].attrs
        if "value" in attrs:
            return values_of(attrs["value"])
        for key, dtype in (("value_int", np.int64), ("value_float", np.float32)):
            for name in (key, f"{key}s"):
                if name in attrs:
                    return np.asarray(attrs[name], dtype=dtype)
    return None


def replace(graph: gs.Graph, node: gs.Node, new: Sequence[gs.Node]) -> None:
    """Replaces `node` by `new`. The last new node takes over the node's outputs.

    The order stays topological. The output tensors stay the same objects, so graph outputs and
    subgraphs that read them need no change.
    """
    place = next(i for i, other in enumerate(graph.nodes) if other is node)
    outputs = list(node.outputs)
    node.outputs.clear()
    node.inputs.clear()
    new[-1].outputs = outputs
    graph.nodes[place : place + 1] = list(new)


def drop_unused(root: gs.Graph, tensor: gs.Tensor) -> int:
    """Removes the nodes that made `tensor` and are now unused. Returns their number."""
    graphs = (root, *root.subgraphs(recursive=True))
    kept = {id(output) for graph in graphs for output in graph.outputs}
    dropped, todo = 0, [tensor]
    while todo:
        for node in list(todo.pop().inputs):
            if any(output.outputs or id(output) in kept for output in node.outputs):
                continue
            sources = list(node.inputs)
            node.inputs.clear()
            node.outputs.clear()
            for graph in graphs:
                for place, other in enumerate(graph.nodes):
                    if other is node:
                        del graph.nodes[place]
                        dropped += 1
                        break
            todo += sources
    return dropped


def maker(tensor: gs.Tensor) -> gs.Node | None:
    """The node that makes the tensor; None for inputs and initializers."""
    return tensor.inputs[0] if len(tensor.inputs) == 1 else None


def holder(root: gs.Graph, node: gs.Node) -> gs.Graph:
    """The graph, or the body of If, Loop or Scan, that holds the node."""
    return next(inner for inner, other in walk(root) if other is node)
