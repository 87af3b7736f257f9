"""torch -> ONNX: torch.export first (its errors are the truth about the dims), then ONNX.

torch.onnx.export on a module can hide constraint errors by taking the suggested fixes in
silence, so it is given the ExportedProgram, and what comes out is held against what was asked.
"""

from __future__ import annotations

import contextlib
import io
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import onnx
import torch

from pipeline.constraints import GuardLog, Rule, find_rules, model_line, root_name
from pipeline.dims import Dim, Size, shape_at
from pipeline.errors import ConstraintError, ExportError
from pipeline.onnx_shapes import SymbolNames, apply_names, output_shapes
from pipeline.padding import PaddedModule, add_padding, inner_inputs
from pipeline.spec import Input, ModelSpec
from pipeline.timing import Stopwatch

OPSET = 18
_ROUNDS = 4  # how often a refined dim is tried again: multiple, then range, then another dim
_TORCH = str(Path(torch.__file__).parent)


@dataclass(frozen=True)
class Exported:
    """A model as ONNX, and the torch module that it came from.

    Args:
        spec: the spec, its dims refined where that was allowed.
        module: the torch module that was exported, without padding.
        path: the ONNX file.
        opset: the file's opset.
        output_shapes: each output's shape in terms of the dims.
        refinements: what was narrowed and why, in words.
        free: for each dynamic dim, the ONNX inputs and axes where it is free.
        library_seconds: time inside torch, by name of what was called.
    """

    spec: ModelSpec
    module: torch.nn.Module
    path: Path
    opset: int
    output_shapes: Mapping[str, Sequence[int | str]]
    refinements: Sequence[str] = ()
    free: Mapping[str, str] = field(default_factory=dict)
    library_seconds: Mapping[str, float] = field(default_factory=dict)


def export(spec: ModelSpec, weights: Path | None, path: Path, *, seed: int = 0) -> Exported:
    """Exports a model to ONNX at opset 18, its dims dynamic and named.

    Args:
        spec: the model.
        weights: a weights file, or None for the spec's seeded random weights.
        path: where the ONNX file goes; weights beyond 2 GB go into ``<path>.data`` beside it.
        seed: for the example inputs' values.

    Raises:
        ConstraintError: the model does not take every size of a dim; says which rule, which
            line of the model and what to declare.
        ExportError: anything else that torch refuses, or an ONNX that is not what was asked.
        InputError: bad weights.
    """
    watch = Stopwatch()
    with watch("model"):
        module = spec.build(weights).eval()
    spec, program, refinements = _export_program(spec, module, seed, watch)
    with watch("torch.onnx.export"):
        _to_onnx(program, spec, path)
    model = onnx.load(path, load_external_data=False)
    inner = inner_inputs(spec)
    names = SymbolNames.of(program, inner)
    inner_shapes = output_shapes(program, names)
    if len(inner_shapes) != len(spec.outputs):
        raise ExportError(
            f"model {spec.name} returns {len(inner_shapes)} tensors; the spec names "
            f"{len(spec.outputs)} outputs"
        )
    apply_names(model, names, dict(zip((o.name for o in spec.outputs), inner_shapes, strict=True)))
    shapes: dict[str, list[int | str]] = dict(
        zip((o.name for o in spec.outputs), inner_shapes, strict=True)
    )
    if spec.padding is not None:
        shapes = add_padding(model, spec)
    free = _check_inputs(model, spec)
    _check_outputs(spec, shapes)
    onnx.save(model, path)
    onnx.checker.check_model(path, full_check=False)
    opset = next(i.version for i in model.opset_import if i.domain in ("", "ai.onnx"))
    if opset != OPSET:
        raise ExportError(f"model {spec.name}: torch wrote opset {opset}, asked for {OPSET}")
    return Exported(
        spec, module, path, opset, shapes, tuple(refinements), free, dict(watch.seconds)
    )


