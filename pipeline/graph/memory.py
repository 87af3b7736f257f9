"""Estimates the memory of a run of an ONNX model at given input shapes, without running it.

Shape inference gives the sizes of all tensors (`pipeline.graph.sizes.static`). The estimate is the
weights plus the largest sum of tensors that are alive at once in graph order. Kernels also need
workspaces (im2col of a convolution); the factor `SLACK` covers them in all measured peaks.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx
import onnx.inliner
from onnx import external_data_helper, helper

from pipeline.errors import InputError, PipelineError
from pipeline.graph.ceil_pools import with_true_pools
from pipeline.graph.files import is_outside, lightened
from pipeline.graph.sizes.carried import SMALL, CarriedSizes, body_key, element_count
from pipeline.graph.sizes.static import StaticSizes
from pipeline.spec.dims import evaluate

SLACK = 1.25


@dataclass(frozen=True)
class Estimate:
    """The estimate of one run.

    Args:
        peak_bytes: The peak memory in bytes.
        output_shapes: The output shapes by name, as far as they are known.
        unknown: The number of tensors of unknown size.
        failure: Why shape inference failed; empty if it did not.
    """

    peak_bytes: int
    output_shapes: Mapping[str, tuple[int | str, ...]]
    unknown: int
    failure: str = ""


class Estimator:
    """Estimates one ONNX model at many shapes. The file is read once. Only small weights are kept.

    Args:
        path: The ONNX file.
    """

    def __init__(self, path: Path) -> None:
        model = onnx.load(path, load_external_data=False)
        if model.functions:
            model = onnx.inliner.inline_local_functions(model)
        weights = {tensor.name for tensor in model.graph.initializer}
        self._inputs = {value.name for value in model.graph.input} - weights
        self._weights = sum(
            _bytes(tensor.data_type, math.prod(tensor.dims)) for tensor in model.graph.initializer
        )
        for node in model.graph.node:
            del node.metadata_props[:]
        model = lightened(model, lambda tensor: math.prod(tensor.dims) > SMALL)
        _read_small(model, path.parent)
        model = with_true_pools(model)
        self._graph = model.graph
        self._sizes = StaticSizes(model)

    @property
    def graph(self) -> onnx.GraphProto:
        """The graph of the estimate: functions are inlined, and large weights are inputs."""
        return self._graph

    @property
    def inputs(self) -> Collection[str]:
        """The names of the graph's inputs, without weights."""
        return self._inputs

    def sizes(self, shapes: Mapping[str, Sequence[int]]) -> CarriedSizes:
        """The sizes of all tensors at these input shapes, by input name.

        Raises:
            PipelineError: Shape inference fails.
        """
        return self._sizes.at({value.name: _typed(value, shapes) for value in self._graph.input})

    def at(
        self, shapes: Mapping[str, Sequence[int]], symbols: Mapping[str, int] | None = None
    ) -> Estimate:
        """The estimate at these input shapes.

        Args:
            shapes: The shape of each input by its name.
            symbols: The sizes of the names in the file's ``dim_param`` fields. If shape inference
                fails, these fields give the sizes, and no output shapes are known.

        Raises:
            PipelineError: Shape inference fails, and there are no `symbols`.
        """
        failure = ""
        try:
            sizes = self.sizes(shapes)
        except PipelineError as error:
            failure = f"shape inference fails at {_readable(shapes)}: {error}"
            if symbols is None:
                raise PipelineError(failure) from error
            sizes = _declared(self._graph, symbols)
        peak, unknown = _peak(self._graph, sizes, self._inputs)
        outputs = {
            value.name: tuple(_dims(sizes.types[value.name]))
            for value in self._graph.output
            if not failure and value.name in sizes.types
            if sizes.types[value.name].tensor_type.HasField("shape")
        }
        return Estimate(self._weights + int(peak * SLACK), outputs, unknown, failure)


