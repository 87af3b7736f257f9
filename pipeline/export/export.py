"""Exports a torch module to ONNX: first torch.export, then torch.onnx.export.

torch.onnx.export on a module can hide constraint errors: it applies the suggested fixes silently.
So it gets an ExportedProgram here, and its result is compared with what the spec declares.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx
import torch

from pipeline.errors import ConstraintError, ExportError, SizeError, first_line
from pipeline.export.dtypes import fit_dtypes
from pipeline.export.exported import Exported
from pipeline.export.guards import sampled_guards
from pipeline.export.module import inner, made, placed, with_outputs
from pipeline.export.ops.exporter import add_functions, to_onnx
from pipeline.export.output_sizes import check_names, true_shapes
from pipeline.export.padding import PaddedModule, add_padding
from pipeline.export.symbols import SymbolNames, apply_names, output_shapes
from pipeline.export.tolerance import with_tolerance
from pipeline.export.torch_messages import advice
from pipeline.export.trace import trace
from pipeline.graph.ceil_pools import with_true_pools
from pipeline.graph.files import is_outside, lightened, nodes_of
from pipeline.graph.origin import called, origin_of
from pipeline.machine.progress import Announce, silent
from pipeline.machine.resources import Stopwatch
from pipeline.probe.apply import explain_by_running, fit_to_module
from pipeline.probe.eager import quiet
from pipeline.probe.fit import plain_size
from pipeline.probe.grid import legal_sizes
from pipeline.probe.history import kept_values
from pipeline.spec.dims import Dim, DimExpr, Size, evaluate, shape_at, size_text, sizes_text
from pipeline.spec.model import ModelSpec, inner_inputs
from pipeline.spec.rules import Rule

OPSET = 18
_AT = ("min", "opt", "max")
_RANDOM = (
    "Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform",
    "RandomUniformLike",
)  # fmt: skip


def export(
    spec: ModelSpec,
    weights: Path | None,
    path: Path,
    *,
    seed: int = 0,
    quick: bool = False,
    announce: Announce = silent,
) -> Exported:
    """Exports a model to ONNX at opset 18, its dims dynamic and named.

    Args:
        spec: the model.
        weights: a weights file, or None for the spec's seeded random weights.
        path: the ONNX file to write; weights beyond 2 GB go into ``<path>.data`` beside it.
        seed: the seed of the example inputs' values.
        quick: whether to look less far for branches behind other branches; see
            `pipeline.export.broken_rules`.
        announce: called with each step that begins.

    Returns:
        The exported model, with the spec narrowed where it allows that.

    Raises:
        ConstraintError: the model does not run at every size of a dim. The text names the rule,
            the line of the model and what to declare.
        ExportError: torch refuses the model for another reason, or the ONNX file does not match
            the spec.
        InputError: the weights do not fit the model.
    """
    watch = Stopwatch(announce)
    with watch("model"):
        declared, (spec, module) = spec, made(spec, weights)
        notes = tuple(placed(declared, module))
        spec, more = fit_dtypes(spec, module, seed)
        notes += more
    brief: _Fitted | None = None
    try:
        done = brief = _fitted(spec, module, seed, watch, quick=quick)
        again = bool(done.rules)
    except ConstraintError:
        if not any(spec.auto(name) for name in spec.dims):
            raise  # no size was tried, so a longer search finds nothing else
        again = True
    if again:
        done = _fitted(spec, module, seed, watch, quick=quick, after=brief, brief=False)
    spec, module, program = done.spec, done.module, done.program
    notes += done.notes
    notes += tuple(sampled_guards(program, inner_inputs(spec), spec.rules))
    names = SymbolNames.of(program, inner_inputs(spec))
    inner_shapes = output_shapes(program, names)
    if len(inner_shapes) != len(spec.outputs):
        raise ExportError(
            f"model {spec.name} returns {len(inner_shapes)} tensors; the spec names "
            f"{len(spec.outputs)} outputs"
        )
    check_names(spec, inner_shapes)
    dims = {dim.name: dim for i in inner_inputs(spec) for dim in i.dims}
    inner_shapes = [[plain_size(size, dims, spec.rules) for size in s] for s in inner_shapes]
    inner_shapes = true_shapes(spec, module, inner_shapes, seed)
    with watch("torch.onnx.export"):
        model = _to_onnx(program, spec, path)
    named = dict(zip((o.name for o in spec.outputs), inner_shapes, strict=True))
    apply_names(model, names, named, spec.dims)
    shapes: dict[str, list[int | str]] = dict(
        zip((o.name for o in spec.outputs), inner_shapes, strict=True)
    )
    if spec.padding is not None:
        shapes = add_padding(model, spec)
    free = _check_inputs(model, spec)
    notes += _not_in_outputs(spec, shapes)
    _check_outputs(spec, shapes)
    _check_inferred(model, spec, shapes)
    onnx.save(model, path)
    try:
        onnx.checker.check_model(path, full_check=False)
    except onnx.checker.ValidationError as error:
        first = first_line(error)
        raise ExportError(
            f"model {spec.name}: torch.onnx.export wrote an invalid ONNX file: {first}",
            detail=str(error),
        ) from error
    opset = next(i.version for i in model.opset_import if i.domain in ("", "ai.onnx"))
    if opset != OPSET:
        raise ExportError(
            f"model {spec.name}: torch.onnx.export wrote opset {opset} instead of {OPSET}"
        )
    return Exported(spec, module, path, opset, shapes, done.rules, free, dict(watch.seconds), notes)


@dataclass(frozen=True)
class _Fitted:
    """A traced model.

    Args:
        tried: its spec, with the dims narrowed to the sizes that run.
        spec: its spec, with the dims narrowed by `rules`.
        module: its module.
        program: what torch exported.
        rules: the rules that narrowed the dims.
        notes: what else is known of it.
    """

    tried: ModelSpec
    spec: ModelSpec
    module: torch.nn.Module
    program: torch.export.ExportedProgram
    rules: tuple[Rule, ...]
    notes: tuple[str, ...]


def _fitted(
    spec: ModelSpec,
    module: torch.nn.Module,
    seed: int,
    watch: Stopwatch,
    *,
    quick: bool,
    brief: bool = True,
    after: _Fitted | None = None,
) -> _Fitted:
    """Narrows the dims to the sizes that run, and traces the model.

    A brief search finds that most models take every size. What it misses, torch.export finds; but
    its rules exclude more sizes than necessary, so the whole search comes before them. If that
    finds the same sizes as the brief one, the result `after` the brief one stays.
    """
    with watch("trying sizes"):
        spec, narrower = fit_to_module(spec, module, seed, brief=brief)
        if after and (spec.inputs, spec.rules) == (after.tried.inputs, after.tried.rules):
            return after
        tried = spec
        notes = kept_values(spec, module, inner(module), seed)
        spec, module = with_outputs(spec, module, seed)
        spec = with_tolerance(spec, module, seed)
    spec, program, rules = _traced(spec, module, seed, watch, quick)
    return _Fitted(tried, spec, module, program, (*narrower, *rules), tuple(notes))


def _traced(
    spec: ModelSpec, module: torch.nn.Module, seed: int, watch: Stopwatch, quick: bool
) -> tuple[ModelSpec, torch.export.ExportedProgram, list[Rule]]:
    """Calls `trace`. If torch fails without naming a rule on sizes, tries sizes to find one."""
    try:
        return trace(spec, module, seed, watch, quick=quick)
    except ConstraintError:
        raise
    except ExportError as error:
        reason = explain_by_running(spec, module, seed)
        if reason is None:
            raise
        detail = f"{error}\n{error.detail}"
        raise ConstraintError(
            reason.message, detail=detail, rules=reason.rules, advice=reason.advice
        ) from error


def reference(
    spec: ModelSpec,
    module: torch.nn.Module,
    output_shapes: Mapping[str, Sequence[Size | str]],
) -> torch.nn.Module:
    """The reference for the ONNX file: the module, with the spec's padding round it.

    Args:
        spec: the spec.
        module: the module that the spec builds.
        output_shapes: for each output name, its shape in terms of the dims.
    """
    if spec.padding is None:
        return module
    return PaddedModule(module, spec, [output_shapes[o.name] for o in spec.outputs])


def _to_onnx(program: torch.export.ExportedProgram, spec: ModelSpec, path: Path) -> onnx.ModelProto:
    """Writes the program, and returns it without its weights and with our plugins' functions."""
    try:
        with quiet():
            to_onnx(
                program,
                path,
                opset=OPSET,
                input_names=[i.name for i in spec.inputs],
                output_names=[o.name for o in spec.outputs],
                shapes=[i.shape for i in inner_inputs(spec)],
            )
    except ExportError as error:
        raise error.of(spec.name) from error.__cause__
    except Exception as error:  # an OnnxExporterError, or an error inside the exporter
        cause = first_line(error.__cause__ or error, repr(error))
        raise ExportError(
            f"model {spec.name}: torch.onnx.export: {cause}",
            detail=str(error),
            do=advice(cause),
        ) from error
    model = onnx.load(path, load_external_data=False)
    add_functions(model)
    for node in nodes_of(model.graph):
        if node.op_type in _RANDOM:  # calls may not show it, if it is for rare values
            raise ExportError(
                f"model {spec.name}: {called(node)}{origin_of(node)}: the model draws random "
                "numbers. Pass them as an input"
            )
    return model


