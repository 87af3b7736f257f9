"""Reads a Resize node: its axes, sizes and attributes. Writes it as plain ops."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs
import sympy

from pipeline.passes.graph_ops import is_op, values_of
from pipeline.passes.infra import Refused
from pipeline.passes.lib.chain import Chain
from pipeline.passes.lib.interpolation import Interpolation, ResizedAxis, resize
from pipeline.passes.lib.sizes import dims_of, elements_of
from pipeline.passes.lib.values import Value

_ROI, _SCALES, _SIZES = 1, 2, 3
_FLOATS = (np.float32, np.float16)


@dataclass(frozen=True)
class Form:
    """What a Resize of opset 11 or later does.

    Args:
        kind: its attributes.
        rank: rank of the data.
        axes: the axes of ``sizes`` or ``scales``, not negative, in their order.
        place: index of the input that gives the size, ``SCALES`` or ``SIZES``.
        given: elements of that input, each None if it cannot be followed.
        policy: keep_aspect_ratio_policy.
    """

    node: gs.Node
    kind: Interpolation
    rank: int
    axes: tuple[int, ...]
    place: int
    given: list[sympy.Expr | None]
    policy: str

    @property
    def sized(self) -> bool:
        return self.place == _SIZES

    @property
    def numbers(self) -> list[float] | None:
        """The scales (or sizes) where they are the same for all inputs."""
        if any(value is None or not value.is_number for value in self.given):
            return None
        return [float(value) for value in self.given if value is not None]


def used_input(node: gs.Node) -> int | None:
    """Index of the input that gives the size: 3 (sizes), 2 (scales); None if neither is given."""
    for place in (_SIZES, _SCALES):
        if len(node.inputs) > place and not node.inputs[place].is_empty():
            values = values_of(node.inputs[place])
            if values is None or values.size:  # opset 11 marks an omitted input by no elements
                return place
    return None


def read(node: gs.Node) -> Form:
    """Reads a Resize node.

    Raises:
        Refused: the rank is not known, or neither sizes nor scales are given.
    """
    data, place = node.inputs[0], used_input(node)
    if data.shape is None:
        raise Refused(f"the rank of {data.name} is not known: declare it in value_info")
    if place is None:
        raise Refused("the node has neither sizes nor scales: give one of them")
    rank = len(data.shape)
    attrs = node.attrs
    axes = tuple(int(axis) % rank for axis in attrs.get("axes", range(rank)))
    given = _elements(node.inputs[place], len(axes))
    if len(given) != len(axes):
        raise Refused(f"{len(given)} sizes or scales for {len(axes)} axes: give one per axis")
    kind = Interpolation(
        mode=attrs.get("mode", "nearest"),
        transform=attrs.get("coordinate_transformation_mode", "half_pixel"),
        nearest=attrs.get("nearest_mode", "round_prefer_floor"),
        cubic=float(attrs.get("cubic_coeff_a", -0.75)),
        exclude_outside=bool(attrs.get("exclude_outside", 0)),
        antialias=bool(attrs.get("antialias", 0)),
        extrapolation=float(attrs.get("extrapolation_value", 0.0)),
    )
    policy = attrs.get("keep_aspect_ratio_policy", "stretch")
    return Form(node, kind, rank, axes, place, given, policy if place == _SIZES else "stretch")


def _elements(tensor: gs.Tensor, count: int) -> list[sympy.Expr | None]:
    """The `count` elements of a 1-D tensor, each None if it cannot be followed."""
    followed = elements_of(tensor)
    if followed is not None:
        return list(followed.values)
    parts = []
    if len(tensor.inputs) == 1 and is_op(tensor.inputs[0], "Concat"):
        parts = [elements_of(part) for part in tensor.inputs[0].inputs]
    if parts.count(None) != 1:
        return [None] * count
    known = sum(len(part.values) for part in parts if part is not None)
    values: list[sympy.Expr | None] = []
    for part in parts:
        values += [None] * (count - known) if part is None else part.values
    return values


def write_out(graph: gs.Graph, form: Form) -> str:
    """Replaces the node by plain ops, and describes them.

    Raises:
        Refused: the node cannot be replaced; the graph is unchanged.
    """
    node, kind = form.node, form.kind
    data = node.inputs[0]
    plain = kind.mode == "nearest"
    if data.dtype is None or (not plain and np.dtype(data.dtype) not in _FLOATS):
        raise Refused(
            f"the dtype of {data.name} is {data.dtype or 'not known'}, not float: cast it to float"
        )
    if kind.mode not in ("nearest", "linear", "cubic"):
        raise Refused(f"mode={kind.mode} is not a mode of Resize")
    _check_transform(kind)
    c = Chain(graph, node)
    axes = _axes(c, form)
    made = data
    if not plain and data.dtype != np.float32:
        made = c.cast(data, np.float32, "to_float")
    # innermost axes first: they are the cheapest
    for axis in sorted(axes, key=lambda axis: -axis.place):
        made = resize(c, made, form.rank, axis, kind)
    if made.dtype != data.dtype:
        made = c.cast(made, data.dtype, "from_float")
    if not axes:
        made = c.op("Identity", data, dtype=data.dtype)
    c.finish(made)
    how = "weights" if kind.antialias and not plain else "gathered pixels"
    return f"{how} along axes {sorted(axis.place for axis in axes)}"


def _check_transform(kind: Interpolation) -> None:
    """Refuses transforms for which the standard and ONNX Runtime disagree, or differ by a bit that
    matters."""
    nearest = kind.mode == "nearest"
    if kind.transform == "tf_half_pixel_for_nn" and not nearest:
        # the standard moves even an axis that keeps its size; ONNX Runtime does not
        raise Refused(f"it has no clear meaning for mode={kind.mode}: use half_pixel")
    if kind.transform == "half_pixel_symmetric" and nearest and kind.nearest in ("floor", "ceil"):
        raise Refused(
            f"nearest_mode={kind.nearest} depends on the last bit of the coordinate: "
            "use round_prefer_floor"
        )


def all_sizes(graph: gs.Graph, form: Form) -> bool:
    """Writes ``axes`` and their sizes as sizes of all axes. False if there is no ``axes``."""
    node = form.node
    attrs = {key: value for key, value in node.attrs.items() if key != "axes"}
    if "axes" not in node.attrs:
        return False
    c = Chain(graph, node)
    data = node.inputs[0]
    sizes = [_size(c, data, axis) for axis in range(form.rank)]
    for n, axis in enumerate(form.axes):
        sizes[axis] = _element(c, node.inputs[form.place], n, form)
    numbers = [size.known for size in sizes if size.known is not None]
    if len(numbers) == len(sizes):
        joined: gs.Tensor = c.constant(np.concatenate(numbers), "sizes")
    else:
        joined = c.op("Concat", *(s.data for s in sizes), short="sizes", dtype=np.int64, axis=0)
    empty = gs.Variable.empty()
    made = c.op("Resize", data, empty, empty, joined, dtype=data.dtype, **attrs)
    c.finish(made)
    return True


def _axes(c: Chain, form: Form) -> list[ResizedAxis]:
    data = form.node.inputs[0]
    source = form.node.inputs[form.place]
    roi = _roi(form)
    before = [_size(c, data, axis) for axis in form.axes]
    after = [_element(c, source, n, form) for n in range(len(form.axes))]
    kept = _kept(form)
    if form.sized:
        scales = [
            a.cast(np.float32) / b.cast(np.float32) for a, b in zip(after, before, strict=True)
        ]
    else:
        scales = after
    if form.policy != "stretch":
        common = scales[0]
        for scale in scales[1:]:
            smaller = form.policy == "not_larger"
            common = common.at_most(scale) if smaller else common.at_least(scale)
        scales, kept = [common] * len(scales), set()
    axes = []
    for n, (axis, scale, size) in enumerate(zip(form.axes, scales, before, strict=True)):
        if n in kept and roi[n] == (0.0, 1.0):
            continue
        exact = size.cast(np.float32)
        if form.policy != "stretch":
            result = (exact * scale + 0.5).floor()
        else:
            result = after[n].cast(np.float32) if form.sized else (exact * scale).floor()
        axes.append(ResizedAxis(axis, exact, result, scale, roi[n]))
    return axes


def _kept(form: Form) -> set[int]:
    """The axes that keep their size, for every size."""
    dims, results = dims_of(form.node.inputs[0]), dims_of(form.node.outputs[0])
    assert dims is not None
    kept = set()
    for n, axis in enumerate(form.axes):
        value = form.given[n]
        if form.sized:
            same = value is not None and sympy.simplify(value - dims[axis]) == 0
            # value_info shows it if the sizes cannot be followed
            named = value is None and results is not None and results[axis] == dims[axis]
            if same or named:
                kept.add(n)
        elif value == 1:
            kept.add(n)
    return kept


def _roi(form: Form) -> list[tuple[float, float]]:
    count = len(form.axes)
    if form.kind.transform != "tf_crop_and_resize":
        return [(0.0, 1.0)] * count
    # if the sizes before and after are equal by chance, the standard crops, and so do the plain
    # ops; ONNX Runtime 1.31 copies the axis
    if form.kind.antialias:
        raise Refused(
            "each runtime computes antialias with tf_crop_and_resize differently: crop with Slice"
        )
    values = values_of(form.node.inputs[_ROI])
    if values is None or values.size != 2 * count:
        raise Refused(
            "the region (roi) is computed, or does not have two values per axis: use a constant"
        )
    bounds = [(float(values[n]), float(values[count + n])) for n in range(count)]
    kept = _kept(form)
    if any(n in kept and bound != (0.0, 1.0) for n, bound in enumerate(bounds)):
        raise Refused(
            "an axis is cropped but keeps its size. ONNX Runtime ignores the region there: "
            "crop with Slice"
        )
    return bounds


def _size(c: Chain, tensor: gs.Tensor, axis: int) -> Value:
    size = tensor.shape[axis]
    if isinstance(size, (int, np.integer)):
        return Value(c, np.array([size], np.int64))
    return Value(c, c.size(tensor, axis))


def _element(c: Chain, tensor: gs.Tensor, n: int, form: Form) -> Value:
    """Element n of the sizes (int64) or scales (float32), of shape ``(1,)``."""
    dtype = np.int64 if form.sized else np.float32
    number = form.given[n]
    if number is not None and number.is_number:
        return Value(c, np.array([number]).astype(dtype))
    made = c.op(
        "Slice", tensor, np.array([n]), np.array([n + 1]), np.array([0]),
        short="size" if form.sized else "scale", dtype=dtype, shape=[1],
    )  # fmt: skip
    return Value(c, made)
