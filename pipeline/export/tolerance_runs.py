"""Runs a model at sizes that show the rounding of its outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from pipeline.export.module import flat_outputs
from pipeline.probe.eager import example_args, quiet
from pipeline.probe.grid import legal_sizes
from pipeline.probe.sample_sizes import elements, examples
from pipeline.probe.state import untouched
from pipeline.spec.dims import kept_rules
from pipeline.spec.model import ModelSpec

_ELEMENTS = 1 << 17  # most input elements of all runs, if there are more than two
_TWO = 1 << 19  # most input elements of two runs: they show which axes of an output are dynamic
_MANY = 1 << 12  # most sizes of a dim among which the largest is chosen
_LARGE = 1 << 21  # most input elements of a run that shows how rounding grows with the sizes
# rounding of a coordinate grows with the size of the image
_SAMPLERS = ("affine_grid", "grid_sample", "grid_sampler", "grid_sampler_2d", "grid_sampler_3d")


@dataclass(frozen=True)
class Run:
    """One run of the model: its sizes, inputs and outputs, and the functions that it called."""

    sizes: Mapping[str, int]
    args: tuple[torch.Tensor, ...]
    outputs: list[np.ndarray]
    called: list[Callable[..., Any]]


class Calls(TorchFunctionMode):
    """Collects the functions of torch that are called, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[Callable[..., Any]] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Called by torch for each function of its API."""
        del types
        self.called.append(func)
        return func(*args, **(kwargs or {}))


def runs_of(spec: ModelSpec, module: torch.nn.Module, seed: int) -> list[Run]:
    """Runs with small inputs, and with larger ones where these say nothing about an output."""
    runs = list(_runs(spec, module, seed))
    return [*runs, *_where_outputs_speak(spec, module, seed, runs)]


def _runs(spec: ModelSpec, module: torch.nn.Module, seed: int) -> Iterator[Run]:
    """Runs with small inputs, or with the smallest that the module takes.

    A model that samples an image at coordinates runs at large sizes too.
    """
    total = ran = 0
    samples = False
    every = examples(spec.inputs, spec.rules)
    for sizes in sorted(every, key=lambda sizes: elements(spec.inputs, sizes)):
        count = elements(spec.inputs, sizes)
        if ran and total + count > (_TWO if ran == 1 else _ELEMENTS):
            continue
        run = _run_at(spec, module, seed, sizes)
        if run is None:  # the model does not run at these sizes
            continue
        total += count
        ran += 1
        samples |= any(getattr(f, "__name__", "") in _SAMPLERS for f in run.called)
        yield run
    large = _large(spec) if samples else None
    run = _run_at(spec, module, seed, large) if large is not None else None
    if run is not None:
        yield run


def _where_outputs_speak(
    spec: ModelSpec, module: torch.nn.Module, seed: int, runs: Sequence[Run]
) -> list[Run]:
    """Runs at larger sizes, while a float output is empty or zero in all runs: ``x[:, 40:]``."""
    more: list[Run] = []
    total = 0
    for sizes in _wider(spec):
        if not _silent([*runs, *more]):
            break
        count = elements(spec.inputs, sizes)
        if total + count <= _LARGE and all(sizes != run.sizes for run in (*runs, *more)):
            total += count
            run = _run_at(spec, module, seed, sizes)
            more += [run] if run is not None else []
    return more


def _silent(runs: Sequence[Run]) -> bool:
    """True if a float output is empty or zero in all runs."""
    every = zip(*(run.outputs for run in runs), strict=False)
    return any(a[0].dtype.kind == "f" and not any(one.any() for one in a) for a in every)


def _wider(spec: ModelSpec) -> Iterator[dict[str, int]]:
    """Sets of legal sizes: a part of each range, then one dim at its max, then all at min."""
    parts = [_part(spec, part) for part in (0.25, 0.5, 0.75, 1.0)]
    least = {name: dim.min for name, dim in spec.dims.items()}
    alone = [{**least, name: parts[-1][name]} for name in least]
    return (sizes for sizes in (*parts, *alone, least) if kept_rules(spec.rules, sizes))


def _run_at(
    spec: ModelSpec, module: torch.nn.Module, seed: int, sizes: Mapping[str, int]
) -> Run | None:
    """One run; None if the model fails."""
    args = example_args(spec.inputs, seed, sizes)
    calls = Calls()
    try:
        with torch.no_grad(), quiet(), untouched(module):
            plain = arrays_of(called_with(module, [a.clone() for a in args], calls))
    except Exception:
        return None
    return Run(sizes, args, plain, calls.called)


def _large(spec: ModelSpec) -> dict[str, int] | None:
    """The largest sizes whose inputs are not too large, each the same part of its range."""
    for part in (1.0, 0.7, 0.5, 0.35, 0.25):
        sizes = _part(spec, part)
        if kept_rules(spec.rules, sizes) and elements(spec.inputs, sizes) <= _LARGE:
            return sizes
    return None


def _part(spec: ModelSpec, part: float) -> dict[str, int]:
    """The largest size of each dim up to a part of its max."""
    return {
        name: max((n for n in legal_sizes(dim, _MANY) if n <= part * dim.max), default=dim.min)
        for name, dim in spec.dims.items()
    }


def called_with(module: torch.nn.Module, args: Sequence[torch.Tensor], calls: Calls) -> Any:
    """The module's result; the functions of torch are collected in `calls`."""
    with calls:
        return module(*args)


def arrays_of(result: Any) -> list[np.ndarray]:
    """The tensors of a result in order, copied; bfloat16 as float32."""
    plain = (t.detach() for t in flat_outputs(result))
    return [(t.float() if t.dtype == torch.bfloat16 else t).numpy().copy() for t in plain]
