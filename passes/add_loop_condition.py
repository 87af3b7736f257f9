"""A ``Loop`` gets a condition of its own: a constant True, or a copy of a network input.

RTX 1.7's parser gives the tensor at a Loop's second input the name that the body has for it. A
Loop without that input, which ONNX allows, leaves the name in the body without a tensor ('Node
input was not registered'); one that reads a network input renames the input, and the engine has
no input of the old name.

Without the input the standard ignores the condition that the body gives, and so does TensorRT;
ONNX Runtime 1.31 ends the loop by it. The two agree where the body gives True.
"""

from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs

from pipeline.machine.target import FROM_10, RTX
from pipeline.passes.graph_ops import constant, is_op, label, values_of
from pipeline.passes.infra import Pass, PassResult, Refused, each


def run(graph: gs.Graph) -> PassResult:
    """Rewrites Loop where the condition is a network input, or is missing and read in the body.

    Refused: a missing one where the body's own may become False.
    """
    network_inputs = {id(tensor) for tensor in graph.inputs}

    def rewrite(inner: gs.Graph, node: gs.Node) -> str | None:
        body = node.attrs["body"]
        if len(node.inputs) > 1 and not node.inputs[1].is_empty():
            if id(node.inputs[1]) not in network_inputs:
                return None
            _give(node, _copy(inner, node))
            return "a copy of the network input as its condition"
        if not _stays_true(body):
            raise Refused(
                "it has no condition, but its body gives one, which the ONNX standard ignores "
                "and ONNX Runtime does not: give the Loop a condition"
            )
        if not _is_read(body, body.inputs[1]):
            return None
        _give(node, constant(f"{label(node)}/condition", np.array(True)))
        return "a constant True as its condition"

    return each(graph, "Loop", rewrite)


def _stays_true(body: gs.Graph) -> bool:
    """True if the body gives the condition that it is given, or a constant True."""
    condition = body.outputs[0]
    while condition is not body.inputs[1]:
        values = values_of(condition)
        if values is not None:
            return bool(values.all())
        if not condition.inputs or not is_op(condition.inputs[0], "Identity"):
            return False
        condition = condition.inputs[0].inputs[0]
    return True


def _is_read(body: gs.Graph, tensor: gs.Tensor) -> bool:
    return bool(tensor.outputs) or any(output is tensor for output in body.outputs)


def _give(node: gs.Node, condition: gs.Tensor) -> None:
    inputs = list(node.inputs)
    node.inputs = [*inputs[:1], condition, *inputs[2:]]


def _copy(graph: gs.Graph, node: gs.Node) -> gs.Variable:
    name = f"{label(node)}/condition"
    copy = gs.Variable(name, np.bool_, node.inputs[1].shape)
    place = next(i for i, other in enumerate(graph.nodes) if other is node)
    graph.nodes.insert(place, gs.Node("Identity", name, {}, [node.inputs[1]], [copy]))
    return copy


PASS = Pass(
    name="add_loop_condition",
    run=run,
    targets=(RTX, FROM_10),
    summary="Loop without a condition, or with a network input as one -> True, or a copy",
    fault="the parser refuses the one, and renames the network input of the other",
    evidence=("cases: rtx-1.7 does not parse the one, and has no input of that name in the other",),
)
