"""Compares two ONNX files without the values of their floating-point weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

_FLOATS = {
    onnx.TensorProto.FLOAT,
    onnx.TensorProto.DOUBLE,
    onnx.TensorProto.FLOAT16,
    onnx.TensorProto.BFLOAT16,
}


def structure_change(old: Path, new: Path) -> str:
    """Returns the first change between two ONNX files; empty if only float weights differ.

    Nodes count with their names, in order. So do all attributes, and the dtypes, shapes and names
    of weights. Integers count with their values, because shapes and axes are made of them.

    Args:
        old, new: The files, with their external data in the same folders.
    """
    one, other = (onnx.load(path, load_external_data=False) for path in (old, new))
    folders = _Folders(str(old.parent), str(new.parent))
    return next(_of_models(one, other, folders), "")


@dataclass(frozen=True)
class _Folders:
    old: str
    new: str


def _of_models(old: onnx.ModelProto, new: onnx.ModelProto, folders: _Folders) -> Iterator[str]:
    if [(o.domain, o.version) for o in old.opset_import] != [
        (o.domain, o.version) for o in new.opset_import
    ]:
        yield "the opsets differ"
    yield from _of_graphs(old.graph, new.graph, folders)
    functions = [[f.SerializeToString(deterministic=True) for f in m.functions] for m in (old, new)]
    if functions[0] != functions[1]:
        yield "the model's functions differ"


def _of_graphs(old: onnx.GraphProto, new: onnx.GraphProto, folders: _Folders) -> Iterator[str]:
    for word in ("input", "output"):
        pairs = [
            [(v.name, v.type.SerializeToString()) for v in getattr(g, word)] for g in (old, new)
        ]
        if pairs[0] != pairs[1]:
            yield f"the {word}s differ"
    if len(old.node) != len(new.node):
        yield f"it has {len(new.node)} nodes instead of {len(old.node)}"
    for one, other in zip(old.node, new.node, strict=False):
        yield from _of_nodes(one, other, folders)
    weights: list[Mapping[str, onnx.TensorProto]] = [
        {tensor.name: tensor for tensor in graph.initializer} for graph in (old, new)
    ]
    for name in weights[0].keys() ^ weights[1].keys():
        yield f"the weight {name} is {'missing' if name in weights[0] else 'new'}"
    for name in weights[0]:
        yield from _of_tensors(weights[0][name], weights[1][name], f"the weight {name}", folders)


def _of_nodes(old: onnx.NodeProto, new: onnx.NodeProto, folders: _Folders) -> Iterator[str]:
    where = f"the node {old.name or old.output[0]} [{old.op_type}]"
    if (old.op_type, old.domain) != (new.op_type, new.domain):
        yield f"{where} is a {new.op_type} now"
    if old.name != new.name or old.input != new.input or old.output != new.output:
        yield f"{where} is another one, or has other inputs or outputs"
    before, after = ({a.name: a for a in node.attribute} for node in (old, new))
    for name in before.keys() | after.keys():
        one, other = before.get(name), after.get(name)
        what = f"the attribute {name} of {where.removeprefix('the ')}"
        if one is None or other is None or one.type != other.type:
            yield f"{what} differs"
        elif one.type == onnx.AttributeProto.GRAPH:
            yield from _of_graphs(one.g, other.g, folders)
        elif one.type == onnx.AttributeProto.TENSOR:
            yield from _of_tensors(one.t, other.t, what, folders)
        elif one.SerializeToString() != other.SerializeToString():
            yield f"{what} differs"


def _of_tensors(
    old: onnx.TensorProto, new: onnx.TensorProto, what: str, folders: _Folders
) -> Iterator[str]:
    if old.data_type != new.data_type:
        kinds = [onnx.TensorProto.DataType.Name(t.data_type).lower() for t in (old, new)]
        yield f"{what} is {kinds[1]} instead of {kinds[0]}"
    elif old.dims != new.dims:
        yield f"{what} has the shape {list(new.dims)} instead of {list(old.dims)}"
    elif old.data_type not in _FLOATS and not np.array_equal(
        numpy_helper.to_array(old, folders.old), numpy_helper.to_array(new, folders.new)
    ):
        yield f"{what} has other integers"
