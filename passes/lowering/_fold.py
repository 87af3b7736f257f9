"""Folds constants in a function body that was expanded for one node.

The standard's bodies are written for every rank and dtype. They compute axes, ranks and head
sizes, which are numbers if the node's input shapes are known. TensorRT needs them as constants.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from pipeline.passes.graph_ops import values_of
from pipeline.passes.lowering._site import numbers

_LARGEST = 4096
_NATIVE = "biuf"


def fold(graph: gs.Graph) -> None:
    """Folds nodes that follow from constants and static sizes. Removes Identity and unused nodes.

    Args:
        graph: a whole graph, in topological order, with inferred types and shapes.
    """
    done = []
    kept = {id(output) for output in graph.outputs}
    for node in graph.nodes:
        output = node.outputs[0]
        values = _value(node, graph.opset)
        if values is not None and id(output) not in kept:
            _redirect(output, gs.Constant(output.name, values))
        elif node.op == "Identity" and id(output) not in kept:
            _redirect(output, node.inputs[0])
        else:
            done.append(node)
    graph.nodes[:] = done
    graph.cleanup()


def _value(node: gs.Node, opset: int) -> np.ndarray | None:
    """The node's only output, if it is a small constant of a dtype that numpy has."""
    output = node.outputs[0]
    if node.op == "CastLike":
        to = type_number(node.inputs[1])
        if to is not None:
            node.op = "Cast"
            node.attrs["to"] = to
            del node.inputs[1]
    if len(node.outputs) != 1:
        return None
    if node.op == "Constant":
        values = values_of(output)
        return values if values is not None and values.dtype.kind in _NATIVE else None
    if node.op == "Size" and node.inputs[0].shape is not None:
        sizes = node.inputs[0].shape
        if all(isinstance(size, (int, np.integer)) for size in sizes):
            return np.array(int(np.prod(sizes)), np.int64)
    if output.dtype == np.int64 and output.shape is not None:
        found = numbers(output)
        if found is not None:
            return np.array(found, np.int64).reshape([-1] if output.shape else [])
    inputs = [values_of(tensor) for tensor in node.inputs]
    if not inputs or any(v is None or v.dtype.kind not in _NATIVE for v in inputs):
        return None
    proto = gs.exporters.onnx_exporter.OnnxExporter.export_node(node)
    names = [tensor.name for tensor in node.inputs]
    feeds = dict(zip(names, inputs, strict=True))
    shown = [
        onnx.helper.make_tensor_value_info(
            name, onnx.helper.np_dtype_to_tensor_dtype(v.dtype), v.shape
        )
        for name, v in feeds.items()
    ]
    result = onnx.helper.make_empty_tensor_value_info(output.name)
    model = onnx.helper.make_model(
        onnx.helper.make_graph([proto], "one", shown, [result]),
        opset_imports=[onnx.helper.make_opsetid("", opset)],
    )
    from onnx.reference import ReferenceEvaluator  # takes 40 ms

    results: Any = ReferenceEvaluator(model).run(None, feeds)
    value = np.asarray(results[0])
    return value if value.size <= _LARGEST and value.dtype.kind in _NATIVE else None


def type_number(tensor: gs.Tensor) -> int | None:
    """ONNX's number of a tensor's dtype, if it is known."""
    if tensor.dtype is None or isinstance(tensor.dtype, int):
        return tensor.dtype
    return int(onnx.helper.np_dtype_to_tensor_dtype(np.dtype(tensor.dtype)))


def _redirect(old: gs.Tensor, new: gs.Tensor) -> None:
    """Every reader of `old` reads `new`."""
    for reader in list(old.outputs):
        for n, given in enumerate(reader.inputs):
            if given is old:
                reader.inputs[n] = new
    old.inputs.clear()
