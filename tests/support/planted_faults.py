"""Plants faults in a model's ONNX. The comparison has to notice them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx
from onnx import helper, numpy_helper

Fault = Callable[[onnx.ModelProto], None]


def set_attribute(op: str, name: str, value: object, which: slice = slice(1)) -> Fault:
    """Sets an attribute of some nodes of an op; by default of the first node."""

    def plant(model: onnx.ModelProto) -> None:
        nodes = [node for node in model.graph.node if node.op_type == op][which]
        assert nodes
        for node in nodes:
            kept = [a for a in node.attribute if a.name != name]
            del node.attribute[:]
            node.attribute.extend([*kept, helper.make_attribute(name, value)])

    return plant


def set_mode(mode: str, value: str, which: slice = slice(1)) -> Fault:
    """Changes the mode of the Resize nodes that have a given mode."""

    def plant(model: onnx.ModelProto) -> None:
        found = [
            a
            for node in model.graph.node
            if node.op_type == "Resize"
            for a in node.attribute
            if a.name == "mode" and a.s == mode.encode()
        ][which]
        assert found
        for attribute in found:
            attribute.s = value.encode()

    return plant


def edit_weight(name: str, edit: Callable[[np.ndarray], np.ndarray]) -> Fault:
    """Changes the values of a weight."""

    def plant(model: onnx.ModelProto) -> None:
        (tensor,) = (t for t in model.graph.initializer if t.name == name)
        values = numpy_helper.to_array(tensor)
        edited = np.ascontiguousarray(edit(values))
        assert edited.shape == values.shape and not np.array_equal(edited, values)
        tensor.CopyFrom(numpy_helper.from_array(edited, name))

    return plant


def transpose_weight(name: str, axes: Sequence[int]) -> Fault:
    """Transposes a weight with equal sizes (a square matrix, a square convolution)."""
    return edit_weight(name, lambda values: values.transpose(axes))


def swap_weights(first: str, second: str) -> Fault:
    """Exchanges two weights of the same shape."""

    def plant(model: onnx.ModelProto) -> None:
        tensors = {t.name: t for t in model.graph.initializer}
        one, two = (numpy_helper.to_array(tensors[name]) for name in (first, second))
        assert one.shape == two.shape and not np.array_equal(one, two)
        tensors[first].CopyFrom(numpy_helper.from_array(two, first))
        tensors[second].CopyFrom(numpy_helper.from_array(one, second))

    return plant


def set_op(op: str, other: str) -> Fault:
    """Changes the op of the first node of an op. Inputs and attributes stay."""

    def plant(model: onnx.ModelProto) -> None:
        node = next(node for node in model.graph.node if node.op_type == op)
        node.op_type = other

    return plant
