"""Measures a tolerance on the model itself, for a spec that states none.

The model runs in float32 and in float64, and the difference shows its rounding. A model with
float16 weights runs as it is and in float32. The outputs of a correct conversion differ about as
much, since it adds the same sums in another order. If a model amplifies rounding so much that
faults would pass, it gets no tolerance but an error.

A model may compute something else in float64 (``if x.dtype == torch.float64:``). Then it calls
other functions of torch, and runs with slightly changed inputs instead.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from pipeline.errors import InputError
from pipeline.export.dtypes import computed_halves, in_dtype, run_widened
from pipeline.export.module import inner
from pipeline.export.tolerance_runs import Run, arrays_of, called_with, runs_of
from pipeline.export.wide_calls import WideCalls
from pipeline.probe.eager import bad_weight, quiet
from pipeline.probe.state import ModuleState, untouched
from pipeline.spec.closeness import Difference
from pipeline.spec.dims import sizes_text
from pipeline.spec.model import ModelSpec
from pipeline.spec.noise import EQUAL, Noise
from pipeline.spec.noise_parts import MOST, Sample, measured

_WIDE = 1 << 28  # most parameters of a model that is made float64 for a moment
_CHOOSING = ("topk", "sort", "argsort", "argmax", "argmin", "kthvalue")
_HALF_SHOWS = 2.0**-15  # a relative difference that float32 rounding rarely makes; float16: 2**-11


def with_tolerance(spec: ModelSpec, module: torch.nn.Module, seed: int) -> ModelSpec:
    """The spec with a measured tolerance for every output, if it states none.

    Raises:
        InputError: rounding alone moves an output so far that no tolerance can be given.
    """
    if spec.tolerance is not None:
        return spec
    noise: dict[str, Noise] = {}
    odd: dict[str, Mapping[str, int]] = {}  # where an output was NaN or infinite
    samples: dict[str, list[Sample]] = {}
    how = ""
    runs = runs_of(spec, module, seed)
    wides = _in_float64(module, runs)
    for run, wide in zip(runs, wides, strict=True):
        sizes, args, plain = run.sizes, run.args, run.outputs
        if len(plain) != len(spec.outputs):
            raise InputError(
                f"model {spec.name}: it returns {len(plain)} tensors at "
                f"{sizes_text(sizes)}, but "
                f"{len(spec.outputs)} at other sizes: an engine has the same outputs at every size"
            )
        exact = _exact(module, args, plain, wide)
        how = exact.how
        for output, a, b in zip(spec.outputs, plain, exact.outputs, strict=True):
            if a.dtype.kind != "f":
                continue
            if not (np.isfinite(a).all() and np.isfinite(b).all()):
                odd.setdefault(output.name, sizes)
                continue
            eps = exact.eps_of(a, b)
            if a.size <= MOST:
                samples.setdefault(output.name, []).append((a, b, eps))
            new = Noise.between(a, b, eps)
            noise[output.name] = new.worst(noise.get(output.name))
    for name, sizes in odd.items():
        if name not in noise and not _has_tolerance(spec, name):
            weight = bad_weight(inner(module))
            drawn = ", ".join(f"{i.name} {i.drawn}" for i in spec.inputs)
            do = f"the inputs were {drawn}: give ranges where it is finite (--range NAME=1..9)"
            if weight:
                do = f"the weight {weight} itself has NaN or infinity: correct the weights"
            raise InputError(
                f"model {spec.name}: output {name} is NaN or infinite at "
                f"{sizes_text(sizes)}, so it can't be compared; {do}"
            )
    outputs = []
    fixed = all(dim.static for dim in spec.dims.values())
    for output in spec.outputs:
        where = f"model {spec.name}: output {output.name}"
        found = noise.get(output.name)
        own = output.tolerance or EQUAL
        if found and output.tolerance is None:
            # a dynamic axis has another size in another run
            every = samples.get(output.name, ())
            seen = [sample for sample in every if sample[1].any()]
            seen = seen if len(every) > 1 or fixed else []
            axes = _fixed_axes(exact for _, exact, _ in every)
            with _naming_choices(runs):
                own = measured(found, seen, where, how, axes)
        outputs.append(replace(output, tolerance=own))
    widest = max((o.tolerance for o in outputs if o.tolerance), key=lambda t: t.atol)
    widest = replace(widest, axis=None, parts=())
    return replace(spec, outputs=tuple(outputs), tolerance=widest)


def _fixed_axes(arrays: Iterable[np.ndarray]) -> list[int]:
    """The axes that have one size in all arrays."""
    return [n for n, sizes in enumerate(zip(*(a.shape for a in arrays), strict=False))
            if len(set(sizes)) == 1]  # fmt: skip


@contextlib.contextmanager
def _naming_choices(runs: Sequence[Run]) -> Iterator[None]:
    """Adds the functions that take elements by their order to the text of an `InputError`."""
    try:
        yield
    except InputError as error:
        names = {getattr(function, "__name__", "") for run in runs for function in run.called}
        found = [name for name in _CHOOSING if name in names]
        if not found:
            raise
        raise InputError(
            f"{error}. The model calls {' and '.join(found)}: where values are nearly equal, "
            "rounding decides which of them it takes. Random weights make such values (--weights "
            "loads trained ones)"
        ) from error


def _has_tolerance(spec: ModelSpec, name: str) -> bool:
    return any(o.name == name and o.tolerance is not None for o in spec.outputs)


@dataclass(frozen=True)
class _Exact:
    """The outputs with less rounding than the model's, or with another rounding.

    Args:
        outputs: The outputs, in order.
        how: What was rounded, for the text.
        eps: The eps of the half precision in which the model computes; 0 for another precision.
    """

    outputs: list[np.ndarray]
    how: str
    eps: float = 0.0

    def eps_of(self, plain: np.ndarray, exact: np.ndarray) -> float:
        """The eps of an output's rounding.

        A float32 output may be computed in float16. Then its eps is what shows: more than that of
        float32, and at most that of float16.
        """
        own = float(np.finfo(plain.dtype).eps)
        return max(own, min(self.eps, 4 * _apart(plain, exact)) if self.eps else 0.0)


def _apart(plain: np.ndarray, exact: np.ndarray) -> float:
    return Difference(exact, plain).norm(1e-30)


def _exact(
    module: torch.nn.Module,
    args: Sequence[torch.Tensor],
    plain: Sequence[np.ndarray],
    wide: list[np.ndarray] | None,
) -> _Exact:
    """The outputs in a wider dtype, or with slightly changed inputs if the model can't run so.

    `wide` has the outputs in float64, if they are of the same computation.
    """
    if wide is not None and not any(
        _apart(a, b) > _HALF_SHOWS
        for a, b in zip(plain, wide, strict=True)
        if a.dtype.kind == b.dtype.kind == "f" and a.shape == b.shape
    ):
        return _Exact(wide, "float32 rounding")
    return _in_float32(module, args) or (
        _moved(module, args) if wide is None else _Exact(wide, "float32 rounding")
    )


def _weights(module: torch.nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]  # state_dict() leaves some buffers out


def _in_float64(module: torch.nn.Module, runs: Sequence[Run]) -> list[list[np.ndarray] | None]:
    """The outputs in float64, for each run; None if the model can't run so or computes another way.

    A run that called other functions of torch took another branch, such as one on the dtype.
    """
    found: list[list[np.ndarray] | None] = [None] * len(runs)
    tensors = _weights(module)
    narrow = all(t.dtype == torch.float32 or not t.dtype.is_floating_point for t in tensors)
    if not narrow or sum(t.numel() for t in tensors) > _WIDE:
        return found
    # a tensor that a run keeps would stay float64
    with (
        contextlib.suppress(Exception),  # tensors that are no parameters
        untouched(module),
        in_dtype(module, torch.float64),
        torch.no_grad(),
        quiet(),
    ):
        state = ModuleState(module)
        for n, run in enumerate(runs):
            wide = [a.double() if a.is_floating_point() else a.clone() for a in run.args]
            calls = WideCalls()
            with contextlib.suppress(Exception), state.restored():  # casts to float32
                outputs = arrays_of(called_with(module, wide, calls))
                found[n] = outputs if calls.called == run.called else None
    return found


def _in_float32(module: torch.nn.Module, args: Sequence[torch.Tensor]) -> _Exact | None:
    """The outputs in float32, of a model that computes in half precision; otherwise None."""
    try:
        halves = computed_halves(module, args)
        if not halves:
            return None
        eps = max(float(torch.finfo(dtype).eps) for dtype in halves)
        names = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in halves))
        return _Exact(arrays_of(run_widened(module, args)), f"{names} rounding", eps)
    except Exception:  # an op that a dispatch mode does not see through
        return None


def _moved(module: torch.nn.Module, args: Sequence[torch.Tensor]) -> _Exact:
    """The outputs with slightly changed inputs, or first weights if no input is a float."""
    moved = [_rounded(a) if a.is_floating_point() else a.clone() for a in args]
    if any(a.is_floating_point() for a in args):
        with torch.no_grad(), quiet(), untouched(module):
            return _Exact(arrays_of(module(*moved)), "rounding of the inputs")
    # the first weights of a language model are its embedding
    first = next(t for t in _weights(module) if t.is_floating_point())
    saved = first.detach().clone()
    try:
        with torch.no_grad(), quiet(), untouched(module):
            first.copy_(_rounded(saved))
            return _Exact(arrays_of(module(*moved)), "rounding of the first weights")
    finally:
        with torch.no_grad():
            first.copy_(saved)


def _rounded(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, each element moved by about a unit in its last place."""
    noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0))
    moved: torch.Tensor = tensor * (1 + torch.finfo(tensor.dtype).eps * noise)
    return moved.to(tensor.dtype)
