"""Pads a model's inputs and crops its outputs, inside the ONNX graph and the engine.

A model that takes only multiples of 8 gets a graph that takes every size. The graph pads the
inputs up to the next multiple and crops the outputs back. torch.export refuses such a wrapper
although every size works: its solver can't simplify ``(h + (-h % 8)) % 8``. So the inner model is
exported, and the padding is added to the ONNX graph.

All shape arithmetic uses non-negative int64 tensors of one axis. ONNX's integer Div truncates, and
TensorRT's Mod differs from Python's for negative numbers. So the amount of padding is
``(h + m - 1) // m * m - h``, never ``-h % m``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx
import torch
from onnx import TensorProto, helper

from pipeline.errors import ExportError, InputError
from pipeline.spec.dims import Dim, DimExpr, Size, size_text
from pipeline.spec.model import ModelSpec
from pipeline.spec.padding import Padding, amounts, padded_name

_ONNX_MODES = {"replicate": "edge", "reflect": "reflect", "constant": "constant"}
_PREFIX = "padding"


def crop_factor(size: Size | str, multiples: Mapping[str, int]) -> tuple[str, int] | None:
    """(dim, k) if an inner output size is k times a padded dim, so that it can be cropped.

    Returns None for every other size: one that depends on no padded dim, or in another way (a
    feature map at 1/8). Such a size stays uncropped.
    """
    if isinstance(size, int):
        return None
    expr = DimExpr(size_text(size))
    for name, multiple in multiples.items():
        inner = padded_name(name)
        if expr.names != {inner}:
            continue
        # floor divisions are periodic: 64 consecutive multiples show any period up to 64; the
        # powers of 2 show a bound (``min(h, 600)``)
        sizes = [multiple * k for k in [*range(1, 65), *(2**i for i in range(7, 24))]]
        try:
            values = [expr.value({inner: n}) for n in sizes]
        except InputError:  # a division that is not exact
            return None
        factor = values[0] // sizes[0]
        if factor >= 1 and values == [factor * n for n in sizes]:
            return name, factor
    return None


def factors(size: Size | str, multiples: Mapping[str, int]) -> list[tuple[str, int]]:
    """[(dim, k)] if an outer output size is k times a padded dim, so it was cropped; else []."""
    if isinstance(size, int):
        return []
    expr = DimExpr(size_text(size))
    if len(expr.names) != 1 or not expr.names <= multiples.keys():
        return []
    (name,) = expr.names
    factor = expr.value({name: 1})
    period = range(1, 2 * multiples[name] + 1)
    return [(name, factor)] if all(expr.value({name: n}) == factor * n for n in period) else []


def outer_size(size: Size | str, multiples: Mapping[str, int]) -> str:
    """Rewrites an output size from the padded dims to the user's dims."""
    cropped = crop_factor(size, multiples)
    if cropped:
        name, factor = cropped
        return name if factor == 1 else f"{factor}*{name}"
    text = size_text(size)
    for name, m in multiples.items():
        whole = f"({m}*(({name} + {m - 1})//{m}))"
        text = re.sub(rf"\b{re.escape(padded_name(name))}\b", whole, text)
    return text


class PaddedModule(torch.nn.Module):
    """The reference for the padded graph: pads with torch, runs the model and crops.

    It works eagerly at concrete sizes only, and is never exported.

    Args:
        inner: the model inside the padding.
        spec: the model's spec, with a padding.
        outputs: each output's shape in terms of the user's dims, as `add_padding` returns it.
    """

    def __init__(
        self, inner: torch.nn.Module, spec: ModelSpec, outputs: Sequence[Sequence[Size | str]]
    ) -> None:
        super().__init__()
        if spec.padding is None:
            raise ExportError(f"model {spec.name} has no padding")
        self.inner = inner
        self.inputs = spec.inputs
        self.padding = spec.padding
        self.outputs = outputs

    def forward(self, *args: torch.Tensor) -> tuple[torch.Tensor, ...]:
        padding, before, sizes = self.padding, {}, {}
        padded = []
        for tensor, declared in zip(args, self.inputs, strict=True):
            for axis, size in enumerate(declared.shape):
                if isinstance(size, Dim) and size.name in padding.multiples:
                    sizes[size.name] = n = tensor.shape[axis]
                    low, high = amounts(n, padding.multiples[size.name], padding.align)
                    before[size.name] = low
                    tensor = _pad_axis(tensor, axis, low, high, padding.mode)  # noqa: PLW2901
            padded.append(tensor)
        result = self.inner(*padded)
        flat = result if isinstance(result, (tuple, list)) else (result,)
        return tuple(
            self._crop(t, s, before, sizes) for t, s in zip(flat, self.outputs, strict=True)
        )

    def _crop(
        self,
        tensor: torch.Tensor,
        shape: Sequence[Size | str],
        before: Mapping[str, int],
        sizes: Mapping[str, int],
    ) -> torch.Tensor:
        for axis, size in enumerate(shape):
            for name, factor in factors(size, self.padding.multiples):
                tensor = tensor.narrow(axis, factor * before[name], factor * sizes[name])
        return tensor


