"""A ``Loop`` gets its own condition input: a constant True, or a copy of a network input.

RTX 1.7's parser renames the tensor at a Loop's second input (the condition) to the body's name
for it.

- ONNX allows a Loop without this input. The name in the body then has no tensor ('Node input was
  not registered').
- If the condition is a network input, the engine loses the input's name.

If the input is missing, the ONNX standard and TensorRT ignore the condition that the body
returns. ONNX Runtime 1.31 obeys it. They agree if the body returns True.
"""

from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs

from pipeline.machine.target import FROM_10, RTX
from pipeline.passes.graph_ops import constant, is_op, label, values_of
from pipeline.passes.infra import Pass, PassResult, Refused, each


def run(graph: gs.Graph) -> PassResult:
    """Rewrites a Loop if its condition is a network input, or is missing and read in the body.

    Refused: a missing condition if the body's condition may become False.
    """
    network_inputs = {id(tensor) for tensor in graph.inputs}

    def rewrite(inner: gs.Graph, node: gs.Node) -> str | None:
        body = node.attrs["body"]
        if len(node.inputs) > 1 and not node.inputs[1].is_empty():
            if id(node.inputs[1]) not in network_inputs:
                return None
            _give(node, _copy(inner, node))
            return "its condition is now a copy of the network input"
        if not _stays_true(body):
            raise Refused(
                "it has no condition input, but its body returns a condition, which the ONNX "
                "standard ignores and ONNX Runtime obeys: give the Loop a condition input"
            )
        if not _is_read(body, body.inputs[1]):
            return None
        _give(node, constant(f"{label(node)}/condition", np.array(True)))
        return "its condition is now a constant True"

    return each(graph, "Loop", rewrite)


def _stays_true(body: gs.Graph) -> bool:
    """True if the body returns the condition that it gets, or a constant True."""
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
    summary="Loop without a condition -> with True; condition is a network input -> a copy of it",
    fault="without a condition it does not parse; a network input as the condition gets renamed",
    evidence=(
        "cases: rtx-1.7 does not parse the first form, and loses the input's name in the second",
    ),
)
