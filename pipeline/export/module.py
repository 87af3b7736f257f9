"""The torch module behind a spec: made, checked, and called with flat tensors.

Everything after this sees a module that takes the spec's inputs one by one and returns a tuple
of tensors in the order of the spec's outputs, whatever the model itself takes and returns.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from pipeline.errors import ExportError, InputError, PipelineError, first_line
from pipeline.probe.eager import example_args, quiet
from pipeline.probe.sample_sizes import examples
from pipeline.spec.dims import sizes_text
from pipeline.spec.model import ModelSpec
from pipeline.spec.structure import (
    by_name_or_place,
    call_with,
    check_signature,
    leaves,
    output_names,
)
from pipeline.spec.tensors import Output


class FlatModule(torch.nn.Module):
    """A module that takes and returns nested tensors, with flat ones instead.

    Args:
        model: the module.
        arguments: the structure of its arguments, with names in place of tensors; None for
            positional tensors.
        names: the inputs' names, in order.
    """

    def __init__(self, model: torch.nn.Module, arguments: Any, names: Sequence[str]) -> None:
        super().__init__()
        self.model = model
        self.arguments, self.names = arguments, tuple(names)

    def result(self, *tensors: torch.Tensor) -> Any:
        """What the module itself returns."""
        if self.arguments is None:
            return self.model(*tensors)
        args, kwargs = call_with(self.arguments, dict(zip(self.names, tensors, strict=True)))
        return self.model(*args, **kwargs)

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return flat_outputs(self.result(*tensors))


def flat_outputs(result: Any) -> tuple[Any, ...]:
    """The tensors in what a model returned, in order; None is left out."""
    return tuple(leaf for _, leaf in leaves(result))


def built(
    spec: ModelSpec, weights: Path | None, seed: int = 0
) -> tuple[ModelSpec, torch.nn.Module]:
    """`made`, and its outputs found (`with_outputs`)."""
    spec, module = made(spec, weights)
    return with_outputs(spec, module, seed)


def made(spec: ModelSpec, weights: Path | None) -> tuple[ModelSpec, torch.nn.Module]:
    """Makes the spec's module, in eval mode and its weights without gradients; it takes the inputs
    one by one.

    Raises:
        InputError: `build` fails or makes no module, or the module can't be called with the
            declared inputs.
    """
    # Attention under a learnt mask gives other strides where the mask asks for gradients, even
    # under no_grad. torch 2.13 fails at a view behind it (tests/export/test_module.py).
    module = _made(spec, weights).eval().requires_grad_(False)
    arguments, _ = by_name_or_place(spec.name, module.forward, spec.arguments)
    spec = replace(spec, arguments=arguments)
    check_signature(spec.name, module.forward, spec.arguments, len(spec.inputs))
    if spec.arguments is None:
        return spec, module
    return spec, FlatModule(module, spec.arguments, [i.name for i in spec.inputs])


def placed(spec: ModelSpec, module: torch.nn.Module) -> list[str]:
    """What `made` gave to the module by place, though the spec names it; one note, or none.

    Args:
        spec: as it was declared.
        module: from `made`.
    """
    inner = module.model if isinstance(module, FlatModule) else module
    _, note = by_name_or_place(spec.name, inner.forward, spec.arguments)
    return [note] if note else []


def with_outputs(
    spec: ModelSpec, module: torch.nn.Module, seed: int
) -> tuple[ModelSpec, torch.nn.Module]:
    """The spec with its outputs, found by running the module where it does not name them; and
    the module, returning a tuple of tensors where it returned something else.

    Raises:
        InputError: the module returns something that is no tensor.
        ExportError: it runs at none of the example sizes.
    """
    if spec.outputs:
        return spec, module
    call = module.result if isinstance(module, FlatModule) else module
    result = first_result(spec, call, seed)
    try:
        names = output_names(result, lambda leaf: isinstance(leaf, torch.Tensor))
    except InputError as error:
        raise InputError(f"model {spec.name}: {error}") from error
    taken = {i.name for i in spec.inputs}
    names = [f"{name}_out" if name in taken else name for name in names]
    plain = isinstance(result, torch.Tensor) or (
        type(result) in (tuple, list) and all(isinstance(r, torch.Tensor) for r in result)
    )
    if not plain and not isinstance(module, FlatModule):
        module = FlatModule(module, None, [i.name for i in spec.inputs])
    return replace(spec, outputs=tuple(map(Output, names))), module


def first_result(spec: ModelSpec, module: Callable[..., Any], seed: int) -> Any:
    """What the module returns at the first example sizes at which it runs.

    Raises:
        ExportError: it runs at none.
    """
    error: Exception | None = None
    words = ""
    for sizes in examples(spec.inputs, spec.rules):
        try:
            with torch.no_grad(), quiet():
                return module(*example_args(spec.inputs, seed, sizes))
        except Exception as caught:
            words = words or sizes_text(sizes)
            error = error or caught
    assert error is not None
    raise ExportError(
        f"model {spec.name} runs at none of the sizes that were tried: at {words}: "
        f"{first_line(error)}",
        detail="".join(traceback.format_exception(error)),
    ) from error


def _made(spec: ModelSpec, weights: Path | None) -> torch.nn.Module:
    try:
        module = spec.build(weights)
    except (PipelineError, KeyboardInterrupt, MemoryError):
        raise
    except Exception as error:
        raise InputError(
            f"model {spec.name}: its build raised {type(error).__name__}: {first_line(error)}",
            detail="".join(traceback.format_exception(error)),
        ) from error
    if not isinstance(module, torch.nn.Module):
        raise InputError(
            f"model {spec.name}: its build returned {type(module).__name__}, not a torch.nn.Module"
        )
    return module
