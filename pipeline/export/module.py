"""Builds the torch module of a spec, checks it and calls it with flat tensors.

The result takes the spec's inputs one by one. It returns a tuple of tensors in the order of the
spec's outputs, even if the model itself takes and returns nested structures.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from pipeline.errors import (
    CODE_FAULTS,
    FAULT_ADVICE,
    ExportError,
    InputError,
    PipelineError,
    ended_run,
    first_line,
)
from pipeline.export.caches import cache_arguments, with_caches
from pipeline.export.dtypes import fit_dtypes
from pipeline.export.padding import PaddedModule
from pipeline.probe.eager import example_args, model_line, quiet
from pipeline.probe.sample_sizes import examples
from pipeline.probe.state import untouched
from pipeline.spec.dims import sizes_text
from pipeline.spec.model import ModelSpec, check_output_names
from pipeline.spec.structure import (
    by_name_or_place,
    call_with,
    check_signature,
    leaves,
    output_names,
)
from pipeline.spec.tensors import Output
from pipeline.spec.weights import SCRIPTED

_TORCH = str(Path(torch.__file__).parent)


class FlatModule(torch.nn.Module):
    """Gives flat inputs and outputs to a module that takes and returns nested tensors.

    Args:
        model: the module.
        arguments: the structure of its arguments, with input names instead of tensors; None for
            positional tensors.
        names: the inputs' names, in order.
    """

    def __init__(self, model: torch.nn.Module, arguments: Any, names: Sequence[str]) -> None:
        super().__init__()
        self.model = model
        self.arguments, self.names = arguments, tuple(names)
        self.caches = cache_arguments(model.forward)

    def result(self, *tensors: torch.Tensor) -> Any:
        """The module's own result, which may be nested."""
        if self.arguments is None:
            return self.model(*tensors)
        args, kwargs = call_with(self.arguments, dict(zip(self.names, tensors, strict=True)))
        if self.caches:
            args, kwargs = with_caches(self.caches, self.model, args, kwargs)
        return self.model(*args, **kwargs)

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return flat_outputs(self.result(*tensors))


def flat_outputs(result: Any) -> tuple[Any, ...]:
    """The tensors in a model's result, in order, without None."""
    return tuple(leaf for _, leaf in leaves(result))


def built(
    spec: ModelSpec, weights: Path | None, seed: int = 0
) -> tuple[ModelSpec, torch.nn.Module]:
    """The module from `made`, in a dtype that fits, with its outputs found by `with_outputs`."""
    spec, module = made(spec, weights)
    spec, _ = fit_dtypes(spec, module, seed)
    return with_outputs(spec, module, seed)


def made(spec: ModelSpec, weights: Path | None) -> tuple[ModelSpec, torch.nn.Module]:
    """Builds the spec's module, in eval mode and with weights that need no gradients.

    Returns:
        The spec with the structure of its arguments, and the module; it takes the inputs one by
        one.

    Raises:
        InputError: `build` fails or returns no module, or the module can't be called with the
            declared inputs.
    """
    # Attention under a learnt mask gives other strides where the mask asks for gradients, even
    # under no_grad. torch 2.13 fails at a view behind it (tests/export/test_module.py).
    module = _build(spec, weights).eval().requires_grad_(False)
    hooked = bool(module._forward_pre_hooks or module._forward_hooks)
    arguments, _ = by_name_or_place(spec.name, module.forward, spec.arguments, hooked=hooked)
    spec = replace(spec, arguments=arguments)
    check_signature(spec.name, module.forward, spec.arguments, len(spec.inputs))
    if spec.arguments is None:
        return spec, module
    return spec, FlatModule(module, spec.arguments, [i.name for i in spec.inputs])


def inner(module: torch.nn.Module) -> torch.nn.Module:
    """The module that the spec's `build` returned."""
    module = module.inner if isinstance(module, PaddedModule) else module
    return module.model if isinstance(module, FlatModule) else module


def placed(spec: ModelSpec, module: torch.nn.Module) -> list[str]:
    """A note on inputs that `made` passes by position although the spec names them.

    Args:
        spec: the spec as it was declared.
        module: the module from `made`.

    Returns:
        One note, or none.
    """
    _, note = by_name_or_place(spec.name, inner(module).forward, spec.arguments)
    return [note] if note else []


