"""Writes half precision into a graph, as Casts around the nodes that compute in it.

So precision is the same on every TensorRT. Strongly typed versions (11, RTX) allow no other way.
Versions with a flag for it (8.6, 10) choose by speed alone, unless each layer has a set precision
(`pipeline/build/layer_types.py`). A float32 tensor keeps its name; in half precision, float16 or
bfloat16, it is called ``<name>/half``. Inputs, outputs, and the tensors that bodies of If, Loop and
Scan read stay float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from pipeline.graph.files import infer_shapes, inner_nodes, nodes_of, save_model
from pipeline.rewrite.half_islands import Choices, choices_of
from pipeline.rewrite.half_masks import fit_masks
from pipeline.rewrite.half_rules import HalfPlan, plan
from pipeline.rewrite.rounding import Rounding
from pipeline.spec.precision import HALVES
from pipeline.spec.recipe import Recipe

_SIZES = ("Shape", "Size")
TYPES: Mapping[str, int] = {"fp16": TensorProto.FLOAT16, "bf16": TensorProto.BFLOAT16}
UNROUNDED = "/unrounded"


def write_in_half(
    source: Path, destination: Path, precision: str = "fp16", recipe: Recipe | None = None
) -> int:
    """Writes a copy of a model that computes in half precision where this is safe.

    Args:
        source: an ONNX file, with its external data beside it.
        destination: in an existing folder.
        precision: ``fp16`` or ``bf16``.
        recipe: which nodes compute in half precision; by default, the rules decide.

    Returns:
        How many nodes compute in half precision.

    Raises:
        InputError: a line of the recipe matches no node.
    """
    model, outside = loaded(source)
    count = in_half(model, precision, recipe)
    save_model(model, destination, external=outside)
    return count


def write_rounded(
    source: Path, destination: Path, plain: str | None = None, recipe: Recipe | None = None
) -> None:
    """Writes the result of `rounded` for a model.

    Args:
        source: the file that `write_in_half` wrote, or the model before it.
        plain: the precision, if the source is the model before `write_in_half`.
        recipe: as for `write_in_half`, with `plain`.
    """
    model, outside = loaded(source)
    if plain is not None:
        in_half(model, plain, recipe)
    save_model(rounded(model), destination, external=outside)


def loaded(path: Path) -> tuple[onnx.ModelProto, bool]:
    """A model with its weights, and whether its file keeps them in external data."""
    light = onnx.load(path, load_external_data=False)
    outside = any(t.data_location == TensorProto.EXTERNAL for t in light.graph.initializer)
    return onnx.load(path) if outside else light, outside


def in_half(model: onnx.ModelProto, precision: str = "fp16", recipe: Recipe | None = None) -> int:
    """Changes a model in place, with its weights in memory. Returns the number of half nodes."""
    tensors = _prepared(model, precision)
    if recipe is None:
        made = plan_of(model.graph, tensors, precision)
    else:
        made = _choices(model, tensors, precision).plan(recipe)
    if made.half:
        _Writer(model.graph, tensors, made, TYPES[precision]).write()
    return len(made.half)


def choices_in(model: onnx.ModelProto, precision: str) -> tuple[Choices, frozenset[int]]:
    """The nodes that may compute in half precision, and those that do so by the rules.

    Args:
        model: the model before half precision, with its weights in memory. Its types and masks
            change as in `in_half`.
        precision: ``fp16`` or ``bf16``.
    """
    tensors = _prepared(model, precision)
    half = plan_of(model.graph, tensors, precision).half
    return _choices(model, tensors, precision), half


def _choices(model: onnx.ModelProto, tensors: Mapping[str, TensorProto], precision: str) -> Choices:
    readers = {name: _reader(tensor) for name, tensor in tensors.items()}
    return choices_of(model, dtypes_of(model.graph), readers, precision)


def _prepared(model: onnx.ModelProto, precision: str) -> dict[str, TensorProto]:
    """Adds the types to a model and fits its masks. Returns its float32 constants."""
    infer_shapes(model)
    graph, kind = model.graph, HALVES[precision]
    tensors = float_constants(graph)

    def value_of(name: str) -> np.ndarray | None:
        one = name in tensors and all(size == 1 for size in tensors[name].dims)
        return numpy_helper.to_array(tensors[name]) if one else None

    if fit_masks(graph, value_of, -kind.largest):
        tensors = float_constants(graph)
    return tensors


def float_constants(graph: onnx.GraphProto) -> dict[str, TensorProto]:
    """The float32 initializers and outputs of Constant nodes by name."""
    given = {value.name for value in graph.input}  # their initializers are only defaults
    tensors = {tensor.name: tensor for tensor in graph.initializer if tensor.name not in given}
    for node in graph.node:
        if node.op_type == "Constant" and node.attribute[0].name == "value":
            tensors[node.output[0]] = node.attribute[0].t
    return {n: t for n, t in tensors.items() if t.data_type == TensorProto.FLOAT}


def plan_of(graph: onnx.GraphProto, tensors: Mapping[str, TensorProto], precision: str) -> HalfPlan:
    """The nodes of a graph with known types that compute in half precision."""
    readers = {name: _reader(tensor) for name, tensor in tensors.items()}
    return plan(graph.node, dtypes_of(graph), readers, HALVES[precision])


def rounded(model: onnx.ModelProto) -> onnx.ModelProto:
    """A model that gives a GPU's half-precision values when ONNX Runtime runs it on a CPU.

    On a CPU, ONNX Runtime computes chains of float16 nodes in float32, and rounds at their ends. An
    overflow inside a chain does not show. In the returned model every node computes in float32, as
    tensor cores accumulate. Casts, which ONNX Runtime keeps, round every result. For bfloat16,
    which ONNX Runtime mostly lacks, other nodes round (`pipeline.rewrite.rounding`).

    Args:
        model: as `in_half` leaves it, with its weights in memory.
    """
    made = onnx.ModelProto()
    made.CopyFrom(model)
    infer_shapes(made)
    dtypes = {n: t for n, t in dtypes_of(made.graph).items() if t in TYPES.values()}
    functions = {(function.domain, function.name) for function in made.functions}
    taken = {name for node in nodes_of(made.graph) for name in (*node.input, *node.output)}
    apart = UNROUNDED
    while any(apart in name for name in taken):
        apart += "_"
    nodes: list[onnx.NodeProto] = []
    for number, node in enumerate(made.graph.node):
        halves = [n for n, name in enumerate(node.output) if name in dtypes]
        whole = (node.domain, node.op_type) in functions or any(True for _ in inner_nodes(node))
        if not halves or whole or node.op_type in ("Cast", "Constant"):
            nodes.append(node)
            continue
        floats: dict[str, str] = {}
        for slot, name in enumerate(node.input):
            if name in dtypes:
                if name not in floats:
                    floats[name] = f"{name}{apart}{number}"
                    nodes.append(_cast(name, floats[name], TensorProto.FLOAT))
                node.input[slot] = floats[name]
        nodes.append(node)
        for slot in halves:
            name = node.output[slot]
            node.output[slot] = f"{name}{apart}"
            nodes.append(_cast(node.output[slot], name, dtypes[name]))
    _put(made.graph, nodes)
    if TensorProto.BFLOAT16 in dtypes.values():
        _widen_bfloat16(made.graph, taken)
    return made


def _widen_bfloat16(graph: onnx.GraphProto, taken: set[str]) -> None:
    """Makes all bfloat16 tensors float32, with nodes that round in place of Casts to bfloat16."""
    rounding = Rounding(graph, taken, HALVES["bf16"].digits)
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        to = next((a.i for a in node.attribute if a.name == "to"), 0)
        if node.op_type == "Cast" and to == TensorProto.BFLOAT16:
            nodes += rounding.nodes(node.input[0], node.output[0])
            continue
        nodes.append(node)
    _put(graph, nodes)
    for tensor in graph.initializer:
        if tensor.data_type == TensorProto.BFLOAT16:
            bits = np.frombuffer(tensor.raw_data, "<u2").astype(np.uint32) << 16
            wide = bits.view(np.float32).reshape(tuple(tensor.dims))
            tensor.CopyFrom(numpy_helper.from_array(wide, tensor.name))
    for value in graph.value_info:
        if value.type.tensor_type.elem_type == TensorProto.BFLOAT16:
            value.type.tensor_type.elem_type = TensorProto.FLOAT


def _cast(source: str, output: str, to: int) -> onnx.NodeProto:
    return helper.make_node("Cast", [source], [output], name=output, to=to)


def _put(graph: onnx.GraphProto, nodes: list[onnx.NodeProto]) -> None:
    new = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:]
    graph.node.extend(new)


def _reader(tensor: TensorProto) -> Callable[[], np.ndarray]:
    return lambda: numpy_helper.to_array(tensor)


def dtypes_of(graph: onnx.GraphProto) -> dict[str, int]:
    """The known types of the tensors (`onnx.TensorProto.DataType`) by name."""
    found = {tensor.name: tensor.data_type for tensor in graph.initializer}
    for value in (*graph.input, *graph.value_info, *graph.output):
        if value.type.HasField("tensor_type"):
            found[value.name] = value.type.tensor_type.elem_type
    for node in graph.node:
        if node.op_type == "Constant" and node.attribute[0].name == "value":
            found[node.output[0]] = node.attribute[0].t.data_type
    return found


def _half_tensor(array: np.ndarray, name: str, kind: int) -> TensorProto:
    """The array as a tensor of a type of half precision, each value rounded to the nearest."""
    if kind == TensorProto.FLOAT16:
        return numpy_helper.from_array(array.astype(np.float16), name)
    # numpy has no bfloat16: it is the upper half of a float32
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    raw = np.where(np.isnan(array), 0x7FC0, nearest).astype("<u2").tobytes()
    return TensorProto(name=name, data_type=kind, dims=array.shape, raw_data=raw)


class _Writer:
    """Writes the Casts of a plan into a graph.

    Args:
        graph: The graph, which it changes.
        tensors: The float32 constants by name.
        made: The plan.
        kind: The type of half precision (`onnx.TensorProto.DataType`).
    """

    def __init__(
        self, graph: onnx.GraphProto, tensors: dict[str, TensorProto], made: HalfPlan, kind: int
    ) -> None:
        self._graph, self._tensors, self._plan, self._kind = graph, tensors, made, kind
        self._taken = {name for node in nodes_of(graph) for name in (*node.input, *node.output)}
        self._taken |= {v.name for v in (*graph.input, *graph.output, *graph.initializer)}
        self._dtypes = dtypes_of(graph)
        self._half: dict[str, str] = {}  # name -> name in half precision
        self._new: list[onnx.NodeProto] = []
        self._read_as_float = self._float_readers()

    def write(self) -> None:
        for place, node in enumerate(self._graph.node):
            if place not in self._plan.half:
                if node.op_type in _SIZES and node.input[0] in self._half:
                    node.input[0] = self._half[node.input[0]]
                self._new.append(node)
                continue
            for slot in self._plan.slots[place]:
                node.input[slot] = self._in_half(node.input[slot], node)
            outputs = list(node.output)
            self._new.append(node)
            for number, name in enumerate(outputs):
                if self._dtypes.get(name) != TensorProto.FLOAT:  # omitted, or indices
                    continue
                node.output[number] = self._half[name] = self._name(name)
                if name in self._read_as_float:
                    self._cast(node, node.output[number], name, TensorProto.FLOAT)
        kept = {name for node in self._new for name in (*node.input, *node.output)}
        kept |= {value.name for value in (*self._graph.input, *self._graph.output)}
        self._replace(kept | set(self._inner_reads()))

    def _float_readers(self) -> set[str]:
        """Names of the tensors with a float32 reader."""
        found = {value.name for value in self._graph.output} | set(self._inner_reads())
        for place, node in enumerate(self._graph.node):
            slots = self._plan.slots.get(place, ())
            if node.op_type not in _SIZES:
                found.update(name for n, name in enumerate(node.input) if n not in slots)
        return found

    def _inner_reads(self) -> Iterator[str]:
        """Names of the tensors that bodies of nodes read."""
        for node in self._graph.node:
            for inner in inner_nodes(node):
                yield from inner.input

    def _in_half(self, name: str, reader: onnx.NodeProto) -> str:
        if name not in self._half:
            half = self._half[name] = self._name(name)
            if name in self._tensors:
                array = numpy_helper.to_array(self._tensors[name])
                self._graph.initializer.append(_half_tensor(array, half, self._kind))
            else:
                self._cast(reader, name, half, self._kind)
        return self._half[name]

    def _cast(self, at: onnx.NodeProto, source: str, output: str, to: int) -> None:
        cast = helper.make_node("Cast", [source], [output], name=f"{at.name}/{output}", to=to)
        cast.metadata_props.extend(at.metadata_props)
        self._new.append(cast)

    def _name(self, name: str) -> str:
        new, number = f"{name}/half", 1
        while new in self._taken:
            number += 1
            new = f"{name}/half_{number}"
        self._taken.add(new)
        return new

    def _replace(self, kept: set[str]) -> None:
        """Replaces the graph's nodes, and removes unused weights and types."""
        graph = self._graph
        constants = {n.output[0] for n in self._new if n.op_type == "Constant"}
        read = {name for node in self._new for name in node.input} | set(self._inner_reads())
        read |= {value.name for value in graph.output}
        nodes = [n for n in self._new if n.output[0] not in constants or n.output[0] in read]
        _put(graph, nodes)
        for held in (graph.initializer, graph.value_info):
            for place in reversed(range(len(held))):
                if held[place].name not in kept:
                    del held[place]