def _pad_axis(tensor: torch.Tensor, axis: int, low: int, high: int, mode: str) -> torch.Tensor:
    size = tensor.shape[axis]
    if low == high == 0:
        return tensor
    if mode == "constant":
        shape = list(tensor.shape)
        parts = []
        for n in (low, high):
            shape[axis] = n
            parts.append(tensor.new_zeros(shape))
        return torch.cat([parts[0], tensor, parts[1]], dim=axis)
    index = torch.arange(-low, size + high)
    if mode == "replicate":
        index = index.clamp(0, size - 1)
    else:  # reflect, without repeating the edge
        index = (size - 1) - ((size - 1) - index.abs()).abs()
    return tensor.index_select(axis, index)


@dataclass
class _IntegerGraph:
    """Appends small integer nodes to an ONNX graph."""

    graph: onnx.GraphProto
    nodes: list[onnx.NodeProto]

    def constant(self, name: str, *values: int) -> str:
        name = f"{_PREFIX}/{name}"
        if all(i.name != name for i in self.graph.initializer):
            tensor = helper.make_tensor(name, TensorProto.INT64, [len(values)], values)
            self.graph.initializer.append(tensor)
        return name

    def node(self, op: str, inputs: Sequence[str], name: str, **attributes: Any) -> str:
        """The output of a new node, or of an existing node that computes the same."""
        new = helper.make_node(op, list(inputs), [f"{_PREFIX}/{name}"], **attributes)
        for old in self.nodes:
            if (old.op_type, old.input, old.attribute) == (new.op_type, new.input, new.attribute):
                return str(old.output[0])
        new.name = new.output[0]
        self.nodes.append(new)
        return str(new.output[0])


def add_padding(model: onnx.ModelProto, spec: ModelSpec) -> dict[str, list[int | str]]:
    """Adds the spec's padding and cropping to the graph of `model`, in place.

    Args:
        model: the inner model, with inputs and outputs named as in `spec`. Each padded dim is in
            the inputs as its `padded_name`; outputs' sizes are expressions of these names.
        spec: the model's spec, with a padding.

    Returns:
        The shape of every output in terms of the spec's dims.

    Raises:
        ExportError: the spec has no padding, or an input lacks the dim it should have.
    """
    padding = spec.padding
    if padding is None:
        raise ExportError(f"model {spec.name} has no padding")
    graph = model.graph
    tail = list(graph.node)
    head = _IntegerGraph(graph, [])
    before = _pad_inputs(head, graph, spec, padding)
    foot = _IntegerGraph(graph, [])
    shapes = _crop_outputs(foot, graph, padding, before, tail)
    del graph.node[:]
    graph.node.extend([*head.nodes, *tail, *foot.nodes])
    return shapes


def _pad_inputs(
    head: _IntegerGraph, graph: onnx.GraphProto, spec: ModelSpec, padding: Padding
) -> dict[str, tuple[str, str]]:
    """Adds the Pad nodes. Returns the tensors (before, size) of each padded dim, each [1]."""
    known: dict[str, tuple[str, str, str]] = {}
    renamed: dict[str, str] = {}
    zero = head.constant("zero", 0)
    for value, declared in zip(graph.input, spec.inputs, strict=True):
        axes = {
            axis: size
            for axis, size in enumerate(declared.shape)
            if isinstance(size, Dim) and size.name in padding.multiples
        }
        if not axes:
            continue
        dims = value.type.tensor_type.shape.dim
        for axis, dim in axes.items():
            if dims[axis].dim_param != padded_name(dim.name):
                raise ExportError(f"input {value.name} axis {axis} is not the dim {dim.name}")
            dims[axis].dim_param = dim.name
            if dim.name not in known:
                known[dim.name] = _amount_nodes(head, value.name, axis, dim, padding, zero)
        rank = len(declared.shape)
        lows = [known[axes[a].name][0] if a in axes else zero for a in range(rank)]
        highs = [known[axes[a].name][1] if a in axes else zero for a in range(rank)]
        pads = head.node("Concat", lows + highs, f"{value.name}/pads", axis=0)
        renamed[value.name] = head.node(
            "Pad", [value.name, pads], f"{value.name}/padded", mode=_ONNX_MODES[padding.mode]
        )
    for node in graph.node:
        _rename_inputs(node, renamed)
    return {name: (low, size) for name, (low, _, size) in known.items()}