def _not_in_outputs(spec: ModelSpec, shapes: Mapping[str, Sequence[int | str]]) -> tuple[str, ...]:
    """Notes for suspicious dims: the first axis of an input (a batch) that no output has."""
    used = {n for shape in shapes.values() for size in shape for n in DimExpr(str(size)).names}
    first = {i.shape[0] for i in spec.inputs if i.shape and isinstance(i.shape[0], Dim)}
    return tuple(
        f"no output's size depends on {dim.name}, the first axis of an input"
        for dim in sorted(first, key=lambda d: d.name)
        if dim.name not in used and not dim.static
    )


def _check_inputs(model: onnx.ModelProto, spec: ModelSpec) -> dict[str, str]:
    """Raises unless every input is as declared. Returns the inputs and axes of each free dim."""
    free: dict[str, list[str]] = {}
    got = [value.name for value in model.graph.input]
    if got != [i.name for i in spec.inputs]:
        raise ExportError(f"model {spec.name}: the ONNX file has the inputs {', '.join(got)}")
    for value, declared in zip(model.graph.input, spec.inputs, strict=True):
        for axis, (dim, size) in enumerate(
            zip(value.type.tensor_type.shape.dim, declared.shape, strict=True)
        ):
            where = f"{value.name} axis {axis}"
            if isinstance(size, (Dim, DimExpr)) and any(not d.static for d in size.dims):
                if not dim.dim_param or (isinstance(size, Dim) and dim.dim_param != size.name):
                    found = dim.dim_param or dim.dim_value
                    raise SizeError(f"{where}: {size_text(size)} is baked in as {found}")
                dim.dim_param = size_text(size)
                for part in size.dims:
                    free.setdefault(part.name, []).append(where)
            elif dim.dim_value != shape_at([size], {n: d.min for n, d in spec.dims.items()})[0]:
                raise SizeError(f"{where}: {dim.dim_param or dim.dim_value} instead of {size}")
    return {name: ", ".join(places) for name, places in free.items()}


