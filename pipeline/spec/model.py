"""What a model to convert says of itself: how to make it, its inputs, dims and tolerances."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from pipeline.errors import InputError
from pipeline.spec.dims import Dim, DimExpr, Size, SizeRule, size_text
from pipeline.spec.interface import Interface
from pipeline.spec.padding import Padding, amounts, padded_name
from pipeline.spec.profiles import Profile
from pipeline.spec.structure import flat_inputs
from pipeline.spec.tensors import Input, Output, Precision, Tolerance

if TYPE_CHECKING:
    import torch

__all__ = ["Input", "ModelSpec", "Output", "Padding", "Tolerance"]

_MODEL_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")  # a folder is called after it


@dataclass(frozen=True)
class ModelSpec:
    """A model to convert.

    Args:
        name: the model's name, and its artifact's.
        build: makes the module in eval mode, given a weights file or None for seeded random
            weights.
        inputs: a tuple in the order of ``forward``'s arguments, or a dict of its keyword
            arguments; each an `Input`, or a tuple, list, dict or dataclass of them. Once the
            spec is made, it is the flat tuple of all of them.
        outputs: in the order of what ``forward`` returns; none means that they are found by
            running the model, and named after their place in what it returns.
        tolerance: for every comparison of this model's outputs; None means that it is measured
            (see `pipeline.export.tolerance`).
        engine_tolerance: precision (``fp32``, ``tf32``, ``fp16``) to the tolerance that engines
            of that precision are held to, in place of the others; an engine of a precision that
            is not in it is held to those, which are for fp32.
        rules: what sizes have to keep together, as text: ``past + seq <= 128``.
        profiles: named ranges; none means one profile over the dims' whole ranges.
        padding: see `Padding`.
        refine_dims: let the pipeline narrow every dim to what the model takes (a multiple, a
            smaller range), and say so, instead of failing; `Dim.auto` for all dims.
        libraries: the packages whose version changes the model, for the cache key.
        key: for a spec that is handed over as an object: text that changes whenever `build` does.
            Without it, such a spec is converted anew each time, since a function can't be told
            from a changed one. Models by name don't need it.
        seed: what `build` seeds its random weights with, for the manifest.
        options: what the factory was called with, for the cache key and the manifest.
        onnx: the ONNX file, where that is the source and there is no torch model.
        expressions: of that file: what its dims are that are always an expression of others.
        arguments: made from `inputs`: their structure with names in place of inputs; None where
            they are positional tensors.
    """

    name: str
    build: Callable[[Path | None], torch.nn.Module]
    inputs: Any
    outputs: tuple[Output, ...] = ()
    tolerance: Tolerance | None = None
    engine_tolerance: Mapping[str, Tolerance] = field(default_factory=dict)
    rules: tuple[str, ...] = ()
    profiles: tuple[Profile, ...] = ()
    padding: Padding | None = None
    refine_dims: bool = False
    libraries: tuple[str, ...] = ()
    key: str | None = None
    seed: int | None = None
    options: Mapping[str, int | float | str | bool] = field(default_factory=dict)
    onnx: Path | None = None
    expressions: Mapping[str, str] = field(default_factory=dict)
    arguments: Any = None

    def __post_init__(self) -> None:
        if not _MODEL_NAME.fullmatch(self.name):
            raise InputError(f"model name {self.name!r}: use letters, digits, _, . and -")
        arguments, flat = flat_inputs(self.inputs)
        object.__setattr__(self, "inputs", flat)
        if self.arguments is None:
            object.__setattr__(self, "arguments", arguments)
        self._check_types()
        names = [i.name for i in flat] + [o.name for o in self.outputs]
        for name in names:
            if names.count(name) > 1:
                raise InputError(f"model {self.name}: two inputs or outputs are called {name!r}")
        if not flat:
            raise InputError(f"model {self.name}: needs at least one input")
        self._check_sizes()
        if self.padding is not None:
            self._check_padding(self.padding)

    def _check_types(self) -> None:
        for word, kind in (("outputs", Output), ("rules", str), ("profiles", Profile)):
            value = getattr(self, word)
            if not isinstance(value, tuple) or not all(isinstance(part, kind) for part in value):
                raise InputError(
                    f"model {self.name}: {word}={value!r} is no tuple of {kind.__name__}"
                )
        if not callable(self.build):
            raise InputError(f"model {self.name}: build={self.build!r} can't be called")
        for precision, tolerance in self.engine_tolerance.items():
            if precision not in get_args(Precision) or not isinstance(tolerance, Tolerance):
                known = ", ".join(get_args(Precision))
                raise InputError(
                    f"model {self.name}: engine_tolerance {precision!r}: {tolerance!r}: give a "
                    f"Tolerance by precision ({known})"
                )

    def _check_sizes(self) -> None:
        dims = self.dims
        used = [(f"input {i.name}", size) for i in self.inputs for size in i.shape]
        used += [(f"output {o.name}", size) for o in self.outputs for size in o.shape or ()]
        for where, size in used:
            for name in DimExpr(size_text(size)).names - dims.keys():
                raise InputError(f"{where}: {size_text(size)}: no dim {name}; declare it")
        for text in self.rules:
            for name in SizeRule(text).names - dims.keys():
                raise InputError(f"model {self.name}: rule {text!r}: no dim {name}")

    def _check_padding(self, padding: Padding) -> None:
        dims = self.dims
        for i in self.inputs:
            for size in i.shape:
                if isinstance(size, DimExpr) and size.names & padding.multiples.keys():
                    raise InputError(
                        f"model {self.name}: input {i.name} has the size {size}, which can't be "
                        "told from the padded size; pad in the model itself"
                    )
        for name, multiple in padding.multiples.items():
            if name not in dims:
                raise InputError(f"model {self.name}: padding names {name}, which is no dim of it")
            dim = dims[name]
            if dim.multiple_of % multiple == 0:
                raise InputError(f"dim {name}: padding to {multiple} never pads {dim}")
            if dim.static:
                raise InputError(f"dim {name}: padding is for a dim of several sizes, not {dim}")
            if f"{name}_padded" in dims:
                raise InputError(f"dim {name}_padded: the padded {name} is called so; rename it")
            if padding.mode != "reflect":
                continue
            # a size reflects at most size - 1 elements of itself
            for size in range(dim.min, min(dim.max, multiple) + 1, dim.multiple_of):
                most = max(amounts(size, multiple, padding.align))
                if most >= size:
                    raise InputError(
                        f"dim {name}: {size} is too small to be reflected: {most} elements are "
                        f"missing to a multiple of {multiple}; raise its min, or pad by replicate"
                    )

    @cached_property
    def interface(self) -> Interface:
        """What the spec says of inputs, outputs, sizes and tolerances."""
        return Interface(
            self.inputs, self.outputs, self.rules, self.padding, self.profiles, self.tolerance,
            self.engine_tolerance,
        )  # fmt: skip

    @property
    def dims(self) -> Mapping[str, Dim]:
        """The dims by name.

        Raises:
            InputError: two different dims have the same name.
        """
        try:
            return self.interface.dims
        except InputError as error:
            raise InputError(f"model {self.name}: {error}") from error

    def sizes_of(self, shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
        """The dims' sizes in actual input shapes, each checked (see `solve_sizes`)."""
        return self.interface.sizes_of(shapes)

    def auto(self, dim: str) -> bool:
        """True if the pipeline may narrow this dim."""
        return self.refine_dims or (dim in self.dims and self.dims[dim].auto)

    def sample(self, sizes: Mapping[str, int], seed: int) -> dict[str, np.ndarray]:
        """Random inputs at these dim sizes, by input name."""
        return self.interface.sample(sizes, seed)


def inner_inputs(spec: ModelSpec) -> tuple[Input, ...]:
    """The inputs as the model inside the padding sees them: padded dims in place of the dims."""
    inputs: tuple[Input, ...] = spec.inputs
    if spec.padding is None:
        return inputs
    multiples = spec.padding.multiples

    def inner(size: Size) -> Size:
        if isinstance(size, Dim) and size.name in multiples:
            return size.padded(multiples[size.name], padded_name(size.name))
        return size

    return tuple(replace(i, shape=tuple(inner(s) for s in i.shape)) for i in inputs)


def holds_weights(source: object) -> bool:
    """True for a source that is a file with its weights in it."""
    return isinstance(source, str) and source.endswith((".pt2", ".onnx"))
