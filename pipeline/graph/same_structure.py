"""Compares two ONNX files without the values of the weights that TensorRT can replace."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

from pipeline.graph.files import inner_graphs

_FLOATS = {
    onnx.TensorProto.FLOAT,
    onnx.TensorProto.DOUBLE,
    onnx.TensorProto.FLOAT16,
    onnx.TensorProto.BFLOAT16,
}
_STANDARD = ("", "ai.onnx")
# The inputs that TensorRT's parser keeps as weights of a layer or as a constant of the network. It
# reads all others, such as the scales of Resize, into parameters that no refit reaches.
# Source: onnxOpImporters.cpp of onnx-tensorrt, release 8.6 (convertToTensor, or addConvolutionNd).
_ALL = range(1000)
_FIRST, _SCALE_AND_BIAS = range(1), range(1, 3)
REPLACED: Mapping[str, range] = {
    **dict.fromkeys(("Conv", "ConvTranspose"), _SCALE_AND_BIAS),
    **dict.fromkeys(("LayerNormalization", "GroupNormalization"), _SCALE_AND_BIAS),
    **dict.fromkeys(("BatchNormalization",), range(1, 5)),
    **dict.fromkeys(("LSTM", "GRU", "RNN"), range(1, 4)),
    **dict.fromkeys(("MatMul", "Gemm", "Einsum", "Concat", "Where"), _ALL),
    **dict.fromkeys(("Add", "Sub", "Mul", "Div", "Pow", "Min", "Max", "Sum", "PRelu"), _ALL),
    **dict.fromkeys(("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"), _ALL),
    **dict.fromkeys(("Identity", "Cast", "Transpose", "Reshape", "Flatten"), _FIRST),
    **dict.fromkeys(("Squeeze", "Unsqueeze", "Expand", "Slice", "Gather"), _FIRST),
}


def structure_change(old: Path, new: Path) -> str:
    """Returns the first change between two ONNX files; empty if only replaceable weights differ.

    Nodes count with their names, in order. So do all attributes, and the dtypes, shapes and names
    of weights. Integers count with their values, because shapes and axes are made of them. So do
    floating-point numbers that TensorRT can't replace in an engine: tensors in attributes, and
    inputs of other nodes than those in `REPLACED`.

    Args:
        old, new: The files, with their external data in the same folders.
    """
    one, other = (onnx.load(path, load_external_data=False) for path in (old, new))
    return next(_Comparison(one, other, str(old.parent), str(new.parent)).changes(), "")


@dataclass(frozen=True)
class _Comparison:
    old: onnx.ModelProto
    new: onnx.ModelProto
    old_folder: str
    new_folder: str

    def changes(self) -> Iterator[str]:
        old, new = self.old, self.new
        if [(o.domain, o.version) for o in old.opset_import] != [
            (o.domain, o.version) for o in new.opset_import
        ]:
            yield "the opsets differ"
        yield from self._of_graphs(old.graph, new.graph)
        functions = [
            [f.SerializeToString(deterministic=True) for f in m.functions] for m in (old, new)
        ]
        if functions[0] != functions[1]:
            yield "the model's functions differ"

    @cached_property
    def _readers(self) -> Mapping[str, list[tuple[onnx.NodeProto, int]]]:
        """The nodes that read a value, with the number of the input, also in subgraphs."""
        found = defaultdict(list)
        for graph in inner_graphs(self.old.graph):
            for node in graph.node:
                for number, name in enumerate(node.input):
                    found[name].append((node, number))
        return found

    @cached_property
    def _constant(self) -> set[str]:
        """The values that are computed from weights only."""
        found = {""}  # an input that is left out
        for graph in inner_graphs(self.old.graph):
            found |= {tensor.name for tensor in graph.initializer}
            found |= {tensor.values.name for tensor in graph.sparse_initializer}
        for graph in inner_graphs(self.old.graph):
            for node in graph.node:
                if node.op_type in REPLACED or node.op_type == "Constant":
                    found |= set(node.output) if found.issuperset(node.input) else set()
        return found

    def _replaced(self, name: str) -> bool:
        """True if TensorRT can replace a weight in an engine."""
        return all(
            node.domain in _STANDARD
            and number in REPLACED.get(node.op_type, ())
            and (not self._constant.issuperset(node.input) or all(map(self._replaced, node.output)))
            for node, number in self._readers.get(name, ())
        )

    def _of_graphs(self, old: onnx.GraphProto, new: onnx.GraphProto) -> Iterator[str]:
        for word in ("input", "output"):
            pairs = [
                [(v.name, v.type.SerializeToString()) for v in getattr(g, word)] for g in (old, new)
            ]
            if pairs[0] != pairs[1]:
                yield f"the {word}s differ"
        if len(old.node) != len(new.node):
            yield f"it has {len(new.node)} nodes instead of {len(old.node)}"
        for one, other in zip(old.node, new.node, strict=False):
            yield from self._of_nodes(one, other)
        weights, sparse = (
            [{t.name: t for t in graph.initializer} for graph in (old, new)],
            [{t.values.name: t for t in graph.sparse_initializer} for graph in (old, new)],
        )
        for names in ([w.keys() for w in weights], [s.keys() for s in sparse]):
            for name in names[0] ^ names[1]:
                yield f"the weight {name} is {'missing' if name in names[0] else 'new'}"
        for name, tensor in weights[0].items():
            can, what = self._replaced(name), f"the weight {name}"
            yield from self._of_tensors(tensor, weights[1][name], what, replaced=can)
        for name, kept in sparse[0].items():
            yield from self._of_sparse(kept, sparse[1][name], f"the weight {name}")

    def _of_nodes(self, old: onnx.NodeProto, new: onnx.NodeProto) -> Iterator[str]:
        where = f"the node {old.name or old.output[0]} [{old.op_type}]"
        if (old.op_type, old.domain) != (new.op_type, new.domain):
            yield f"{where} is a {new.op_type} now"
        if old.name != new.name or old.input != new.input or old.output != new.output:
            yield f"{where} is another one, or has other inputs or outputs"
        before, after = ({a.name: a for a in node.attribute} for node in (old, new))
        free = (old.op_type, old.domain in _STANDARD) == ("Constant", True)
        for name in before.keys() | after.keys():
            one, other = before.get(name), after.get(name)
            what = f"the attribute {name} of {where.removeprefix('the ')}"
            if one is None or other is None or one.type != other.type:
                yield f"{what} differs"
            elif one.type == onnx.AttributeProto.GRAPH:
                yield from self._of_graphs(one.g, other.g)
            elif one.type == onnx.AttributeProto.TENSOR:
                can = free and self._replaced(old.output[0])
                yield from self._of_tensors(one.t, other.t, what, replaced=can)
            elif one.type == onnx.AttributeProto.SPARSE_TENSOR:
                yield from self._of_sparse(one.sparse_tensor, other.sparse_tensor, what)
            elif one.SerializeToString() != other.SerializeToString():
                yield f"{what} differs"

    def _of_sparse(
        self, old: onnx.SparseTensorProto, new: onnx.SparseTensorProto, what: str
    ) -> Iterator[str]:
        if old.dims != new.dims:
            yield f"{what} has the shape {list(new.dims)} instead of {list(old.dims)}"
        yield from self._of_tensors(old.values, new.values, what, replaced=False)
        yield from self._of_tensors(old.indices, new.indices, what, replaced=False)

    def _of_tensors(
        self, old: onnx.TensorProto, new: onnx.TensorProto, what: str, *, replaced: bool
    ) -> Iterator[str]:
        floats = old.data_type in _FLOATS
        if old.data_type != new.data_type:
            kinds = [onnx.TensorProto.DataType.Name(t.data_type).lower() for t in (old, new)]
            yield f"{what} is {kinds[1]} instead of {kinds[0]}"
        elif old.dims != new.dims:
            yield f"{what} has the shape {list(new.dims)} instead of {list(old.dims)}"
        elif not (floats and replaced) and not _equal(
            numpy_helper.to_array(old, self.old_folder), numpy_helper.to_array(new, self.new_folder)
        ):
            yield f"{what} has other {'numbers, which a refit keeps' if floats else 'integers'}"


def _equal(old: np.ndarray, new: np.ndarray) -> bool:
    """True if all elements are equal. NaN equals NaN."""
    return old.tobytes() == new.tobytes() or np.array_equal(old, new)
