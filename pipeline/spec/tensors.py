"""One input, one output, and how far two results of it may be apart."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from pipeline.errors import InputError
from pipeline.spec.dims import Dim, DimExpr, Size, shape_at

Precision = Literal["fp32", "tf32", "fp16"]


_MOST_DIFFERING = 0.1  # more would pass a fault


@dataclass(frozen=True)
class Tolerance:
    """How far two outputs may be apart: every element within `atol`, or within `rtol` of it.

    Polygraphy's ``elemwise`` check: ``|a - b| <= atol or |a - b| <= rtol * |b|``, b being the
    reference. Both are required: there is no default that anything passes. NaN and infinity
    never pass. ``why`` says where the numbers come from, and stands in the manifest.

    Integers and booleans have to be equal, but for ``differing``, a share of an output's elements:
    an ArgMax of values that tie takes either, and so does whoever rounds otherwise.
    """

    rtol: float
    atol: float
    why: str
    differing: float = 0.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.rtol) and math.isfinite(self.atol)):
            raise InputError(f"tolerance rtol={self.rtol} atol={self.atol}: must be finite")
        if self.rtol < 0 or self.atol < 0:
            raise InputError(f"tolerance rtol={self.rtol} atol={self.atol}: can't be negative")
        if self.rtol >= 1:
            raise InputError(f"tolerance rtol={self.rtol}: 1 or more passes anything")
        if not 0 <= self.differing <= _MOST_DIFFERING:
            raise InputError(
                f"tolerance differing={self.differing}: must be a share of 0 to {_MOST_DIFFERING}"
            )

    def __str__(self) -> str:
        more = f", {self.differing:g} of integers may differ" if self.differing else ""
        return f"rtol {self.rtol:g} or atol {self.atol:g}{more} ({self.why})"


@dataclass(frozen=True)
class Input:
    """One input tensor of the model.

    Args:
        name: its name in ONNX and in the engine; without one it is named after its place in
            the spec's `inputs`.
        shape: numbers, dims and expressions of dims, one an axis.
        dtype: a numpy dtype name.
        low, high: the range of the random values it is verified with (uniform; integers
            include `low` and exclude `high`; a bool is true where the value is positive, so
            that low=1, high=2 gives a mask of ones).
    """

    name: str = ""
    shape: tuple[Size, ...] = ()
    dtype: str = "float32"
    low: float = -1.0
    high: float = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.shape, (tuple, list)):
            raise InputError(f"{self.name}: shape {self.shape!r} is no tuple of sizes")
        object.__setattr__(self, "shape", tuple(self.shape))
        for axis, size in enumerate(self.shape):
            if not isinstance(size, (int, Dim, DimExpr)) or isinstance(size, bool):
                raise InputError(f"{self.name} axis {axis}: {size!r} is neither a number nor a dim")
            if isinstance(size, int) and size < 1:
                raise InputError(f"{self.name} axis {axis}: size {size} must be at least 1")
        try:
            dtype = np.dtype(self.dtype)
        except TypeError as error:
            known = str(self.dtype).removeprefix("torch.")
            hint = f" (a numpy name: {known!r})" if known != str(self.dtype) else ""
            raise InputError(f"{self.name}: unknown dtype {self.dtype!r}{hint}") from error
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
        """The dims in its shape, those inside of expressions included."""
        return tuple(
            dim for size in self.shape if isinstance(size, (Dim, DimExpr)) for dim in size.dims
        )

    def sample(self, sizes: Mapping[str, int], seed: int) -> np.ndarray:
        """Random values at these sizes; the same for the same name, sizes and seed."""
        shape = shape_at(self.shape, sizes)
        entropy = [seed, *shape, *self.name.encode()]
        rng = np.random.default_rng(entropy)
        dtype = np.dtype(self.dtype)
        if dtype.kind == "b":
            return np.asarray(rng.uniform(self.low, self.high, shape) > 0)  # () gives a scalar
        if dtype.kind in "iu":
            return rng.integers(int(self.low), int(self.high), shape, dtype=dtype)
        return rng.uniform(self.low, self.high, shape).astype(dtype)


@dataclass(frozen=True)
class Output:
    """One output tensor.

    Args:
        name: its name in ONNX and in the engine.
        shape: where the spec wants to hold torch to it. In an artifact every output has one.
        tolerance: in place of the spec's.
        dtype: a numpy dtype name; None until the model is exported.
    """

    name: str
    shape: tuple[Size, ...] | None = None
    tolerance: Tolerance | None = None
    dtype: str | None = None

    def __post_init__(self) -> None:
        if self.dtype is None:
            return
        try:
            np.dtype(self.dtype)
        except TypeError as error:
            raise InputError(f"output {self.name}: unknown dtype {self.dtype!r}") from error


Feed = Mapping[str, np.ndarray]
