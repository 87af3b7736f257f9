"""The sizes of all tensors of an ONNX graph whose inputs have known sizes.

The nodes are visited in graph order. onnx's shape inference gives the types of a node's results.
If all inputs of a node are small and known, onnx's reference implementation computes the results.

So a Reshape, Resize or Pad knows sizes that the graph computes (Shape, Mod, Div, Where, Concat).
ONNX Runtime's symbolic inference stops at Mod.

A size that depends on the data (NonZero) stays unknown. A small tensor with such a size has several
versions, with different numbers for the unknown size. A result that is equal in all versions is
known.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from onnx import helper, numpy_helper
from onnx.shape_inference import infer_node_outputs

from pipeline.errors import PipelineError, first_line
from pipeline.graph.sizes.bodies import BODIES, add_weights
from pipeline.graph.sizes.carried import (
    SMALL,
    Carried,
    CarriedSizes,
    Types,
    Value,
    body_key,
    common,
    element_count,
    known_dims,
    settled,
)
from pipeline.graph.sizes.symbolic import contributed

if TYPE_CHECKING:
    from onnx.reference import ReferenceEvaluator

_UNKNOWN = 1 << 20  # stands for an unknown size in the last version; 0 and 1 in the first two
_RANDOM = ("RandomNormalLike", "RandomUniformLike", "Bernoulli", "Multinomial", "Dropout")
# functions for which onnx has no inference
_LIKE_FIRST = ("GroupNormalization", "MeanVarianceNormalization")


class StaticSizes:
    """Infers the sizes in one model, its functions inlined, at many sizes of its inputs."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self._graph = model.graph
        self._opsets = {_domain(o.domain): o.version for o in model.opset_import}
        self._imports = [helper.make_opsetid(d, v) for d, v in self._opsets.items()]
        self._evaluators: dict[bytes, ReferenceEvaluator] = {}
        self._weights = CarriedSizes()
        add_weights(self._graph, self._weights)
        self._numbers = itertools.count(_UNKNOWN)

    def at(self, inputs: Types) -> CarriedSizes:
        """The sizes of all tensors for these types of the graph's inputs.

        Raises:
            PipelineError: The sizes do not fit each other at a node. The message names it.
        """
        self._numbers = itertools.count(_UNKNOWN, 7)
        sizes = CarriedSizes({**self._weights.types, **inputs}, dict(self._weights.values))
        self._walk(self._graph, sizes)
        return sizes

    def _walk(self, graph: onnx.GraphProto, sizes: CarriedSizes) -> None:
        for node in graph.node:
            if node.op_type in BODIES and not _domain(node.domain):
                results = BODIES[node.op_type](node, sizes, self._walk)
            else:
                results = self._results(node, sizes)
            for name, (kind, value) in zip(node.output, results, strict=False):
                if name and kind is not None:
                    sizes.types[name] = kind
                if name and value is not None:
                    sizes.values[name] = value

    def _results(self, node: onnx.NodeProto, sizes: CarriedSizes) -> Sequence[Carried]:
        for attribute in node.attribute:
            if attribute.g.node:
                sizes.bodies[body_key(node, attribute.name)] = (
                    CarriedSizes()
                )  # all its sizes are unknown
        types = self._types(node, sizes)
        if _domain(node.domain):
            return [(kind, None) for kind in types]
        if node.op_type in ("Shape", "Size"):
            return [(types[0], self._shape(node, sizes.types.get(node.input[0])))]
        return list(zip(types, self._values(node, types, sizes), strict=True))

    def _types(self, node: onnx.NodeProto, sizes: CarriedSizes) -> list[onnx.TypeProto | None]:
        values = [sizes.values[name] for name in node.input if name in sizes.values]
        versions = max(map(len, values), default=1)
        if versions == 1:
            return self._inferred(node, sizes, 0)
        found = []
        for version in range(versions):
            with contextlib.suppress(
                PipelineError
            ):  # the number in place of an unknown size may not fit
                found.append(self._inferred(node, sizes, version))
        if len(found) < 2:
            return self._inferred(node, sizes, None)
        return [common(kinds) for kinds in zip(*found, strict=True)]

    def _inferred(
        self, node: onnx.NodeProto, sizes: CarriedSizes, version: int | None
    ) -> list[onnx.TypeProto | None]:
        """The types for one version of the values; None leaves out values with several versions."""
        types = {n: sizes.types.get(n, onnx.TypeProto()) for n in node.input if n}
        data = {}
        for name in types:
            value = sizes.values.get(name, ())
            if len(value) == 1 or (value and version is not None):
                array = value[(version or 0) % len(value)]
                if node.op_type == "Range":  # one element counts as a scalar
                    array = array.reshape(array.shape if array.size > 1 else ())
                data[name] = numpy_helper.from_array(array, name)
        domain = _domain(node.domain)
        schema = _schema(node.op_type, self._opsets.get(domain, 1), domain)
        try:
            if schema is None:
                return contributed(node, types, list(data.values()))
            if node.op_type in _LIKE_FIRST:
                return [types[node.input[0]]]
            found = infer_node_outputs(
                schema, _spelled_out(node), types, data, opset_imports=self._imports
            )
        except MemoryError:  # is no fault of the node
            raise
        except Exception as error:  # onnx's InferenceError is a RuntimeError, or a ValueError
            if any(not kind.WhichOneof("value") for kind in types.values()):
                return [None] * len(node.output)  # inference needs an unknown type
            words = first_line(error).removeprefix("[ShapeInferenceError] ")
            raise PipelineError(f"{_title(node)}: {words}") from error
        results = [found.get(name) for name in node.output]
        if node.op_type == "Reshape":
            _check_count(node, types[node.input[0]], results[0], version)
        return results

    def _shape(self, node: onnx.NodeProto, kind: onnx.TypeProto | None) -> Value | None:
        if kind is None or not kind.tensor_type.HasField("shape"):
            return None
        sizes = known_dims(kind)
        if None in sizes:
            stand_ins = [next(self._numbers) if n is None else n for n in sizes]
            versions = [[k if n is None else n for n in sizes] for k in (0, 1)]
            arrays = [np.array(v, np.int64) for v in (*versions, stand_ins)]
        else:
            arrays = [np.array(sizes, np.int64)]
        if node.op_type == "Size":
            return settled([a.prod(dtype=np.int64) for a in arrays])
        ends = {a.name: a.i for a in node.attribute}
        return settled([a[ends.get("start", 0) : ends.get("end", len(sizes))] for a in arrays])

    def _values(
        self, node: onnx.NodeProto, types: Sequence[onnx.TypeProto | None], sizes: CarriedSizes
    ) -> Sequence[Value | None]:
        nothing = [None] * len(node.output)
        known = [sizes.values.get(name) for name in node.input if name]
        if any(value is None for value in known) or node.op_type.startswith(_RANDOM):
            return nothing
        if (not known and node.op_type != "Constant") or not all(map(_small, types)):
            return nothing
        versions = max((len(value) for value in known if value), default=1)
        runs = []
        for version in range(versions):
            feed = {n: v[version % len(v)] for n, v in sizes.values.items() if n in node.input}
            try:
                with np.errstate(all="ignore"):
                    runs.append(self._evaluator(node).run(None, feed))
            except Exception:  # the reference does not know the op or the type
                return nothing
        values = [settled(versions) for versions in zip(*runs, strict=True)]
        named = dict(zip((name for name in node.output if name), values, strict=False))
        pairs = ((named.get(name), kind) for name, kind in zip(node.output, types, strict=True))
        return [value if _fits(value, kind) else None for value, kind in pairs]

    def _evaluator(self, node: onnx.NodeProto) -> ReferenceEvaluator:
        key = node.SerializeToString()
        if key not in self._evaluators:
            names = [onnx.ValueInfoProto(name=n) for n in dict.fromkeys(node.input) if n]
            results = [onnx.ValueInfoProto(name=n) for n in node.output if n]
            graph = helper.make_graph([node], "node", names, results)
            model = helper.make_model(graph, opset_imports=self._imports)
            from onnx.reference import ReferenceEvaluator  # takes 40 ms

            self._evaluators[key] = ReferenceEvaluator(model)
        return self._evaluators[key]


