"""The description of a model to convert: how to make it, its inputs, dims and tolerances."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from pipeline.errors import InputError
from pipeline.spec.dims import Dim, DimExpr, Size, SizeRule, size_text
from pipeline.spec.given import named_fields
from pipeline.spec.interface import Interface
from pipeline.spec.padding import Padding, amounts, padded_name
from pipeline.spec.profiles import Profile
from pipeline.spec.structure import flat_inputs
from pipeline.spec.tensors import Input, Output, Precision, Tolerance, check_tolerance

if TYPE_CHECKING:
    import torch

__all__ = ["Input", "ModelSpec", "Output", "Padding", "Tolerance"]

_MODEL_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")  # it names a folder


@named_fields
@dataclass(frozen=True)
class ModelSpec:
    """A model to convert.

    Args:
        name: The name of the model and of its artifact.
        build: Makes the module in eval mode. Its argument is a weights file, or None for seeded
            random weights.
        inputs: A tuple in the order of ``forward``'s arguments, or a dict of its keyword
            arguments. Each is an `Input`, or a tuple, list, dict or dataclass of them. The spec
            keeps them as one flat tuple.
        outputs: The outputs in the order in which ``forward`` returns them. If empty, the model is
            run to find them, and each is named after its position in the result.
        tolerance: The tolerance for every comparison of this model's outputs. If None, it is
            measured (see `pipeline.export.tolerance`).
        output_tolerances: The tolerance of single outputs by name, if `outputs` is empty. Otherwise
            use `Output.tolerance`.
        engine_tolerance: The tolerance for engines by precision (``fp32``, ``tf32``, ``fp16``,
            ``bf16``). It replaces the other tolerances. If tf32, fp16 or bf16 is missing here, its
            tolerance is measured (`pipeline.compare.rounding_tolerance`). For fp32, `tolerance`
            counts.
        rules: Rules on several sizes, as text: ``past + seq <= 128``.
        profiles: Named ranges. If empty, there is one profile over the dims' whole ranges.
        padding: Padding round the model, see `Padding`.
        refine_dims: Whether the pipeline may narrow every dim to sizes that the model accepts (a
            multiple, a smaller range) instead of failing. It is `Dim.auto` for all dims.
        allow_narrow: Whether such a dim may become a single size. Otherwise that is an error.
        search_seconds: Seconds of CPU time for trying sizes; None for the default.
        libraries: The packages whose version changes the model, for the cache key.
        key: Text that changes whenever `build` does, for a spec that you pass as an object.
            Without it, such a spec is converted again each time, because a changed function
            can't be recognised. Models by name don't need it.
        seed: The seed of the random weights that `build` makes, for the manifest.
        options: The arguments of the factory call, for the cache key and the manifest.
        onnx: The ONNX file, if that is the source and there is no torch model.
        expressions: Dims of that file that are always an expression of other dims, by name.
        state: Names of attributes that calls of the model change. The conversion is of a first
            call, with the values that `build` gives to them.
        dtype: ``float32`` converts the module's weights and floating-point inputs first. None
            leaves the module as it is, except for bfloat16, which becomes float32 (see
            `pipeline.export.dtypes`).
        output_names: Names for the outputs that a run finds, in order, if `outputs` is empty.
        arguments: The structure of `inputs` with names in place of inputs. None if all are
            positional tensors. The spec makes it from `inputs`.
        reference: With `onnx`: another ONNX file whose outputs are the reference, such as the
            model before it was quantised. It needs a stated `tolerance`. If None, the file is its
            own reference.
    """

    name: str
    build: Callable[[Path | None], torch.nn.Module]
    inputs: Any
    outputs: tuple[Output, ...] = ()
    tolerance: Tolerance | None = None
    output_tolerances: Mapping[str, Tolerance] = field(default_factory=dict)
    engine_tolerance: Mapping[str, Tolerance] = field(default_factory=dict)
    rules: tuple[str, ...] = ()
    profiles: tuple[Profile, ...] = ()
    padding: Padding | None = None
    refine_dims: bool = False
    allow_narrow: bool = False
    search_seconds: float | None = None
    libraries: tuple[str, ...] = ()
    key: str | None = None
    seed: int | None = None
    options: Mapping[str, int | float | str | bool] = field(default_factory=dict)
    onnx: Path | None = None
    expressions: Mapping[str, str] = field(default_factory=dict)
    state: tuple[str, ...] = ()
    dtype: Literal["float32"] | None = None
    output_names: tuple[str, ...] = ()
    arguments: Any = None
    reference: Path | None = None

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
        if self.reference is not None and self.onnx is None:
            raise InputError(
                f"model {self.name}: only an ONNX file can have another reference. A torch model "
                "is its own; leave --reference out"
            )
        self._check_sizes()
        if self.padding is not None:
            self._check_padding(self.padding)

    def _check_types(self) -> None:
        for word, kind in (
            ("outputs", Output),
            ("output_names", str),
            ("rules", str),
            ("profiles", Profile),
        ):
            value = getattr(self, word)
            if isinstance(value, list):
                value = tuple(value)
                object.__setattr__(self, word, value)
            if not isinstance(value, tuple) or not all(isinstance(part, kind) for part in value):
                raise InputError(
                    f"model {self.name}: {word}={value!r} is not a tuple of {kind.__name__}"
                )
        if not callable(self.build):
            raise InputError(f"model {self.name}: build={self.build!r} can't be called")
        if self.dtype not in (None, "float32"):
            raise InputError(f"model {self.name}: dtype={self.dtype!r}: pass None or 'float32'")
        if self.outputs and self.output_names:
            raise InputError(
                f"model {self.name}: output_names is for a spec without outputs. Set the name of "
                "each Output"
            )
        if self.outputs and self.output_tolerances:
            raise InputError(
                f"model {self.name}: output_tolerances is for a spec without outputs. Set the "
                "tolerance of each Output"
            )
        check_tolerance(self.tolerance, f"model {self.name}: tolerance")
        for precision, tolerance in self.engine_tolerance.items():
            if precision not in get_args(Precision) or not isinstance(tolerance, Tolerance):
                known = ", ".join(get_args(Precision))
                raise InputError(
                    f"model {self.name}: engine_tolerance {precision!r}: {tolerance!r}: pass a "
                    f"Tolerance for each precision ({known})"
                )

    def _check_sizes(self) -> None:
        dims = self.dims
        used: list[tuple[str, Size]] = [
            (f"input {i.name}", size) for i in self.inputs for size in i.shape
        ]
        used += [
            (f"the range of {i.name}", end)
            for i in self.inputs
            for end in (i.low, i.high)
            if isinstance(end, (Dim, DimExpr))
        ]
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
            for size in (*i.shape, i.low, i.high):
                if isinstance(size, DimExpr) and size.names & padding.multiples.keys():
                    raise InputError(
                        f"model {self.name}: input {i.name} has the size {size}, which can't be "
                        "computed from the padded size; pad in the model itself"
                    )
        for name, multiple in padding.multiples.items():
            if name not in dims:
                raise InputError(f"model {self.name}: padding names {name}, which is not its dim")
            dim = dims[name]
            if dim.multiple_of % multiple == 0:
                raise InputError(f"dim {name}: padding to {multiple} has no effect on {dim}")
            if dim.static:
                raise InputError(f"dim {name}: padding needs a dim of several sizes, not {dim}")
            if f"{name}_padded" in dims:
                raise InputError(f"dim {name}_padded: padding {name} uses this name; rename it")
            if padding.mode != "reflect":
                continue
            # a size reflects at most size - 1 elements of itself
            for size in range(dim.min, min(dim.max, multiple) + 1, dim.multiple_of):
                most = max(amounts(size, multiple, padding.align))
                if most >= size:
                    raise InputError(
                        f"dim {name}: {size} is too small to be reflected: a multiple of "
                        f"{multiple} needs {most} more elements; raise its min, or use replicate"
                    )

    @cached_property
    def interface(self) -> Interface:
        """The spec's inputs, outputs, sizes and tolerances."""
        return Interface(
            self.inputs, self.outputs, self.rules, self.padding, self.profiles, self.tolerance,
            self.engine_tolerance,
        )  # fmt: skip

    @property
    def dims(self) -> Mapping[str, Dim]:
        """The dims by name.

        Raises:
            InputError: Two different dims have the same name.
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
        """Inputs at these dim sizes by name: the user's values, or else random ones."""
        return self.interface.sample(sizes, seed)


def inner_inputs(spec: ModelSpec) -> tuple[Input, ...]:
    """The inputs of the model inside the padding: their dims are padded."""
    inputs: tuple[Input, ...] = spec.inputs
    if spec.padding is None:
        return inputs
    multiples = spec.padding.multiples

    def inner(size: Size) -> Size:
        if isinstance(size, Dim) and size.name in multiples:
            return size.padded(multiples[size.name], padded_name(size.name))
        return size

    return tuple(replace(i, shape=tuple(inner(s) for s in i.shape)) for i in inputs)


def check_output_names(given: Iterable[str], outputs: Iterable[str]) -> None:
    """Raises `InputError` for the tolerance of an output that a model does not have."""
    known = list(outputs)
    for name in given:
        if name not in known:
            raise InputError(
                f"tolerance {name}: no such output; the outputs are {', '.join(known)}"
            )


def holds_weights(source: object) -> bool:
    """True for a source file that contains its weights."""
    return isinstance(source, str) and source.endswith((".pt2", ".onnx"))
