"""Writes a float32 model with the rounding that a precision below float32 cannot avoid.

A tolerance is measured with it (`pipeline.compare.rounding_tolerance`). It is made from the model
before half precision, not from half.onnx: a fault of half.onnx is no noise. Nothing but products
rounds. In half precision, those that compute in it round their operands and results. In tf32, all
round their operands, and results stay float32. There, constants are rounded to the nearest number,
and the last digits of other operands are cut off, because the matrix units do not read them.
Engines of five models (TensorRT 8.6.0, H100) differed by 0.2 to 1.1 times this noise, and by 1.1
to 7.8 times that of rounding to the nearest number. Values have the range of float32: an overflow
is no noise either.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from pipeline.graph.files import infer_shapes, nodes_of, save_model
from pipeline.rewrite.half import dtypes_of, float_constants, loaded, plan_of
from pipeline.rewrite.half_rules import PRODUCTS, STANDARD
from pipeline.rewrite.rounding import Rounding, rounded_array
from pipeline.spec.precision import HALVES, ROUNDED

# how many of an op's first inputs are operands of products; later inputs are added in float32
_OPERANDS = {**dict.fromkeys(PRODUCTS, 2), "Einsum": None, "GRU": 3, "LSTM": 3, "RNN": 3}


def write_noisy(source: Path, destination: Path, precision: str) -> int:
    """Writes a copy of a model, with the names of its inputs and outputs, that rounds.

    Args:
        source: an ONNX file before half precision, with its external data beside it.
        destination: in an existing folder.
        precision: ``tf32``, ``fp16`` or ``bf16``.

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
    graph, digits = model.graph, ROUNDED[precision].digits
    tensors = float_constants(graph)
    products = _operands(graph, tensors, precision)
    if not products:
        return 0
    taken = {name for node in nodes_of(graph) for name in (*node.input, *node.output)}
    rounding, types = Rounding(graph, taken, digits), dtypes_of(graph)
    nodes: list[onnx.NodeProto] = []
    ready: dict[str, str] = {}  # name -> name of the rounded tensor
    narrowed = rounding.nodes if precision in HALVES else rounding.cut

    def rounded(name: str) -> str:
        if name not in ready:
            ready[name] = new = rounding.new(name)
            if name in tensors:
                array: np.ndarray = rounded_array(numpy_helper.to_array(tensors[name]), digits)
                graph.initializer.append(numpy_helper.from_array(array, new))
            else:
                nodes.extend(narrowed(name, new))
        return ready[name]

    for place, node in enumerate(graph.node):
        if place not in products:
            nodes.append(node)
            continue
        for slot in products[place]:
            node.input[slot] = rounded(node.input[slot])
        results = [n for n, name in enumerate(node.output) if name in types]
        if precision not in HALVES:
            results = []
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


def _operands(
    graph: onnx.GraphProto, tensors: Mapping[str, TensorProto], precision: str
) -> dict[int, Sequence[int]]:
    """The slots of the operands that round, for the place of each product that rounds."""
    if precision in HALVES:
        made = plan_of(graph, tensors, precision)
        return {n: made.slots[n] for n in made.half if graph.node[n].op_type in PRODUCTS}
    types = dtypes_of(graph)
    return {
        place: range(len(node.input[: _OPERANDS[node.op_type]]))
        for place, node in enumerate(graph.node)
        if node.domain in STANDARD
        and node.op_type in _OPERANDS
        and any(types.get(name) == TensorProto.FLOAT for name in node.output)
    }