def reference(
    spec: ModelSpec, module: torch.nn.Module, output_shapes: Mapping[str, Sequence[int | str]]
) -> torch.nn.Module:
    """What the ONNX has to equal: the module, with the spec's padding round it.

    Args:
        spec: the spec.
        module: what the spec builds.
        output_shapes: by output name, in terms of the dims.
    """
    if spec.padding is None:
        return module
    return PaddedModule(module, spec, [output_shapes[o.name] for o in spec.outputs])


def _export_program(
    spec: ModelSpec, module: torch.nn.Module, seed: int, watch: Stopwatch
) -> tuple[ModelSpec, torch.export.ExportedProgram, list[str]]:
    """torch.export.export, with dims refined as torch suggests where the spec allows it."""
    refinements: list[str] = []
    for _ in range(_ROUNDS):
        inputs = inner_inputs(spec)
        try:
            with watch("torch.export"):
                return spec, _torch_export(inputs, module, seed), refinements
        except ConstraintError as error:
            rules = _explain(spec, inputs, module, seed, str(error))
            if not spec.refine_dims or any(rule.refined is None for rule in rules):
                raise _constraint_error(spec, rules) from error
            spec = _refine(spec, rules)
            refinements += [str(rule) for rule in rules]
    raise ExportError(
        f"model {spec.name}: torch.export asks for one more rule after {_ROUNDS} rounds: "
        + "; ".join(refinements)
    )


def _torch_export(
    inputs: Sequence[Input], module: torch.nn.Module, seed: int
) -> torch.export.ExportedProgram:
    """One call of torch.export.export.

    Raises:
        ConstraintError: with torch's own text.
        ExportError: anything else, with the model's line.
    """
    sizes = _example_sizes(inputs)
    args = tuple(torch.from_numpy(i.sample(sizes, seed)) for i in inputs)
    roots: dict[str, Any] = {}
    shapes = tuple(
        {axis: _torch_dim(size, roots) for axis, size in enumerate(i.shape) if _dynamic(size)}
        for i in inputs
    )
    try:
        with torch.no_grad(), _quiet():
            return torch.export.export(module, args, dynamic_shapes=shapes, strict=False)
    except Exception as error:
        text = str(error)
        if "Suggested fixes:" in text:
            raise ConstraintError(text) from error
        line = model_line(traceback.extract_tb(error.__traceback__), _TORCH)
        place = f" at {line}" if line else ""
        first = text.strip().splitlines()[0] if text.strip() else type(error).__name__
        raise ExportError(f"torch.export failed{place}: {first}", detail=text) from error


def _dynamic(size: Size) -> bool:
    return isinstance(size, Dim) and not size.static