def _typed(value: onnx.ValueInfoProto, shapes: Mapping[str, Sequence[int]]) -> onnx.TypeProto:
    """An input's type with these sizes."""
    found = onnx.TypeProto()
    found.CopyFrom(value.type)
    if value.name in shapes and found.HasField("tensor_type"):
        tensor, shape = found.tensor_type, shapes[value.name]
        if tensor.HasField("shape") and len(tensor.shape.dim) != len(shape):
            raise PipelineError(
                f"{value.name}: rank {len(shape)}, expected {len(tensor.shape.dim)}"
            )
        found.CopyFrom(helper.make_tensor_type_proto(tensor.elem_type, shape))
    return found


def _readable(shapes: Mapping[str, Sequence[int]]) -> str:
    return ", ".join(f"{name}: {list(shape)}" for name, shape in shapes.items())


def _declared(graph: onnx.GraphProto, symbols: Mapping[str, int]) -> CarriedSizes:
    """The declared types of the file's tensors, with numbers for the names in their sizes."""
    found = CarriedSizes()
    for value in [*graph.input, *graph.value_info, *graph.output]:
        kind = found.types[value.name] = onnx.TypeProto()
        kind.CopyFrom(value.type)
        for dim in kind.tensor_type.shape.dim:
            with contextlib.suppress(InputError):
                if dim.dim_param:
                    dim.dim_value = evaluate(dim.dim_param, symbols)
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.g.node:
                inner = _declared(attribute.g, symbols)
                found.bodies[body_key(node, attribute.name)] = inner
    return found


def _read_small(model: onnx.ModelProto, folder: Path) -> None:
    """Reads the small weights from external data files, in place: they may be shapes."""
    for tensor in model.graph.initializer:
        if is_outside(tensor):
            with contextlib.suppress(OSError, ValueError, onnx.checker.ValidationError):
                external_data_helper.load_external_data_for_tensor(tensor, str(folder))
                tensor.data_location = onnx.TensorProto.DEFAULT


def _bytes(elem_type: int, count: int) -> int:
    return count * int(helper.tensor_dtype_to_np_dtype(elem_type).itemsize) if elem_type else 0


def _dims(kind: onnx.TypeProto) -> Iterator[int | str]:
    for dim in kind.tensor_type.shape.dim:
        yield dim.dim_value if dim.HasField("dim_value") else dim.dim_param


def _size(kind: onnx.TypeProto | None) -> int | None:
    """The bytes of a tensor; None if its size is unknown or it is not a tensor."""
    count = None if kind is None else element_count(kind)
    return None if kind is None or count is None else _bytes(kind.tensor_type.elem_type, count)


def _peak(graph: onnx.GraphProto, sizes: CarriedSizes, inputs: Collection[str]) -> tuple[int, int]:
    """The largest sum of live tensors in bytes, and the number of tensors of unknown size."""
    last: dict[str, int] = {}
    for index, node in enumerate(graph.node):
        for name in _reads(node):
            last[name] = index
    for value in graph.output:
        last[value.name] = len(graph.node)
    alive = {name: _size(sizes.types.get(name)) or 0 for name in inputs if name in last}
    total = sum(alive.values())
    peak, unknown = total, 0
    for index, node in enumerate(graph.node):
        inner = 0
        for attribute in node.attribute:
            body = sizes.bodies.get(body_key(node, attribute.name))
            if body is not None:  # a branch that does not run has no body here
                body_inputs = [v.name for v in attribute.g.input]
                body_peak, body_unknown = _peak(attribute.g, body, body_inputs)
                inner, unknown = max(inner, body_peak), unknown + body_unknown
        for name in node.output:
            size = _size(sizes.types.get(name))
            unknown += size is None and bool(name)
            alive[name] = size or 0
            total += alive[name]
        peak = max(peak, total + inner)
        for name in {*_reads(node), *node.output}:
            if name in alive and last.get(name, -1) <= index:
                total -= alive.pop(name)
    return peak, unknown


def _reads(node: onnx.NodeProto) -> Iterator[str]:
    yield from node.input
    for attribute in node.attribute:
        for body in [attribute.g, *attribute.graphs]:
            for inner in body.node:
                yield from _reads(inner)
