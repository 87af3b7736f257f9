"""The sizes of the outputs of If, Loop and Scan, and of the tensors in their bodies."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from pipeline.errors import PipelineError
from pipeline.graph.sizes.carried import (
    SMALL,
    Carried,
    CarriedSizes,
    body_key,
    common_carried,
    element_count,
    known_dims,
    same_value,
)

Walk = Callable[[onnx.GraphProto, CarriedSizes], None]


def add_weights(graph: onnx.GraphProto, sizes: CarriedSizes) -> None:
    """Adds the types and values of a graph's initializers."""
    for tensor in graph.initializer:
        sizes.types[tensor.name] = helper.make_tensor_type_proto(tensor.data_type, tensor.dims)
        count = element_count(sizes.types[tensor.name])
        if count is not None and count <= SMALL and tensor.data_location != TensorProto.EXTERNAL:
            sizes.values[tensor.name] = (numpy_helper.to_array(tensor),)


def _if(node: onnx.NodeProto, sizes: CarriedSizes, walk: Walk) -> Sequence[Carried]:
    """The outputs of the branch that runs. If it is unknown: what the branches have in common."""
    bodies = {a.name: a.g for a in node.attribute}
    taken = _truth(sizes.values.get(node.input[0]))
    if taken is not None:
        name = "then_branch" if taken else "else_branch"
        return _body(node, name, bodies[name], sizes, [], walk)
    ends = []
    for name, body in bodies.items():
        sizes.bodies[body_key(node, name)] = CarriedSizes()
        # a branch for other sizes may fail at these; its outputs are then unknown
        with contextlib.suppress(PipelineError):
            ends.append(_body(node, name, body, sizes, [], walk))
    if len(ends) < len(bodies):
        return [(None, None)] * len(node.output)
    return [common_carried(several) for several in zip(*ends, strict=True)]


def _loop(node: onnx.NodeProto, sizes: CarriedSizes, walk: Walk) -> Sequence[Carried]:
    body = next(a.g for a in node.attribute if a.name == "body")
    count = sizes.values.get(node.input[0]) if node.input[0] else None
    goes_on = node.input[1] if len(node.input) > 1 else ""
    truth = helper.make_tensor_type_proto(TensorProto.BOOL, [])
    index = helper.make_tensor_type_proto(TensorProto.INT64, [])
    states = [
        (truth, sizes.values.get(goes_on) if goes_on else (np.array(True),)),
        *(sizes.carried(name) for name in node.input[2:]),
    ]
    states, ends = _rounds(node, body, sizes, [(index, None)], states, [], walk)
    trips = None
    if _truth(states[0][1]) and count is not None and len(count) == 1:
        trips = max(int(count[0].item()), 0)
    return [*states[1:], *(_stacked(kind, trips, 0) for kind, _ in ends[len(states) :])]


def _scan(node: onnx.NodeProto, sizes: CarriedSizes, walk: Walk) -> Sequence[Carried]:
    attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    slices = attributes["num_scan_inputs"]
    kept = len(node.input) - slices
    if len(attributes["body"].input) != len(node.input):  # opset 8 has a batch axis
        sizes.bodies[body_key(node, "body")] = CarriedSizes()
        return [(None, None)] * len(node.output)
    axes = attributes.get("scan_input_axes", [0] * slices)
    parts, trips = [], None
    for name, axis in zip(node.input[kept:], axes, strict=True):
        kind, _ = sizes.carried(name)
        part = onnx.TypeProto()
        if kind is not None:
            part.CopyFrom(kind)
        if part.tensor_type.HasField("shape"):
            place = axis % len(part.tensor_type.shape.dim)
            trips = known_dims(part)[place] if trips is None else trips
            del part.tensor_type.shape.dim[place]
        parts.append((part if kind is not None else None, None))
    states = [sizes.carried(name) for name in node.input[:kept]]
    states, ends = _rounds(node, attributes["body"], sizes, [], states, parts, walk)
    stacked = ends[len(states) :]
    places = attributes.get("scan_output_axes", [0] * len(stacked))
    return [
        *states,
        *(_stacked(kind, trips, axis) for (kind, _), axis in zip(stacked, places, strict=True)),
    ]


BODIES: Mapping[str, Callable[[onnx.NodeProto, CarriedSizes, Walk], Sequence[Carried]]] = {
    "If": _if,
    "Loop": _loop,
    "Scan": _scan,
}


def _rounds(
    node: onnx.NodeProto,
    body: onnx.GraphProto,
    sizes: CarriedSizes,
    before: Sequence[Carried],
    states: list[Carried],
    after: Sequence[Carried],
    walk: Walk,
) -> tuple[list[Carried], Sequence[Carried]]:
    """The states, and all outputs of the body, as far as every iteration has them in common.

    Args:
        node: A Loop or Scan.
        body: Its body.
        sizes: The sizes of the graph around it.
        before: The body's inputs before the states.
        states: The states before the first iteration.
        after: The body's inputs after the states.
        walk: Infers a graph's sizes in place.
    """
    while True:
        ends = _body(node, "body", body, sizes, [*before, *states, *after], walk)
        kept = [common_carried(pair) for pair in zip(states, ends[: len(states)], strict=True)]
        if all(
            old == new and same_value(was, now)
            for (old, was), (new, now) in zip(states, kept, strict=True)
        ):
            return kept, ends
        states = kept


def _body(
    node: onnx.NodeProto,
    name: str,
    body: onnx.GraphProto,
    outside: CarriedSizes,
    inputs: Sequence[Carried],
    walk: Walk,
) -> list[Carried]:
    inside = CarriedSizes(dict(outside.types), dict(outside.values))
    for value, (kind, array) in zip(body.input, inputs, strict=True):
        inside.types.pop(value.name, None)
        inside.values.pop(value.name, None)
        if kind is not None:
            inside.types[value.name] = kind
        if array is not None:
            inside.values[value.name] = array
    add_weights(body, inside)
    walk(body, inside)
    outside.bodies[body_key(node, name)] = inside
    return [inside.carried(value.name) for value in body.output]


def _truth(value: Sequence[object] | None) -> bool | None:
    return bool(value[0]) if value is not None and len(value) == 1 else None


def _stacked(kind: onnx.TypeProto | None, trips: int | None, axis: int) -> Carried:
    """The type of a body's result that a loop stacks along a new axis."""
    if kind is None or kind.WhichOneof("value") != "tensor_type":
        return None, None
    if not kind.tensor_type.HasField("shape"):
        return kind, None
    sizes = known_dims(kind)
    sizes.insert(axis % (len(sizes) + 1), trips)
    return helper.make_tensor_type_proto(kind.tensor_type.elem_type, sizes), None