def _torch_dim(size: Size, roots: dict[str, Any]) -> Any:
    """torch's Dim for a dim: itself, or ``k*_name`` for multiples; one object a name."""
    assert isinstance(size, Dim)
    step = size.multiple_of
    if size.name not in roots:
        root = torch.export.Dim(root_name(size), min=size.min // step, max=size.max // step)
        roots[size.name] = step * root if step > 1 else root
    return roots[size.name]


def _example_sizes(inputs: Sequence[Input]) -> dict[str, int]:
    """Small legal sizes, different for each dim and never 1.

    torch specialises an example size of 0 or 1, and equal sizes may hide a mix-up.
    """
    sizes: dict[str, int] = {}
    for dim in (dim for i in inputs for dim in i.dims):
        legal = range(dim.min, dim.max + 1, dim.multiple_of)
        fresh = [n for n in legal[1:64] if n > 1 and n not in sizes.values()]
        sizes.setdefault(dim.name, fresh[0] if fresh else dim.opt)
    return sizes


def _explain(
    spec: ModelSpec, inputs: Sequence[Input], module: torch.nn.Module, seed: int, text: str
) -> list[Rule]:
    """The rules behind a constraint violation, each with the model's line that asks for it."""
    dims = {dim.name: dim for i in inputs for dim in i.dims if not dim.static}
    rules = find_rules(text, dims)
    if not rules:
        first = text.strip().splitlines()[0]
        raise ExportError(f"model {spec.name}: torch.export: {first}", detail=text)
    import inspect

    names = list(inspect.signature(module.forward).parameters)
    arguments = {
        (names[n], axis): size.name
        for n, i in enumerate(inputs)
        for axis, size in enumerate(i.shape)
        if isinstance(size, Dim) and n < len(names)
    }
    log = GuardLog(Path(_TORCH))
    with log, contextlib.suppress(ExportError):
        _torch_export(inputs, module, seed)
    return [replace(rule, line=log.line_of(arguments, rule.dim)) for rule in rules]


def _constraint_error(spec: ModelSpec, rules: Sequence[Rule]) -> ConstraintError:
    allow = "" if spec.refine_dims else "; or set refine_dims=True to let the pipeline narrow it"
    return ConstraintError(f"model {spec.name}: {'; '.join(map(str, rules))}{allow}")


def _refine(spec: ModelSpec, rules: Sequence[Rule]) -> ModelSpec:
    refined = {rule.dim: rule.refined for rule in rules}

    def new(size: Size) -> Size:
        return refined.get(size.name) or size if isinstance(size, Dim) else size

    def all_new(shape: Sequence[Size]) -> tuple[Size, ...]:
        return tuple(new(size) for size in shape)

    return replace(
        spec,
        inputs=tuple(replace(i, shape=all_new(i.shape)) for i in spec.inputs),
        outputs=tuple(
            replace(o, shape=all_new(o.shape) if o.shape else None) for o in spec.outputs
        ),
    )


def _to_onnx(program: torch.export.ExportedProgram, spec: ModelSpec, path: Path) -> None:
    try:
        with _quiet():
            onnx_program = torch.onnx.export(
                program,
                dynamo=True,
                opset_version=OPSET,
                input_names=[i.name for i in spec.inputs],
                output_names=[o.name for o in spec.outputs],
                optimize=True,
                verbose=False,
            )
            assert onnx_program is not None
            onnx_program.save(path)
    except torch.onnx.errors.OnnxExporterError as error:
        cause = str(error.__cause__ or error).strip().splitlines()[0]
        raise ExportError(
            f"model {spec.name}: torch.onnx.export: {cause}", detail=str(error)
        ) from error


def _check_inputs(model: onnx.ModelProto, spec: ModelSpec) -> dict[str, str]:
    """Raises unless every input is as declared; returns where each dim is free."""
    free: dict[str, list[str]] = {}
    got = [value.name for value in model.graph.input]
    if got != [i.name for i in spec.inputs]:
        raise ExportError(f"model {spec.name}: the ONNX has the inputs {', '.join(got)}")
    for value, declared in zip(model.graph.input, spec.inputs, strict=True):
        for axis, (dim, size) in enumerate(
            zip(value.type.tensor_type.shape.dim, declared.shape, strict=True)
        ):
            where = f"{value.name} axis {axis}"
            if _dynamic(size):
                assert isinstance(size, Dim)
                if dim.dim_param != size.name:
                    found = dim.dim_param or dim.dim_value
                    raise ExportError(f"{where}: {size.name} is baked in as {found}")
                free.setdefault(size.name, []).append(where)
            elif dim.dim_value != shape_at([size], {n: d.min for n, d in spec.dims.items()})[0]:
                raise ExportError(f"{where}: {dim.dim_param or dim.dim_value} instead of {size}")
    return {name: ", ".join(places) for name, places in free.items()}


def _check_outputs(spec: ModelSpec, shapes: Mapping[str, Sequence[int | str]]) -> None:
    """Raises unless torch's output shapes are those that the spec declares."""
    dims = spec.dims
    probes = [
        {name: getattr(dim, at) for name, dim in dims.items()} for at in ("min", "opt", "max")
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


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps torch's warnings and prints out of the way; errors still come as exceptions."""
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        yield