def _amount_nodes(
    head: _IntegerGraph, source: str, axis: int, dim: Dim, padding: Padding, zero: str
) -> tuple[str, str, str]:
    """Adds the arithmetic for one dim. Returns (before, behind, size), int64 tensors of [1]."""
    multiple = padding.multiples[dim.name]
    m = head.constant(f"multiple_{multiple}", multiple)
    less = head.constant(f"multiple_{multiple}_less_1", multiple - 1)
    shape = head.node("Shape", [source], f"{dim.name}/shape")
    start, end = head.constant(f"axis_{axis}", axis), head.constant(f"axis_{axis + 1}", axis + 1)
    size = head.node("Slice", [shape, start, end, zero], f"{dim.name}/size")
    more = head.node("Add", [size, less], f"{dim.name}/more")
    count = head.node("Div", [more, m], f"{dim.name}/count")
    whole = head.node("Mul", [count, m], f"{dim.name}/whole")
    total = head.node("Sub", [whole, size], f"{dim.name}/total")
    if padding.align == "end":
        return zero, total, size
    two = head.constant("two", 2)
    low = head.node("Div", [total, two], f"{dim.name}/before")
    high = head.node("Sub", [total, low], f"{dim.name}/behind")
    return low, high, size


def _crop_outputs(
    foot: _IntegerGraph,
    graph: onnx.GraphProto,
    padding: Padding,
    known: Mapping[str, tuple[str, str]],
    tail: Sequence[onnx.NodeProto],
) -> dict[str, list[int | str]]:
    shapes: dict[str, list[int | str]] = {}
    for value in graph.output:
        if any(value.name == other.name for other in graph.input):
            raise ExportError(f"output {value.name} is not computed: it is an input")
        dims = value.type.tensor_type.shape.dim
        starts, ends, axes = [], [], []
        shape: list[int | str] = []
        for axis, dim in enumerate(dims):
            size = dim.dim_param or dim.dim_value
            cropped = crop_factor(size, padding.multiples)
            if cropped:
                name, factor = cropped
                low, length = known[name]
                if factor > 1:
                    k = foot.constant(f"factor_{factor}", factor)
                    low = foot.node("Mul", [low, k], f"{value.name}/{axis}/start")
                    length = foot.node("Mul", [length, k], f"{value.name}/{axis}/length")
                starts.append(low)
                ends.append(foot.node("Add", [low, length], f"{value.name}/{axis}/end"))
                axes.append(axis)
            shape.append(size if isinstance(size, int) else outer_size(size, padding.multiples))
            if not isinstance(size, int):
                dim.dim_param = str(shape[-1])
        shapes[value.name] = shape
        if not axes:
            continue
        inner = f"{_PREFIX}/{value.name}/uncropped"
        for node in tail:
            for i, output in enumerate(node.output):
                if output == value.name:
                    node.output[i] = inner
            _rename_inputs(node, {value.name: inner})
        start = foot.node("Concat", starts, f"{value.name}/starts", axis=0)
        end = foot.node("Concat", ends, f"{value.name}/ends", axis=0)
        steps = foot.constant(f"ones_{len(axes)}", *[1] * len(axes))
        on = foot.constant("crop_" + "_".join(map(str, axes)), *axes)
        foot.nodes.append(
            helper.make_node(
                "Slice",
                [inner, start, end, on, steps],
                [value.name],
                name=f"{_PREFIX}/{value.name}/crop",
            )
        )
    return shapes


def _rename_inputs(node: onnx.NodeProto, names: Mapping[str, str]) -> None:
    """Renames the tensors that a node reads, including those in its subgraphs."""
    for i, name in enumerate(node.input):
        if name in names:
            node.input[i] = names[name]
    for attribute in node.attribute:
        for graph in [attribute.g, *attribute.graphs]:
            for inner in graph.node:
                _rename_inputs(inner, names)
