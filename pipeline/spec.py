"""What a model to convert says of itself: how to make it, its inputs, dims and tolerances."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np

from pipeline.dims import Dim, DimExpr, Size, shape_at, size_text, solve_sizes
from pipeline.errors import InputError
from pipeline.profiles import Profile

if TYPE_CHECKING:
    import torch

_MODEL_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")  # a folder is called after it
Align = Literal["center", "end"]
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
        if not (math.isfinite(self.rtol) and math.isfinite(self.atol)):
            raise InputError(f"tolerance rtol={self.rtol} atol={self.atol}: must be finite")
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
            include `low` and exclude `high`; a bool is true where the value is positive, so
            that low=1, high=2 gives a mask of ones).
    """

    name: str
    shape: tuple[Size, ...]
    dtype: str = "float32"
    low: float = -1.0
    high: float = 1.0

    def __post_init__(self) -> None:
        for axis, size in enumerate(self.shape):
            if not isinstance(size, (int, Dim, DimExpr)) or isinstance(size, bool):
                raise InputError(f"{self.name} axis {axis}: {size!r} is neither a number nor a dim")
            if isinstance(size, DimExpr):
                raise InputError(
                    f"{self.name} axis {axis}: {size} is an expression; an input's sizes are "
                    "numbers or dims"
                )
            if isinstance(size, int) and size < 1:
                raise InputError(f"{self.name} axis {axis}: size {size} must be at least 1")
        try:
            dtype = np.dtype(self.dtype)
        except TypeError as error:
            raise InputError(f"{self.name}: unknown dtype {self.dtype!r}") from error
        if dtype.kind not in "biuf":
            raise InputError(f"{self.name}: dtype {self.dtype!r} is no kind of number")
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high):
            raise InputError(f"{self.name}: low={self.low} must be less than high={self.high}")
        if dtype.kind in "iu":
            kind = np.iinfo(dtype)
            low, high = int(self.low), int(self.high)
            if not kind.min <= low < high <= int(kind.max) + 1:
                raise InputError(
                    f"{self.name}: low={self.low}, high={self.high} hold no {self.dtype}, or "
                    f"more than those; say which integers the model takes"
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
            return rng.uniform(self.low, self.high, shape) > 0
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
    align: Align = "center"

    def __post_init__(self) -> None:
        if not self.multiples:
            raise InputError("padding: name at least one dim and the multiple that it takes")
        for name, multiple in self.multiples.items():
            if type(multiple) is not int or multiple < 2:
                raise InputError(f"padding: {name}={multiple!r}: the multiple must be 2 or more")
        if self.mode not in get_args(PaddingMode):
            known = ", ".join(get_args(PaddingMode))
            raise InputError(f"padding: unknown mode {self.mode!r}; known: {known}")
        if self.align not in ("center", "end"):
            raise InputError(f"padding: unknown align {self.align!r}; known: center, end")


def padded_name(name: str) -> str:
    """What the padded size of a dim is called inside the model."""
    return f"{name}_padded"


def amounts(size: int, multiple: int, align: str) -> tuple[int, int]:
    """How many elements go before and behind `size` to reach the next multiple."""
    total = -size % multiple
    before = total // 2 if align == "center" else 0
    return before, total - before


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
        key: for a spec that is handed over as an object: text that changes whenever `build` does.
            Without it, such a spec is converted anew each time, since a function can't be told
            from a changed one. Models by name don't need it.
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
    key: str | None = None
    seed: int | None = None
    options: Mapping[str, int | float | str | bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not _MODEL_NAME.fullmatch(self.name):
            raise InputError(f"model name {self.name!r}: use letters, digits, _, . and -")
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
        if self.padding is not None:
            self._check_padding(self.padding)

    def _check_padding(self, padding: Padding) -> None:
        dims = self.dims
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
