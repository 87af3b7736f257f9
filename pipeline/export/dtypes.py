"""The dtype in which a module computes: as it was given, or float32.

A float16 module is converted as it is: the targets and ONNX Runtime compute in float16. Its inputs
become float16 where it fails with float32. A bfloat16 module becomes float32: opset 18 has no
bfloat16 convolution, and ONNX Runtime runs few ops in bfloat16, so nothing could be compared.
float32 holds every bfloat16 and float16 value, so no weight changes.
"""

from __future__ import annotations

import contextlib
import itertools
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from pipeline.errors import InputError, first_line
from pipeline.probe.eager import example_args, model_line, quiet
from pipeline.probe.sample_sizes import examples
from pipeline.probe.state import untouched
from pipeline.spec.closeness import Difference
from pipeline.spec.dims import sizes_text
from pipeline.spec.model import ModelSpec
from pipeline.spec.structure import leaves
from pipeline.spec.tensors import Input

HALVES = (torch.float16, torch.bfloat16)
_KINDS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_TORCH = str(Path(torch.__file__).parent)
_ALONE = 4  # most float32 inputs of which every choice is tried
_MOST = 0.1  # the largest relative difference of bfloat16 and float32 that is rounding


@dataclass(frozen=True)
class _Run:
    """One run of a module: the sizes, and the tensors that it returned."""

    sizes: Mapping[str, int]
    outputs: tuple[torch.Tensor, ...]


def fit_dtypes(
    spec: ModelSpec, module: torch.nn.Module, seed: int
) -> tuple[ModelSpec, tuple[str, ...]]:
    """Makes the module and its inputs agree on a dtype that can be converted and compared.

    A module without float16 and bfloat16 weights stays as it is, unless `ModelSpec.dtype` is set.
    The module is changed in place; `pipeline.probe.state.left_as_given` puts it back.

    Args:
        spec: The spec.
        module: The module from `pipeline.export.module.made`.
        seed: The seed of the inputs' values.

    Returns:
        The spec with the dtypes of the inputs that the module takes, and notes on every change.

    Raises:
        InputError: The module's results in float32 differ from its own by more than rounding, and
            `ModelSpec.dtype` is not set.
    """
    halves = half_dtypes(module)
    if not halves and spec.dtype is None:
        return spec, ()
    names = " and ".join(_name(dtype) for dtype in HALVES if dtype in halves)
    if spec.dtype is not None:
        return _in_float32(spec, module, seed, names, "as --dtype asks")
    if torch.bfloat16 in halves:
        why = "because ONNX Runtime cannot compare most ops in bfloat16"
        return _in_float32(spec, module, seed, names, why)
    inputs, error = _accepted(spec, module, seed)
    if inputs is not None:
        return _as_is(spec, inputs, names)
    with in_dtype(module, torch.float32, HALVES):
        runs = _first_run(spec, _wide(spec.inputs), module, seed) is not None
    if runs:
        why = f"because it fails in float16 on a CPU ({error})"
        return _in_float32(spec, module, seed, names, why)
    # the sizes may be the reason: they are tried later
    return _as_is(spec, _half(spec.inputs), names)


def half_dtypes(module: torch.nn.Module) -> set[torch.dtype]:
    """float16 and bfloat16, if parameters or buffers of the module have them."""
    return {t.dtype for t in _tensors(module)} & {*HALVES}


def computed_halves(module: torch.nn.Module, args: Sequence[torch.Tensor]) -> set[torch.dtype]:
    """float16 and bfloat16, if a run of the module computes a tensor in them."""
    watch = _Watch()
    with torch.no_grad(), quiet(), untouched(module), watch:
        module(*(a.clone() for a in args))
    return watch.seen & {*HALVES}


def run_widened(module: torch.nn.Module, args: Sequence[torch.Tensor]) -> Any:
    """The module's result with float32 in place of every float16 and bfloat16.

    Casts in the code, of a saved program or of autocast are widened too.

    Raises:
        Exception: The module fails in float32, or writes to a half tensor that it holds itself.
    """
    wide = [a.float() if a.dtype in HALVES else a.clone() for a in args]
    mode: Any = _Widen()  # type: ignore[no-untyped-call]
    with untouched(module), in_dtype(module, torch.float32, HALVES), torch.no_grad(), quiet(), mode:
        return module(*wide)


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects the dtypes of all tensors that are computed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        result = func(*args, **(kwargs or {}))
        self.seen.update(t.dtype for t in tree_leaves(result) if isinstance(t, torch.Tensor))
        return result


