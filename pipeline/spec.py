"""What a model to convert says of itself: how to make it, its inputs, dims and tolerances."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from pipeline.dims import Dim, DimExpr, Size, shape_at, size_text, solve_sizes
from pipeline.errors import InputError
from pipeline.profiles import Profile

if TYPE_CHECKING:
    import torch

PaddingMode = Literal["replicate", "reflect", "constant"]


@dataclass(frozen=True)
class Tolerance:
    """How far two outputs may be apart: every element within `atol`, or within `rtol` of it.

    Polygraphy's ``elemwise`` check: ``|a - b| <= atol or |a - b| <= rtol * |b|``, b being the
    reference. Both are required: there is no default that anything passes. NaN and infinity
    never pass. ``why`` says where the numbers come from, and stands in the manifest.
    """

    rtol: float
    atol: float
    why: str

    def __post_init__(self) -> None:
        if self.rtol < 0 or self.atol < 0:
            raise InputError(f"tolerance rtol={self.rtol} atol={self.atol}: can't be negative")
        if self.rtol >= 1:
            raise InputError(f"tolerance rtol={self.rtol}: 1 or more passes anything")


@dataclass(frozen=True)
class Input:
    """One input tensor of the model.

    Args:
        name: its name in ONNX and in the engine.
        shape: numbers and dims, one an axis.
        dtype: a numpy dtype name.
        low, high: the range of the random values it is verified with (uniform; integers
            include `low` and exclude `high`).
    """

    name: str
    shape: tuple[Size, ...]
    dtype: str = "float32"
    low: float = -1.0
    high: float = 1.0

    def __post_init__(self) -> None:
        for axis, size in enumerate(self.shape):
            if isinstance(size, DimExpr):
                raise InputError(
                    f"{self.name} axis {axis}: {size} is an expression; an input's sizes are "
                    "numbers or dims"
                )

    @property
    def dims(self) -> tuple[Dim, ...]:
        return tuple(size for size in self.shape if isinstance(size, Dim))

    def sample(self, sizes: Mapping[str, int], seed: int) -> np.ndarray:
        """Random values at these sizes; the same for the same name, sizes and seed."""
        shape = shape_at(self.shape, sizes)
        entropy = [seed, *shape, *self.name.encode()]
        rng = np.random.default_rng(entropy)
        dtype = np.dtype(self.dtype)
        if dtype.kind == "b":
            return rng.random(shape) < 0.5
        if dtype.kind in "iu":
            return rng.integers(int(self.low), int(self.high), shape, dtype=dtype)
        return rng.uniform(self.low, self.high, shape).astype(dtype)


@dataclass(frozen=True)
class Output:
    """One output tensor: its name, and its shape where the spec wants to hold torch to it."""

    name: str
    shape: tuple[Size, ...] | None = None


@dataclass(frozen=True)
class Padding:
    """Padding round the model, for dims of which the model takes only some multiple.

    The inputs are padded up to the next multiple, the outputs cropped back; both are part of
    the ONNX graph and of the engine, so that every size from a dim's min to its max is legal
    to the user.

    Args:
        multiples: dim name to the multiple that the model takes.
        mode: what fills the padding, with torch.nn.functional.pad's words.
        align: ``center`` puts the smaller half before (as RAFT's own InputPadder does),
            ``end`` puts all of it behind.
    """

    multiples: Mapping[str, int]
    mode: PaddingMode = "replicate"
    align: Literal["center", "end"] = "center"


@dataclass(frozen=True)
class ModelSpec:
    """A model to convert.

    Args:
        name: the model's name, and its artifact's.
        build: makes the module in eval mode, given a weights file or None for seeded random
            weights.
        inputs: in the order of ``forward``'s arguments.
        outputs: in the order of what ``forward`` returns.
        tolerance: for every comparison of this model's outputs.
        profiles: named ranges; none means one profile over the dims' whole ranges.
        padding: see `Padding`.
        refine_dims: let the exporter narrow a dim to what the model takes (a multiple, a
            smaller range), and say so, instead of failing.
        libraries: the packages whose version changes the model, for the cache key.
        seed: what `build` seeds its random weights with, for the manifest.
        options: what the factory was called with, for the cache key and the manifest.
    """

    name: str
    build: Callable[[Path | None], torch.nn.Module]
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    tolerance: Tolerance
    profiles: tuple[Profile, ...] = ()
    padding: Padding | None = None
    refine_dims: bool = False
    libraries: tuple[str, ...] = ()
    seed: int | None = None
    options: Mapping[str, int | float | str | bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = [i.name for i in self.inputs] + [o.name for o in self.outputs]
        for name in names:
            if names.count(name) > 1:
                raise InputError(f"model {self.name}: two inputs or outputs are called {name!r}")
        if not self.inputs or not self.outputs:
            raise InputError(f"model {self.name}: needs at least one input and one output")
        dims = self.dims
        for output in self.outputs:
            for size in output.shape or ():
                used = DimExpr(size_text(size)).names
                for name in used - dims.keys():
                    raise InputError(f"output {output.name}: {size_text(size)}: no dim {name}")
        for name, multiple in (self.padding.multiples if self.padding else {}).items():
            if name not in dims:
                raise InputError(f"model {self.name}: padding names {name}, which is no dim of it")
            if dims[name].multiple_of % multiple == 0:
                raise InputError(f"dim {name}: padding to {multiple} never pads {dims[name]}")

    @property
    def dims(self) -> dict[str, Dim]:
        """The dims by name.

        Raises:
            InputError: two different dims have the same name.
        """
        dims: dict[str, Dim] = {}
        for input_ in self.inputs:
            for dim in input_.dims:
                if dims.setdefault(dim.name, dim) != dim:
                    raise InputError(
                        f"model {self.name}: two different dims are called {dim.name!r}; "
                        "share the object"
                    )
        return dims

    def sizes_of(self, shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
        """The dims' sizes in actual input shapes, each checked (see `solve_sizes`)."""
        return solve_sizes({i.name: i.shape for i in self.inputs}, shapes)

    def sample(self, sizes: Mapping[str, int], seed: int) -> dict[str, np.ndarray]:
        """Random inputs at these dim sizes, by input name."""
        return {i.name: i.sample(sizes, seed) for i in self.inputs}
