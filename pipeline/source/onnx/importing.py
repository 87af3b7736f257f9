"""The export stage of an ONNX file: checks it, names its sizes and writes it into the artifact."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import onnx

from pipeline.errors import InputError
from pipeline.export.exported import Exported
from pipeline.graph.external_data import gather
from pipeline.graph.files import check_source, write_model
from pipeline.graph.names import fix_defaults, values_of
from pipeline.machine.resources import Stopwatch
from pipeline.probe.onnx_runner import OnnxProbe, newest_ir
from pipeline.source.onnx.dims import Named, graph_inputs, in_terms, named_dims, with_expressions
from pipeline.source.onnx.legal import fit_to_file
from pipeline.source.onnx.opening import open_onnx, without_weights
from pipeline.source.onnx.outputs import output_shapes
from pipeline.spec.dims import Dim
from pipeline.spec.expressions import DimExpr
from pipeline.spec.model import ModelSpec


def import_onnx(spec: ModelSpec, path: Path, *, seed: int = 0, budget: float = 60.0) -> Exported:
    """Copies a spec's ONNX file into an artifact, and runs it to find its legal and output sizes.

    External data is copied to ``<path>.data``, one tensor at a time, to save memory. ONNX Runtime
    runs the file at small sizes. It also runs min, opt, max and odd sizes if they are not too
    large. The runs show whether the file accepts these sizes, and the sizes of its outputs.

    Args:
        spec: A spec made by `onnx_spec`.
        path: The file to write, in an existing folder.
        seed: The seed of the inputs' values.
        budget: The CPU time for the runs in seconds. The comparison tries the other sizes.

    Raises:
        InputError: The file is not usable (see `open_onnx`), or ONNX Runtime does not load it.
        ConstraintError: The file does not accept every size of a dim. The message names the rule
            and the node.
        ExportError: An output's size depends on the data, or differs from the file's.
    """
    if spec.onnx is None:
        raise InputError(f"model {spec.name}: the spec has no ONNX file. Make it with onnx_spec")
    watch = Stopwatch()
    file = open_onnx(spec.onnx)
    model = file.model
    named = named_dims(model.graph)
    if spec.expressions.keys() <= named.places.keys():
        named = with_expressions(spec.onnx, named, spec.expressions, spec.dims)
    notes = [*file.notes, *fix_defaults(model)]
    if spec.reference is not None:
        notes.append(f"the reference is another file: {spec.reference.name}")
    _check_spec(spec, model, named)
    declared = _declared_shapes(model, named, spec)
    _name_sizes(model, named)
    with watch("copy"):
        gather(spec.onnx, model, file.outside, path)
        write_model(model, path)
    newest = newest_ir(path)
    if newest is not None:
        notes.append(
            f"the IR version was lowered from {model.ir_version} to {newest}, because ONNX Runtime "
            "does not read newer files"
        )
        model.ir_version = newest
        write_model(model, path)
    if spec.search_seconds is not None:
        budget = 3 * spec.search_seconds  # a third of it is for trying sizes
    runs = OnnxProbe(path, spec, seed, budget)
    applied, base = fit_to_file(spec, runs, budget / 3)
    spec = applied.spec
    # the file has both names of two equal dims, and the spec has one
    declared = {
        name: [in_terms(size, applied.merged) if isinstance(size, str) else size for size in shape]
        for name, shape in declared.items()
    }
    shapes, more = output_shapes(spec, model, runs, base, declared)
    if runs.over:
        notes.append(f"the runs stopped after {budget:g} s, so some sizes were not tried")
    _set_shapes(model, spec, shapes)
    opset = check_source(without_weights(model), path)
    with watch("copy"):
        write_model(model, path)
    free: dict[str, str] = {}
    for name, where in named.places.items():
        one = applied.merged.get(name, name)
        if not spec.dims[one].static:
            free[one] = f"{free[one]}, {where}" if one in free else where
    return Exported(
        spec,
        None,
        path,
        opset,
        shapes,
        applied.rules,
        free,
        {"onnxruntime": runs.seconds},
        (*notes, *more),
    )


def _check_spec(spec: ModelSpec, model: onnx.ModelProto, named: Named) -> None:
    """Raises `InputError` if the file changed after the spec was made."""
    same = [i.name for i in spec.inputs] == [v.name for v in graph_inputs(model.graph)]
    same = same and spec.dims.keys() == named.places.keys()
    if not same or [o.name for o in spec.outputs] != [v.name for v in model.graph.output]:
        raise InputError(
            f"{spec.onnx}: the file changed after the spec was made. Make the spec again"
        )


def _declared_shapes(
    model: onnx.ModelProto, named: Named, spec: ModelSpec
) -> dict[str, list[int | str]]:
    """The outputs' shapes in the file; an empty text for a size that is not a formula of dims."""
    known = spec.dims.keys()
    found: dict[str, list[int | str]] = {}
    for value in model.graph.output:
        found[value.name] = []
        for dim in value.type.tensor_type.shape.dim:
            text = _in_dims(dim.dim_param, named)
            try:
                fine = bool(text) and DimExpr(text).names <= known
            except InputError:
                fine = False
            size: int | str = text if fine else ""
            found[value.name].append(dim.dim_value if dim.dim_value > 0 else size)
    return found


def _in_dims(text: str, named: Named) -> str:
    """A ``dim_param`` of the file in terms of the dims."""
    text = text.strip()
    if text in named.texts:
        return named.texts[text]
    return in_terms(text, named.texts)


def _name_sizes(model: onnx.ModelProto, named: Named) -> None:
    """Renames the sizes of inputs and of inner values to the dims, in place."""
    for value in values_of(model.graph):
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            shape = named.shapes.get(value.name)
            if shape is not None and isinstance(shape[axis], str):
                dim.dim_param = str(shape[axis])
            elif dim.dim_param:
                dim.dim_param = _in_dims(dim.dim_param, named)


def _set_shapes(
    model: onnx.ModelProto, spec: ModelSpec, shapes: Mapping[str, Sequence[int | str]]
) -> None:
    """Writes the outputs' shapes, and the size of each static dim, into the model."""
    for value in model.graph.output:
        tensor = value.type.tensor_type
        tensor.ClearField("shape")
        tensor.shape.SetInParent()
        for size in shapes[value.name]:
            dim = tensor.shape.dim.add()
            if isinstance(size, int):
                dim.dim_value = size
            else:
                dim.dim_param = size
    inputs = {i.name: i for i in spec.inputs}
    for value in graph_inputs(model.graph):
        for dim, size in zip(
            value.type.tensor_type.shape.dim, inputs[value.name].shape, strict=True
        ):
            if isinstance(size, Dim) and size.static:
                dim.dim_value = size.min