def _check_outputs(spec: ModelSpec, shapes: Mapping[str, Sequence[int | str]]) -> None:
    """Raises unless torch's output shapes match the shapes that the spec declares."""
    dims = spec.dims
    # min, opt and max may all be even: consecutive sizes distinguish h//2 from (h + 1)//2
    probes = [{name: getattr(dim, at) for name, dim in dims.items()} for at in _AT]
    runs = {name: legal_sizes(dim, 64)[:32] for name, dim in dims.items()}
    probes += [
        {n: run[(k + i) % len(run)] for i, (n, run) in enumerate(runs.items())} for k in range(32)
    ]
    for output in spec.outputs:
        if output.shape is None:
            continue
        for sizes in probes:
            want, got = shape_at(output.shape, sizes), shape_at(shapes[output.name], sizes)
            if want != got:
                raise ExportError(
                    f"output {output.name}: torch gives {list(shapes[output.name])}, that is "
                    f"{got} at {sizes}; the spec declares {want}"
                )


def _check_inferred(
    model: onnx.ModelProto, spec: ModelSpec, shapes: Mapping[str, Sequence[int | str]]
) -> None:
    """Raises if ONNX shape inference finds a different output size from torch's at some sizes.

    This finds sizes that were baked into a node, such as the kernel of a pool that replaces
    adaptive_avg_pool2d. Sizes that shape inference can't compute are not checked.
    """
    bare = with_true_pools(_weightless(model))
    dims = spec.dims
    for at in _AT:
        sizes = {name: getattr(dim, at) for name, dim in dims.items()}
        probe = onnx.ModelProto()
        probe.CopyFrom(bare)
        for value, declared in zip(probe.graph.input, spec.inputs, strict=False):
            for dim, size in zip(
                value.type.tensor_type.shape.dim, shape_at(declared.shape, sizes), strict=True
            ):
                dim.dim_value = size
        inferred = onnx.shape_inference.infer_shapes(probe, data_prop=True)
        for value in inferred.graph.output:
            for axis, (dim, want) in enumerate(
                zip(value.type.tensor_type.shape.dim, shapes[value.name], strict=False)
            ):
                if not dim.HasField("dim_value") or not DimExpr(str(want)).names <= dims.keys():
                    continue
                if dim.dim_value != evaluate(want, sizes):
                    raise SizeError(
                        f"output {value.name} axis {axis}: at {sizes_text(sizes)} the ONNX file "
                        f"gives size {dim.dim_value}, and torch's formula {want} gives "
                        f"{evaluate(want, sizes)}. A size is baked in, or the output has another "
                        "form at this size, as after x.squeeze() of 1 element. "
                        "Then declare a range without this size"
                    )


def _weightless(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy without known shapes. Weights too large to be a shape become inputs."""
    bare = lightened(model, lambda tensor: math.prod(tensor.dims) > 64 or is_outside(tensor))
    del bare.graph.value_info[:]
    for value in bare.graph.output:
        value.type.tensor_type.ClearField("shape")
    return bare
