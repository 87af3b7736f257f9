"""Finds the first value of a model beyond 65504, the largest float16, and its node."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

from pipeline.graph.files import save_model
from pipeline.graph.origin import called, origin_of
from pipeline.graph.session import run_onnx
from pipeline.machine.polygraphy import collected
from pipeline.rewrite.half import UNROUNDED, write_rounded
from pipeline.spec.recipe import Recipe
from pipeline.spec.tensors import Feed

_LARGEST = float(np.finfo(np.float16).max)


def first_overflow(model: Path, feed: Feed, recipe: Recipe | None = None) -> str:
    """Returns the first value that float16 cannot hold, in one line; empty if not found.

    Runs the model once, and keeps only the largest magnitude of each value.

    Args:
        model: The model before half precision.
        feed: The inputs by name.
        recipe: Which nodes compute in half precision; by default, the rules decide.
    """
    with tempfile.TemporaryDirectory(prefix="pipeline-") as folder:
        path = Path(folder) / model.name
        try:
            write_rounded(model, path, plain="fp16", recipe=recipe)
            proto = onnx.load(path)
            values = _watch(proto.graph)
            save_model(proto, path, external=any(path.parent.glob(f"{path.name}.*")))
            with collected():
                outputs = next(run_onnx(path, [feed]))
        except Exception:  # any library error: this is only advice for a failed comparison
            return ""
    for source, largest in values.items():
        size = outputs[largest]
        if not float(size) <= _LARGEST:
            name = source.partition(UNROUNDED)[0].removesuffix("/half")
            node = next((n for n in proto.graph.node if source in n.output), None)
            if node is not None:
                node.output[list(node.output).index(source)] = name
            who = f"the {called(node)}{origin_of(node)}" if node is not None else f"input {name}"
            return f"first overflow in half precision: {who}: {name} reaches {float(size):.3g}"
    return ""


def _watch(graph: onnx.GraphProto) -> dict[str, str]:
    """Adds an output with the largest magnitude of every value that a graph of `rounded` casts to
    half precision. Returns the output's name by the value's name, in the graph's order."""
    names: dict[str, str] = {}
    floats = {v.name for v in graph.input if v.type.tensor_type.elem_type == TensorProto.FLOAT}
    floats |= {
        v.name for v in graph.value_info if v.type.tensor_type.elem_type == TensorProto.FLOAT
    }
    floats |= {name for node in graph.node for name in node.output if UNROUNDED in name}
    for node in list(graph.node):
        to = next((a.i for a in node.attribute if a.name == "to"), 0)
        source = node.input[0] if node.input else ""
        if node.op_type != "Cast" or to != TensorProto.FLOAT16 or source not in floats:
            continue
        names[source] = f"{source}/largest"
        graph.node.append(helper.make_node("Abs", [source], [f"{source}/magnitude"]))
        graph.node.append(
            helper.make_node("ReduceMax", [f"{source}/magnitude"], [names[source]], keepdims=0)
        )
        graph.output.append(helper.make_tensor_value_info(names[source], TensorProto.FLOAT, []))
    return names