def with_outputs(
    spec: ModelSpec, module: torch.nn.Module, seed: int
) -> tuple[ModelSpec, torch.nn.Module]:
    """Finds the outputs of a spec that names none, by running the module.

    Returns:
        The spec with its outputs, and the module; it returns a tuple of tensors.

    Raises:
        InputError: the module returns something that is not a tensor, or does not have an output
            whose tolerance is stated.
        ExportError: the module runs at none of the example sizes.
    """
    if spec.outputs:
        return spec, module
    call = module.result if isinstance(module, FlatModule) else module
    result = first_result(spec, module, call, seed)
    names = _names_of(spec, result)
    plain = isinstance(result, torch.Tensor) or (
        type(result) in (tuple, list) and all(isinstance(r, torch.Tensor) for r in result)
    )
    if not plain and not isinstance(module, FlatModule):
        module = FlatModule(module, None, [i.name for i in spec.inputs])
    given = spec.output_tolerances
    check_output_names(given, names)
    outputs = tuple(Output(name, tolerance=given.get(name)) for name in names)
    return replace(spec, outputs=outputs, output_names=(), output_tolerances={}), module


def _names_of(spec: ModelSpec, result: Any) -> list[str]:
    """The name of each tensor in a module's result: the spec's, or one made from its place."""
    given = spec.output_names
    try:
        names = output_names(result, lambda leaf: isinstance(leaf, torch.Tensor), unique=not given)
    except InputError as error:
        raise InputError(f"model {spec.name}: {error}") from error
    if given and len(given) != len(names):
        raise InputError(
            f"model {spec.name} has {len(names)} outputs ({', '.join(names)}), but --output-name "
            f"names {len(given)}. Name each of them"
        )
    taken = {i.name for i in spec.inputs}
    return list(given) or [f"{name}_out" if name in taken else name for name in names]


def first_result(
    spec: ModelSpec, module: torch.nn.Module, call: Callable[..., Any], seed: int
) -> Any:
    """The result of a call of the module at the first example sizes at which it runs.

    Raises:
        ExportError: it runs at none of them.
    """
    error: Exception | None = None
    words = ""
    for sizes in examples(spec.inputs, spec.rules):
        try:
            with torch.no_grad(), quiet(), untouched(module):
                return call(*example_args(spec.inputs, seed, sizes))
        except Exception as caught:
            words = words or sizes_text(sizes)
            error = error or caught
    assert error is not None
    if isinstance(error, CODE_FAULTS):
        place = model_line(traceback.extract_tb(error.__traceback__), _TORCH)
        what = f"it raises {type(error).__name__}: {first_line(error)}"
        raise ExportError(
            f"model {spec.name}: {what}{f' ({place})' if place else ''}",
            detail="".join(traceback.format_exception(error)),
            line=place,
            what=what,
            do=FAULT_ADVICE,
        ) from error
    raise ExportError(
        f"model {spec.name} runs at none of the example sizes: at {words}: {first_line(error)}",
        detail="".join(traceback.format_exception(error)),
    ) from error


def _build(spec: ModelSpec, weights: Path | None) -> torch.nn.Module:
    try:
        module = spec.build(weights)
    except (PipelineError, KeyboardInterrupt, MemoryError):
        raise
    except BaseException as error:
        if not isinstance(error, Exception):
            raise InputError(f"model {spec.name}: {ended_run(error)}") from error
        raise InputError(
            f"model {spec.name}: its build raised {type(error).__name__}: {first_line(error)}",
            detail="".join(traceback.format_exception(error)),
        ) from error
    if not isinstance(module, torch.nn.Module):
        raise InputError(
            f"model {spec.name}: its build returned {type(module).__name__}, not a torch.nn.Module"
        )
    if isinstance(module, torch.jit.ScriptModule):
        raise InputError(
            f"model {spec.name}: its build returned {SCRIPTED}. Return the torch module that it "
            "was made from, without torch.jit.load, torch.jit.script and torch.jit.trace"
        )
    empty = [name for name, p in module.named_parameters() if torch.nn.parameter.is_lazy(p)]
    if empty:
        raise InputError(
            f"model {spec.name}: {empty[0]} has no values, because its module is lazy and was not "
            "called. In build, load its weights or call the module once"
        )
    return module
