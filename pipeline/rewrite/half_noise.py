"""Writes a float32 model with the rounding that half precision cannot avoid.

A tolerance for half precision is measured with it (`pipeline.compare.half_tolerance`). It is made
from the model before half precision, not from half.onnx: a fault of half.onnx is no noise. It
rounds the operands and the results of the products that compute in half precision, and nothing
else. Its values have the range of float32: an overflow is no noise either.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

from pipeline.graph.files import infer_shapes, nodes_of, save_model
from pipeline.rewrite.half import dtypes_of, float_constants, loaded, plan_of
from pipeline.rewrite.half_rules import PRODUCTS
from pipeline.rewrite.rounding import Rounding, rounded_array
from pipeline.spec.precision import HALVES


def write_noisy(source: Path, destination: Path, precision: str) -> int:
    """Writes a copy of a model, with the names of its inputs and outputs, that rounds.

    Args:
        source: an ONNX file before half precision, with its external data beside it.
        destination: in an existing folder.
        precision: ``fp16`` or ``bf16``.

    Returns:
        How many products round.
    """
    model, outside = loaded(source)
    count = round_products(model, precision)
    save_model(model, destination, external=outside)
    return count


def round_products(model: onnx.ModelProto, precision: str) -> int:
    """Changes a model in place, with its weights in memory. Returns the number of products."""
    infer_shapes(model)
    graph, digits = model.graph, HALVES[precision].digits
    tensors = float_constants(graph)
    made = plan_of(graph, tensors, precision)
    products = {place for place in made.half if graph.node[place].op_type in PRODUCTS}
    if not products:
        return 0
    taken = {name for node in nodes_of(graph) for name in (*node.input, *node.output)}
    rounding, types = Rounding(graph, taken, digits), dtypes_of(graph)
    nodes: list[onnx.NodeProto] = []
    ready: dict[str, str] = {}  # name -> name of the rounded tensor

    def rounded(name: str) -> str:
        if name not in ready:
            ready[name] = new = rounding.new(name)
            if name in tensors:
                array: np.ndarray = rounded_array(numpy_helper.to_array(tensors[name]), digits)
                graph.initializer.append(numpy_helper.from_array(array, new))
            else:
                nodes.extend(rounding.nodes(name, new))
        return ready[name]

    for place, node in enumerate(graph.node):
        if place not in products:
            nodes.append(node)
            continue
        for slot in made.slots[place]:
            node.input[slot] = rounded(node.input[slot])
        results = [n for n, name in enumerate(node.output) if name in types]
        nodes.append(node)
        for slot in results:
            name = node.output[slot]
            node.output[slot] = f"{rounding.new(name)}/result"
            nodes.extend(rounding.nodes(node.output[slot], name))
            ready[name] = name
    new = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:]
    graph.node.extend(new)
    return len(products)
