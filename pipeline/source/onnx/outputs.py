"""The output shapes of an ONNX file in terms of its dims, found by running it.

The output shapes in a file are often wrong. They can be meaningless names (``Addoutput_dim_2``),
a name of an input's dim for a size that is four times as large, or a baked-in number.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx
import sympy

from pipeline.errors import ExportError, InputError, SizeError
from pipeline.export.symbols import SizePrinter
from pipeline.graph.sizes.symbolic import infer
from pipeline.probe.fit import Point, doubts, formula, holds_at
from pipeline.probe.onnx_runner import OnnxProbe, Sizes, steps
from pipeline.probe.rules import by_values
from pipeline.source.onnx.legal import mixed, with_rules
from pipeline.source.onnx.opening import without_weights
from pipeline.spec.dims import Dim, SizeRule, sizes_text
from pipeline.spec.expressions import DimExpr
from pipeline.spec.model import ModelSpec

# ops whose output size depends on the data, and ops that may bake in the example's size
_BY_DATA = ("NonZero", "NonMaxSuppression", "Unique", "Compress")
_MAYBE = (*_BY_DATA, "Loop", "If", "Range", "SequenceAt")
_BAKES = ("Reshape", "Expand", "Tile", "Resize", "ConstantOfShape", "Slice", "Pad")
_NEAR = (1, 2, 3, 5, 8, 13, 17, 33, 65)  # steps from the base of sizes that are run
_ROUNDS = 6

DeclaredShapes = Mapping[str, Sequence[int | str]]


@dataclass(frozen=True)
class _OutputAxis:
    """One axis of one output.

    Args:
        place: The output's index among the outputs.
        output: The output's name.
        axis: The axis.
        declared: The size in the file; an empty text if it is not a formula of the dims.
    """

    place: int
    output: str
    axis: int
    declared: int | str

    def __str__(self) -> str:
        return f"output {self.output} axis {self.axis}"

    def points(self, runs: OnnxProbe) -> list[Point]:
        """The sizes of each run, and the size of this axis in its result."""
        return [(sizes, shapes[self.place][self.axis]) for sizes, shapes in runs.points()]


def output_shapes(
    spec: ModelSpec,
    model: onnx.ModelProto,
    runs: OnnxProbe,
    base: Sizes,
    declared: DeclaredShapes,
) -> tuple[dict[str, list[int | str]], list[str]]:
    """Each output's shape in terms of the dims, and notes on wrong sizes in the file.

    Args:
        spec: The spec. The file must accept every size of its dims.
        model: The file.
        runs: Runs the file.
        base: Small sizes at which the file runs.
        declared: The shape of each output in the file, in terms of the dims, if it has one.

    Raises:
        ExportError: A size depends on the data, no formula was found for it, or the file states
            another number.
    """
    _check_data(spec, model, runs, base)
    dims = {name: dim for name, dim in spec.dims.items() if not dim.static}
    for sizes in (*_lines(dims, base), *mixed(spec, base)):
        sizes_to_run = with_rules(spec, sizes)
        if sizes_to_run is not None and not runs.over:
            runs.at(sizes_to_run)
    legal = {name: steps(dim, 160) for name, dim in dims.items()}
    for name in dims:
        above = [n for n in legal[name] if n >= base[name]]
        if len(above) > len(legal[name]) // 2:  # a base near max leaves no sizes above it
            legal[name] = above
    shapes: dict[str, list[int | str]] = {}
    notes: list[str] = []
    inferred: list[dict[str, list[str]]] = []
    for place, name in enumerate(runs.outputs):
        ranks = {len(seen[place]) for _, seen in runs.points()}
        if len(ranks) > 1:
            raise ExportError(
                f"model {spec.name}: output {name} has different ranks at different sizes: "
                f"{sorted(ranks)}. Reshape it to one rank"
            )
        shapes[name] = []
        for number in range(ranks.pop()):
            said = declared[name][number] if number < len(declared.get(name, ())) else ""
            axis = _OutputAxis(place, name, number, said)
            size = _formula(spec, axis, runs, base, legal)
            if size is None:
                inferred = inferred or [_inferred(model)]
                size = _translated(inferred[0].get(name, []), number, dims)
                if size is None or not holds_at(size, axis.points(runs)):
                    raise SizeError(_unknown(spec, model, axis, axis.points(runs)))
            note = _check_declared(spec, model, axis, size, axis.points(runs))
            notes += [note] if note else []
            shapes[name].append(size)
    used = {n for shape in shapes.values() for s in shape for n in DimExpr(str(s)).names}
    firsts = {i.shape[0].name for i in spec.inputs if i.shape and isinstance(i.shape[0], Dim)}
    used |= {n for rule in spec.rules for n in SizeRule(rule).names}
    notes += [f"no output's size depends on {n}" for n in sorted(firsts & dims.keys() - used)]
    return shapes, notes


def _lines(dims: Mapping[str, Dim], base: Sizes) -> list[dict[str, int]]:
    """Sizes that differ from `base` in one dim: some near ones, opt and max."""
    found = [dict(base)]
    for name, dim in dims.items():
        near = [base[name] + k * dim.multiple_of for n in _NEAR for k in (n, -n)]
        far = [dim.opt, dim.legal(dim.opt, odd=True), dim.max]
        found += [{**base, name: n} for n in [*far, *near] if dim.min <= n <= dim.max]
    return found


def _formula(
    spec: ModelSpec,
    axis: _OutputAxis,
    runs: OnnxProbe,
    base: Sizes,
    legal: Mapping[str, Sequence[int]],
) -> int | str | None:
    """The formula of one size, checked at sizes where another rounding gives another size."""
    said = axis.declared
    for _ in range(_ROUNDS):
        points = axis.points(runs)
        found = said if said != "" and holds_at(said, points) else formula(points, base)
        if found is None or isinstance(found, int) or runs.over:
            return found
        before = len(points)
        for sizes in itertools.islice(doubts(found, base, legal), 12):
            broken = runs.fails(sizes)
            if broken is not None:
                raise SizeError(f"model {spec.name}: {axis}: the file {broken}")
        if len(runs.points()) == before or holds_at(found, axis.points(runs)):
            return found
    return None


def _check_data(spec: ModelSpec, model: onnx.ModelProto, runs: OnnxProbe, base: Sizes) -> None:
    """Raises `SizeError` if the output sizes depend on the data."""
    first = runs.at(base)
    others = [
        runs.fresh(base, runs.seed + n, scale) for n, scale in ((1, 1.0), (2, 30.0), (0, 0.0))
    ]
    for other in others:
        for place, name in enumerate(runs.outputs):
            shapes = [seen[place] for seen in (first, other) if isinstance(seen, tuple)]
            if len(set(shapes)) > 1:
                a, b = shapes
                axis = next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), 0)
                raise SizeError(_by_data(spec, model, name, axis, f"{a[axis]} or {b[axis]}"))
            axis = next((n for n, size in enumerate(shapes[0] if shapes else ()) if size == 0), -1)
            if axis >= 0 and all(base.values()) and _maker(model, name, _BY_DATA):
                raise SizeError(_by_data(spec, model, name, axis, "0"))


def _by_data(spec: ModelSpec, model: onnx.ModelProto, name: str, axis: int, seen: str) -> str:
    maker = _maker(model, name, _MAYBE)
    by = f", through {maker}" if maker else ""
    return (
        f"model {spec.name}: output {name} axis {axis} depends on the data{by}: its size was "
        f"{seen} at the same input sizes. Cut the graph before it, or return a fixed "
        "number of elements (TopK, a mask)" + ("" if maker else by_values(spec))
    )


def _maker(model: onnx.ModelProto, output: str, ops: Sequence[str]) -> str:
    """The nearest node of one of these ops before an output: ``NonZero 'n3'``."""
    producers = {name: node for node in model.graph.node for name in node.output}
    queue, seen = [output], {output}
    while queue:
        node = producers.get(queue.pop(0))
        if node is None:
            continue
        if node.op_type in ops:
            return f"{node.op_type} {node.name or node.output[0]!r}".strip()
        fresh = [name for name in node.input if name and name not in seen]
        seen.update(fresh)
        queue += fresh
    return ""


def _check_declared(
    spec: ModelSpec,
    model: onnx.ModelProto,
    axis: _OutputAxis,
    size: int | str,
    points: Sequence[Point],
) -> str:
    """Compares the size in the file with the runs.

    Returns:
        A note if only a name is wrong; otherwise an empty text.

    Raises:
        ExportError: The file states another number, or it states a dim for a fixed size.
    """
    said = axis.declared
    if said == "" or holds_at(said, points):
        return ""
    wrong = next((p for p in points if not holds_at(said, [p])), points[0])
    if isinstance(said, int) or isinstance(size, int):
        node = _maker(model, axis.output, _BAKES)
        hint = f". The example's size may be baked into {node}" if node else ""
        raise SizeError(
            f"model {spec.name}: {axis}: the file states {said}, but a run gives {wrong[1]} at "
            f"{sizes_text(wrong[0])}{hint}. "
            "Export the model again with these dims dynamic, or correct the size in the file"
        )
    return f"{axis}: the file states {said}, but the size is {size}"


def _unknown(
    spec: ModelSpec, model: onnx.ModelProto, axis: _OutputAxis, points: Sequence[Point]
) -> str:
    some = "; ".join(f"{value} at {sizes_text(sizes)}" for sizes, value in points[:4])
    maker = _maker(model, axis.output, _BY_DATA)
    why = f". It may depend on the data, through {maker}" if maker else by_values(spec)
    return f"model {spec.name}: {axis}: no formula of the dims was found for its size ({some}){why}"


def _inferred(model: onnx.ModelProto) -> dict[str, list[str]]:
    """The outputs' sizes as text, from ONNX Runtime's symbolic shape inference."""
    bare = without_weights(model)
    del bare.graph.value_info[:]
    for value in bare.graph.output:
        value.type.tensor_type.ClearField("shape")
    try:
        outputs = infer(bare, {}).graph.output
    except Exception:  # the inference fails with many kinds of errors
        return {}
    return {
        v.name: [d.dim_param or str(d.dim_value) for d in v.type.tensor_type.shape.dim]
        for v in outputs
    }


def _translated(texts: Sequence[str], axis: int, dims: Mapping[str, Dim]) -> str | None:
    """A size as pipeline writes it: ``(h - 1)//2 + 1`` for ``floor(h/2 - 1/2) + 1``."""
    if axis >= len(texts):
        return None
    symbols = {name: sympy.Symbol(name, integer=True, positive=True) for name in dims}
    try:
        expression = sympy.sympify(texts[axis], locals=symbols)
        text: str = SizePrinter().doprint(expression)
        return text if DimExpr(text).names <= dims.keys() else None
    except (InputError, sympy.SympifyError, TypeError, SyntaxError):
        return None