def _domain(name: str) -> str:
    return "" if name == "ai.onnx" else name


@cache
def _schema(op: str, version: int, domain: str) -> Any:
    return onnx.defs.get_schema(op, version, domain) if onnx.defs.has(op, version, domain) else None


def _spelled_out(node: onnx.NodeProto) -> onnx.NodeProto:
    """Adds STFT's default: without it, onnx 1.23 infers the size for ``onesided=0``."""
    if node.op_type != "STFT" or any(a.name == "onesided" for a in node.attribute):
        return node
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    copy.attribute.append(helper.make_attribute("onesided", 1))
    return copy


def _title(node: onnx.NodeProto) -> str:
    return f"{node.op_type} {node.name or ', '.join(node.output)!r}"


def _small(kind: onnx.TypeProto | None) -> bool:
    count = element_count(kind) if kind is not None and kind.tensor_type.elem_type else None
    return count is not None and count <= SMALL


def _fits(value: Value | None, kind: onnx.TypeProto | None) -> bool:
    """False if the reference's result has another type or shape than inferred."""
    if value is None or kind is None:
        return False
    array, tensor = value[0], kind.tensor_type
    dtype = helper.tensor_dtype_to_np_dtype(tensor.elem_type)
    return array.dtype == dtype and list(array.shape) == known_dims(kind)


def _check_count(
    node: onnx.NodeProto, source: onnx.TypeProto, result: onnx.TypeProto | None, version: int | None
) -> None:
    """Checks the element count of a Reshape, which onnx's inference does not."""
    if version or result is None:
        return
    have, want = element_count(source), element_count(result)
    if None not in (have, want) and have != want:
        raise PipelineError(f"{_title(node)}: {have} elements do not fit into {known_dims(result)}")
