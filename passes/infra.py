"""What a rewrite pass is, what it reports, and the few graph operations that passes share.

A pass changes an onnx-graphsurgeon graph in place and says, node by node, what it rewrote and
what it could not mend. It keeps the names, types and dims of the graph's inputs and outputs,
keeps every dynamic axis, handles the bodies of If and Loop, and changes nothing when it is run
a second time. New nodes are called ``<name of the node they replace>/<short>``, so that the
stage can hand that node's metadata down to them; new constants get new names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import onnx_graphsurgeon as gs
from onnx_graphsurgeon.ir.tensor import LazyValues

from pipeline.graph.change import Change
from pipeline.machine.target import Needs, Target

__all__ = [
    "Change", "Pass", "PassResult", "Refused", "constant", "drop_unused", "each", "is_op", "label",
    "replace", "values_of", "walk",
]  # fmt: skip


@dataclass(frozen=True)
class PassResult:
    """What a pass did to a graph.

    Args:
        rewritten: the nodes that it replaced or altered.
        refused: nodes that have the problem but that the pass can't mend; ``detail`` is the
            reason. Nodes that need nothing are not listed.
    """

    rewritten: tuple[Change, ...]
    refused: tuple[Change, ...] = ()

    @property
    def modified(self) -> bool:
        return bool(self.rewritten)


@dataclass(frozen=True)
class Pass:
    """A rewrite with its reasons.

    Args:
        name: the module's name.
        run: changes the graph in place and reports; with `level` ``model`` it is given the whole
            onnx.ModelProto instead of the graph-surgeon graph.
        targets: the versions of TensorRT that need it, as data.
        summary: one line: which pattern becomes what.
        fault: one line: what those versions do with the pattern as it stands.
        evidence: issue links and measured cases that show the need.
        tolerable: True if a node that the pass refuses may still come out right, so that the
            conversion goes on with a warning; otherwise a refusal ends it.
        clean_up: True for a pass that mends nothing and only makes the engine smaller or its
            build faster.
        level: what `run` is given.
        own: True for a user's own pass: the laws that tests hold the others to are checked on it
            each time that it runs.
    """

    name: str
    run: Callable[[Any], PassResult]
    targets: tuple[Needs, ...]
    summary: str
    evidence: tuple[str, ...]
    fault: str = ""
    tolerable: bool = False
    clean_up: bool = False
    level: Literal["graph", "model"] = "graph"
    own: bool = False

    def needed_by(self, target: Target) -> bool:
        return any(needs.covers(target) for needs in self.targets)


class Refused(Exception):
    """Raised inside a pass where a node has the problem but can't be mended; says why."""


def walk(graph: gs.Graph) -> Iterator[tuple[gs.Graph, gs.Node]]:
    """Every node with the graph that holds it, the bodies of If, Loop and Scan included."""
    for inner in (graph, *graph.subgraphs(recursive=True)):
        for node in list(inner.nodes):
            yield inner, node


def each(graph: gs.Graph, op: str, rewrite: Callable[[gs.Graph, gs.Node], str]) -> PassResult:
    """Calls `rewrite` on every node of a standard op, with the graph that holds it.

    Args:
        rewrite: changes the graph and says how, or raises `Refused`.
    """
    rewritten, refused = [], []
    for inner, node in walk(graph):
        if not is_op(node, op):
            continue
        name = label(node)
        try:
            rewritten.append(Change(name, op, rewrite(inner, node)))
        except Refused as reason:
            refused.append(Change(name, op, str(reason)))
    return PassResult(tuple(rewritten), tuple(refused))


def is_op(node: gs.Node, op: str) -> bool:
    """True for the standard ONNX op of that name (not one of another domain)."""
    return node.op == op and (node.domain or "") in ("", "ai.onnx")


def label(node: gs.Node) -> str:
    """The node's name, or its first output's where it has none; new names begin with it."""
    return str(node.name or node.outputs[0].name)


def constant(name: str, values: np.ndarray) -> gs.Constant:
    """A new initializer."""
    # ascontiguousarray makes a scalar a vector of one
    return gs.Constant(name, values.copy() if values.ndim == 0 else np.ascontiguousarray(values))


def values_of(tensor: gs.Tensor) -> np.ndarray | None:
    """The tensor's values if it is an initializer or a Constant node's output, else None."""
    if isinstance(tensor, gs.Constant):
        # not `tensor.values`: that keeps the array, and exports bfloat16 as float32 afterwards
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
    """Puts `new` in the place of `node`; the last of them takes over the node's outputs.

    The order stays topological, and the output tensors stay the same objects, so that graph
    outputs and subgraphs which read them are not touched.
    """
    place = next(i for i, other in enumerate(graph.nodes) if other is node)
    outputs = list(node.outputs)
    node.outputs.clear()
    node.inputs.clear()
    new[-1].outputs = outputs
    graph.nodes[place : place + 1] = list(new)


def drop_unused(root: gs.Graph, tensor: gs.Tensor) -> int:
    """Removes the nodes that made `tensor` and that nothing reads any more; says how many."""
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