class _Widen(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Computes in float32 where an op has a half tensor or names a half dtype."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types

        def wide(value: Any) -> Any:
            if isinstance(value, torch.dtype):
                return torch.float32 if value in HALVES else value
            if not isinstance(value, torch.Tensor) or value.dtype not in HALVES:
                return value
            if func._schema.is_mutable:
                raise TypeError(f"{func} writes to a {value.dtype} tensor")
            return value.float()

        args, kwargs = tree_map(wide, (args, kwargs or {}))
        return func(*args, **kwargs)


@contextlib.contextmanager
def in_dtype(
    module: torch.nn.Module, dtype: torch.dtype, only: Sequence[torch.dtype] = ()
) -> Iterator[None]:
    """Gives floating-point weights another dtype inside the block, and puts their bits back.

    Args:
        module: The module.
        dtype: The dtype inside the block.
        only: The dtypes that change; empty for all floating-point dtypes.
    """
    before = _convert(module, dtype, only)
    try:
        yield
    finally:
        for tensor, data in before:
            tensor.data = data


def _convert(
    module: torch.nn.Module, dtype: torch.dtype, only: Sequence[torch.dtype]
) -> list[tuple[Any, torch.Tensor]]:
    """Converts in place. Returns the tensors with their old content."""
    before = []
    for tensor in _tensors(module):
        if tensor.dtype.is_floating_point and tensor.dtype in (only or (tensor.dtype,)):
            before.append((tensor, tensor.data))
            tensor.data = tensor.data.to(dtype)
    return before


def _tensors(module: torch.nn.Module) -> list[torch.Tensor]:
    """Parameters, buffers and tensors in attributes; not those that are quantised or subclasses."""
    kept = (value for part in module.modules() for value in vars(part).values())
    every = itertools.chain(module.parameters(), module.buffers(), kept)
    plain = {id(t): t for t in every if type(t) in _KINDS and t.itemsize > 1}
    return list(plain.values())


def _in_float32(
    spec: ModelSpec, module: torch.nn.Module, seed: int, names: str, why: str
) -> tuple[ModelSpec, tuple[str, ...]]:
    own = _own_run(spec, module, seed) if names else None
    _convert(module, torch.float32, HALVES if spec.dtype is None else ())
    inputs = _wide(spec.inputs, every=spec.dtype is not None)
    notes = []
    if names:
        notes.append(
            f"the model's {names} weights were converted to float32, {why}. "
            + _compared(spec, module, seed, inputs, own, names)
        )
    notes += _changes(spec.inputs, inputs)
    return replace(spec, inputs=inputs), tuple(notes)


def _compared(
    spec: ModelSpec,
    module: torch.nn.Module,
    seed: int,
    inputs: Sequence[Input],
    own: _Run | None,
    names: str,
) -> str:
    """A sentence on the difference between the module and its float32 form.

    Raises:
        InputError: Only the module as it was given runs. Or they differ by more than rounding, and
            nobody asked for float32.
    """
    if own is None:
        return f"It could not be run in {names}, so the two were not compared"
    try:
        wide = _run(module, inputs, seed, own.sizes).outputs
    except Exception as error:
        line = model_line(traceback.extract_tb(error.__traceback__), _TORCH)
        raise InputError(
            f"model {spec.name}: its weights are {names}. Converted to float32, it fails"
            f"{line and f' at {line}'}: {first_line(error, repr(error))}. Use the dtype of the "
            f"inputs or the weights there, in place of {names}"
        ) from error
    far = max(
        (_norm(a, b) for a, b in zip(own.outputs, wide, strict=False) if a.is_floating_point()),
        default=0.0,
    )
    at = f"at {sizes_text(own.sizes)}" if own.sizes else "on one input"
    if spec.dtype is None and not far <= _MOST:
        raise InputError(
            f"model {spec.name}: its weights are {names}, and its results in float32 differ from "
            f"its own by {far:.0%} {at}: more than rounding. If the float32 results are the right "
            "ones, pass --dtype float32 (dtype= of the spec)"
        )
    return f"Its results change by {far:.1%} {at}, and the engine computes the float32 ones"


def _norm(a: torch.Tensor, b: torch.Tensor) -> float:
    if a.shape != b.shape:
        return float("inf")
    return Difference(b.double().numpy(), a.double().numpy()).norm(1e-30)


def _own_run(spec: ModelSpec, module: torch.nn.Module, seed: int) -> _Run | None:
    """The first run of the module as it was given: with inputs as declared, or in its dtype."""
    for dtype in (None, *half_dtypes(module)):
        if run := _first_run(spec, spec.inputs, module, seed, dtype):
            return run
    return None


def _accepted(
    spec: ModelSpec, module: torch.nn.Module, seed: int
) -> tuple[tuple[Input, ...] | None, str]:
    """The inputs with which a float16 module runs, as many of them as possible as declared.

    Returns:
        The inputs, or None with the error if it does not run.
    """
    error = ""
    for sizes in examples(spec.inputs, spec.rules):
        for inputs in _choices(spec.inputs):
            failed = _failure(module, inputs, seed, sizes)
            if not failed:
                return inputs, ""
        error = error or failed  # with float16 inputs only
    return None, error


def _choices(declared: tuple[Input, ...]) -> Iterator[tuple[Input, ...]]:
    """The inputs as declared, then with more and more of them in float16."""
    half = _half(declared)
    places = [n for n, (a, b) in enumerate(zip(declared, half, strict=True)) if a != b]
    counts = range(len(places) + 1) if len(places) <= _ALONE else (0, len(places))
    for count in counts:
        for chosen in itertools.combinations(places, count):
            yield tuple(half[n] if n in chosen else i for n, i in enumerate(declared))


def _failure(
    module: torch.nn.Module, inputs: Sequence[Input], seed: int, sizes: Mapping[str, int]
) -> str:
    """The error of a run in one line; empty if the module runs."""
    try:
        _run(module, inputs, seed, sizes)
    except Exception as error:
        return first_line(error, repr(error))
    return ""


def _first_run(
    spec: ModelSpec,
    inputs: Sequence[Input],
    module: torch.nn.Module,
    seed: int,
    dtype: torch.dtype | None = None,
) -> _Run | None:
    """The run at the first example sizes at which the module runs, or None."""
    for sizes in examples(spec.inputs, spec.rules):
        with contextlib.suppress(Exception):
            return _run(module, inputs, seed, sizes, dtype)
    return None


def _run(
    module: torch.nn.Module,
    inputs: Sequence[Input],
    seed: int,
    sizes: Mapping[str, int],
    dtype: torch.dtype | None = None,
) -> _Run:
    """Runs the module. Floating-point inputs get `dtype` if it is given."""
    with torch.no_grad(), quiet(), untouched(module):
        args = (
            a.to(dtype) if dtype is not None and a.is_floating_point() else a
            for a in example_args(inputs, seed, sizes)
        )
        flat = (t for _, t in leaves(module(*args)) if isinstance(t, torch.Tensor))
        return _Run(sizes, tuple(t.detach().clone() for t in flat))


def _wide(inputs: Sequence[Input], *, every: bool = False) -> tuple[Input, ...]:
    """The inputs with float16 as float32. `every`: float64 too."""
    old = ("float16", "float64") if every else ("float16",)
    return tuple(replace(i, dtype="float32") if _dtype(i) in old else i for i in inputs)


def _half(inputs: Sequence[Input]) -> tuple[Input, ...]:
    return tuple(replace(i, dtype="float16") if _dtype(i) == "float32" else i for i in inputs)


def _dtype(declared: Input) -> str:
    return np.dtype(declared.dtype).name


def _as_is(spec: ModelSpec, inputs: tuple[Input, ...], names: str) -> tuple[ModelSpec, Any]:
    notes = (
        f"the model has {names} weights: the engine computes in {names} where the model does",
        *_changes(spec.inputs, inputs),
    )
    return replace(spec, inputs=inputs), notes


def _changes(old: Sequence[Input], new: Sequence[Input]) -> list[str]:
    """A note for the inputs with another dtype than declared."""
    changed = [b for a, b in zip(old, new, strict=True) if _dtype(a) != _dtype(b)]
    if not changed:
        return []
    words = ", ".join(i.name for i in changed)
    verb = "is" if len(changed) == 1 else "are"
    return [f"{words} {verb} {changed[0].dtype} in the engine, to fit the model's weights"]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
