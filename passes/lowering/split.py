"""Split by a number of outputs (opset 18) becomes Split by sizes, or Slices.

Before opset 18, Split without sizes needs an axis that divides evenly. From opset 18 the last part
may be smaller. TensorRT 8.6 ignores the attribute and cuts parts of floor(size / number): an uneven
split loses its tail.
"""

from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs

from pipeline.passes.graph_ops import label
from pipeline.passes.infra import Refused
from pipeline.passes.lib.chain import Chain
from pipeline.passes.lib.sizes import dims_of
from pipeline.passes.lowering._site import Converter, Site, Steps


def _split(site: Site) -> Steps:
    node = site.node
    if not site.crosses(18) or "num_outputs" not in node.attrs:
        return
    number, data = int(node.attrs["num_outputs"]), node.inputs[0]
    axis = int(node.attrs.get("axis", 0))
    if site.input(1) is not None or number != len(node.outputs):
        raise Refused("num_outputs contradicts the node's outputs or sizes")
    size = None if data.shape is None else (dims_of(data) or [])[axis]
    if size is not None and size.is_Integer:
        block = -(-int(size) // number)
        sizes = [block] * (number - 1) + [int(size) - block * (number - 1)]
        if sizes[-1] < 0:
            raise Refused(f"{number} parts of {block} exceed the axis's size {size}")
        yield f"parts of {sizes}"
        del node.attrs["num_outputs"]
        node.inputs = [data, gs.Constant(f"{label(node)}/sizes", np.array(sizes, np.int64))]
    elif size is not None and (size / number).is_integer:
        yield f"{number} equal parts: {number} divides {size} for every size"
        del node.attrs["num_outputs"]
        node.inputs = [data]
    else:
        if any(output.is_empty() for output in node.outputs):
            raise Refused(
                "an output is omitted, and the size of the axis is dynamic: name every output"
            )
        yield f"{number} Slices of the axis's size / {number}, rounded up"
        _slices(site, number, axis)


def _slices(site: Site, number: int, axis: int) -> None:
    data, chain = site.node.inputs[0], Chain(site.graph, site.node)
    whole = chain.op("Shape", data, short="shape", dtype=np.int64)
    size = chain.op("Gather", whole, np.array([axis]), short="size", dtype=np.int64, shape=[1])
    padded = chain.op("Add", size, np.array([number - 1]), dtype=np.int64, shape=[1])
    block = chain.op("Div", padded, np.array([number]), short="block", dtype=np.int64, shape=[1])
    bounds = [
        chain.op("Mul", block, np.array([n]), short="bound", dtype=np.int64, shape=[1])
        for n in range(1, number)
    ]
    bounds = [chain.constant(np.array([0]), "zero"), *bounds, size]
    axes = chain.constant(np.array([axis]), "axes")
    chain.finish(
        *(
            chain.op("Slice", data, bounds[n], bounds[n + 1], axes, dtype=data.dtype)
            for n in range(number)
        )
    )


CONVERTERS: dict[str, Converter] = {"Split": Converter(_split, attrs=("num_outputs",))}
