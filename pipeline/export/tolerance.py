"""Measures a tolerance on the model itself, for a spec that states none.

The model runs in float32 and in float64, and the difference shows its rounding. The outputs of a
correct conversion differ about as much, since it adds the same sums in another order. If a model
amplifies rounding so much that faults would pass, it gets no tolerance but an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from pipeline.errors import InputError
from pipeline.export.module import flat_outputs
from pipeline.probe.eager import example_args, quiet
from pipeline.probe.sample_sizes import elements, examples
from pipeline.probe.state import untouched
from pipeline.spec.dims import sizes_text
from pipeline.spec.model import ModelSpec
from pipeline.spec.noise import EQUAL, Noise

_WIDE = 1 << 28  # most parameters of a model that is made float64 for a moment
_ELEMENTS = 1 << 20  # most input elements of a second, larger run


def with_tolerance(spec: ModelSpec, module: torch.nn.Module, seed: int) -> ModelSpec:
    """The spec with a measured tolerance for every output, if it states none.

    Raises:
        InputError: rounding alone moves an output so far that no tolerance can be given.
    """
    if spec.tolerance is not None:
        return spec
    noise: dict[str, Noise] = {}
    odd: dict[str, Mapping[str, int]] = {}  # where an output was NaN or infinite
    how = ""
    for sizes, args, plain in _runs(spec, module, seed):
        if len(plain) != len(spec.outputs):
            raise InputError(
                f"model {spec.name}: it returns {len(plain)} tensors at "
                f"{sizes_text(sizes)}, but "
                f"{len(spec.outputs)} at other sizes: an engine has the same outputs at every size"
            )
        exact, how = _exact(module, args)
        for output, a, b in zip(spec.outputs, plain, exact, strict=True):
            if a.dtype.kind != "f":
                continue
            if not (np.isfinite(a).all() and np.isfinite(b).all()):
                odd.setdefault(output.name, sizes)
                continue
            new = Noise.between(a, b, float(np.finfo(a.dtype).eps))
            noise[output.name] = new.worst(noise.get(output.name))
    for name, sizes in odd.items():
        if name not in noise and not _has_tolerance(spec, name):
            raise InputError(
                f"model {spec.name}: output {name} is NaN or infinite at "
                f"{sizes_text(sizes)}, so it can't be "
                "compared; give the inputs a range where it is finite (--range, or low= and high=)"
            )
    outputs = []
    for output in spec.outputs:
        where = f"model {spec.name}: output {output.name}"
        found = noise.get(output.name)
        measured = found.tolerance(where, how) if found else EQUAL
        outputs.append(replace(output, tolerance=output.tolerance or measured))
    widest = max((o.tolerance for o in outputs if o.tolerance), key=lambda t: t.atol)
    return replace(spec, outputs=tuple(outputs), tolerance=widest)


def _has_tolerance(spec: ModelSpec, name: str) -> bool:
    return any(o.name == name and o.tolerance is not None for o in spec.outputs)


def _runs(
    spec: ModelSpec, module: torch.nn.Module, seed: int
) -> Iterator[tuple[Mapping[str, int], tuple[torch.Tensor, ...], list[np.ndarray]]]:
    """Sizes, inputs and outputs: all small inputs, or else the first at which the module runs."""
    every = examples(spec.inputs, spec.rules)
    small = [s for s in every if elements(spec.inputs, s) <= _ELEMENTS]
    ran = False
    for sizes in [*small, *(s for s in every if s not in small)]:
        if ran and sizes not in small:
            return
        args = example_args(spec.inputs, seed, sizes)
        try:
            with torch.no_grad(), quiet(), untouched(module):
                plain = _arrays(module(*(a.clone() for a in args)))
        except Exception:  # the model does not run at these sizes
            continue
        ran = True
        yield sizes, args, plain


def _exact(module: torch.nn.Module, args: Sequence[torch.Tensor]) -> tuple[list[np.ndarray], str]:
    """The outputs in float64, or with slightly changed inputs if the model can't run in float64."""
    tensors = [*module.parameters(), *module.buffers()]  # state_dict() leaves some buffers out
    plain = all(t.dtype == torch.float32 or not t.dtype.is_floating_point for t in tensors)
    if plain and sum(t.numel() for t in tensors) <= _WIDE:  # then float() restores all of it
        with untouched(module):  # a tensor that a run keeps would stay float64
            try:
                module.double()
                wide = [a.double() if a.is_floating_point() else a.clone() for a in args]
                with torch.no_grad(), quiet():
                    return _arrays(module(*wide)), "float32 rounding"
            except Exception:  # tensors that are no parameters, casts to float32
                pass
            finally:
                module.float()
    moved = [_rounded(a) if a.is_floating_point() else a.clone() for a in args]
    if any(a.is_floating_point() for a in args):
        with torch.no_grad(), quiet(), untouched(module):
            return _arrays(module(*moved)), "rounding of the inputs"
    first = next(t for t in tensors if t.is_floating_point())  # of a language model: its embedding
    saved = first.detach().clone()
    try:
        with torch.no_grad(), quiet(), untouched(module):
            first.copy_(_rounded(saved))
            return _arrays(module(*moved)), "rounding of the first weights"
    finally:
        with torch.no_grad():
            first.copy_(saved)


def _rounded(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, each element moved by about a unit in its last place."""
    noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0))
    moved: torch.Tensor = tensor * (1 + torch.finfo(tensor.dtype).eps * noise)
    return moved.to(tensor.dtype)


def _arrays(result: Any) -> list[np.ndarray]:
    plain = (t.detach() for t in flat_outputs(result))
    return [(t.float() if t.dtype == torch.bfloat16 else t).numpy().copy() for t in plain]
