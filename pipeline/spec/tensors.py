"""Inputs, outputs, and the tolerance of a comparison."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from pipeline.errors import InputError
from pipeline.spec.dims import Dim, DimExpr, Size, shape_at

Precision = Literal["fp32", "tf32", "fp16"]


_MOST_DIFFERING = 0.1  # a larger share could hide a fault


@dataclass(frozen=True)
class Tolerance:
    """How far an output may differ from the reference.

    This is Polygraphy's ``elemwise`` check: ``|a - b| <= atol or |a - b| <= rtol * |b|``, where b
    is the reference. NaN and infinity never pass. Integers and booleans must be equal, except for
    the share ``differing`` of the elements. Example: ArgMax may return any index of equal values.

    Args:
        rtol: The allowed difference relative to the reference, at least 0 and below 1.
        atol: The allowed absolute difference, at least 0.
        why: Where the numbers come from, for the manifest.
        differing: The share of integers or booleans that may differ.
        axis: The axis of `parts`; None without parts.
        parts: The atol of each index of that axis, at most `atol`. Example: scores beside boxes.

    Raises:
        InputError: A number is not finite or outside of its range.
    """

    rtol: float
    atol: float
    why: str
    differing: float = 0.0
    axis: int | None = None
    parts: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not (math.isfinite(self.rtol) and math.isfinite(self.atol)):
            raise InputError(f"tolerance rtol={self.rtol} atol={self.atol}: must be finite")
        if self.rtol < 0 or self.atol < 0:
            raise InputError(f"tolerance rtol={self.rtol} atol={self.atol}: can't be negative")
        if self.rtol >= 1:
            raise InputError(f"tolerance rtol={self.rtol}: 1 or more would pass anything")
        if not 0 <= self.differing <= _MOST_DIFFERING:
            raise InputError(
                f"tolerance differing={self.differing}: must be a share from 0 to {_MOST_DIFFERING}"
            )

        if (self.axis is None) == bool(self.parts) or (self.axis or 0) < 0:
            raise InputError(f"tolerance axis={self.axis}: pass an axis and its parts, or neither")
        if not all(0 <= part <= self.atol for part in self.parts):
            raise InputError(f"tolerance parts: must be from 0 to atol={self.atol}")

    def atol_at(self, shape: Sequence[int]) -> np.ndarray | float:
        """The atol of each element of an output, in a shape that broadcasts to `shape`.

        If the output has another number of parts, all elements get the smallest atol.
        """
        if self.axis is None:
            return self.atol
        if self.axis >= len(shape) or shape[self.axis] != len(self.parts):
            return min(self.parts)
        return np.array(self.parts).reshape(-1, *[1] * (len(shape) - self.axis - 1))

    def is_wider_than(self, other: Tolerance) -> bool:
        """True if this tolerance accepts something that another one does not."""
        mine, its = np.array(self.parts or self.atol), np.array(other.parts or other.atol)
        alike = self.axis == other.axis and mine.shape == its.shape
        wider = (mine > its).any() if alike else mine.max() > its.min()
        return bool(wider) or self.rtol > other.rtol or self.differing > other.differing

    def __str__(self) -> str:
        more = f", {self.differing:g} of integers may differ" if self.differing else ""
        small = [part for part in self.parts if part < self.atol]
        if small:
            more += f", atol {min(small):g} to {max(small):g}" if len({*small}) > 1 else ""
            more += f", atol {small[0]:g}" if len({*small}) == 1 else ""
            more += f" for {len(small)} of {len(self.parts)} indices of axis {self.axis}"
        return f"rtol {self.rtol:g} or atol {self.atol:g}{more} ({self.why})"


@dataclass(frozen=True)
class Input:
    """One input tensor of the model.

    Args:
        name: The name in ONNX and in the engine. By default it comes from the position in the
            spec's `inputs`.
        shape: A number, a dim or an expression of dims for each axis.
        dtype: A numpy dtype name.
        low: The lowest random value for verification; values are uniform. A bool is true where
            the value is positive, so low=1, high=2 gives a mask of ones.
        high: The highest random value. Integers exclude it.

    Raises:
        InputError: The shape, the dtype or the range is not valid.
    """

    name: str = ""
    shape: tuple[Size, ...] = ()
    dtype: str = "float32"
    low: float = -1.0
    high: float = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.shape, (tuple, list)):
            raise InputError(f"{self.name}: shape {self.shape!r} is not a tuple of sizes")
        object.__setattr__(self, "shape", tuple(self.shape))
        for axis, size in enumerate(self.shape):
            if not isinstance(size, (int, Dim, DimExpr)) or isinstance(size, bool):
                raise InputError(f"{self.name} axis {axis}: {size!r} is neither a number nor a dim")
            if isinstance(size, int) and size < 1:
                raise InputError(f"{self.name} axis {axis}: size {size} must be at least 1")
        try:
            dtype = np.dtype(self.dtype)
        except (TypeError, ValueError) as error:
            known = str(self.dtype).removeprefix("torch.")
            hint = "; use a name such as float32, float16, int64, int32, uint8 or bool"
            hint = f" (a numpy name: {known!r})" if known != str(self.dtype) else hint
            raise InputError(f"{self.name}: unknown dtype {self.dtype!r}{hint}") from error
        if dtype.kind not in "biuf":
            raise InputError(f"{self.name}: dtype {self.dtype!r} is not a number or bool")
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high):
            raise InputError(f"{self.name}: low={self.low} must be less than high={self.high}")
        if dtype.kind in "iu":
            kind = np.iinfo(dtype)
            low, high = int(self.low), int(self.high)
            if not kind.min <= low < high <= int(kind.max) + 1:
                raise InputError(
                    f"{self.name}: low={self.low}, high={self.high} is not a range of "
                    f"{self.dtype}; set the range of integers that the model accepts"
                )

    @property
    def dims(self) -> tuple[Dim, ...]:
        """The dims in the shape, including those inside of expressions."""
        return tuple(
            dim for size in self.shape if isinstance(size, (Dim, DimExpr)) for dim in size.dims
        )

    def sample(self, sizes: Mapping[str, int], seed: int) -> np.ndarray:
        """Random values at these sizes. The name, the sizes and the seed determine the values."""
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
        name: The name in ONNX and in the engine.
        shape: The shape that torch's output must have; None allows any. In an artifact every
            output has one.
        tolerance: The tolerance of this output, in place of the spec's.
        dtype: A numpy dtype name; None until the model is exported.
    """

    name: str
    shape: tuple[Size, ...] | None = None
    tolerance: Tolerance | None = None
    dtype: str | None = None

    def __post_init__(self) -> None:
        if self.dtype is None:
            return
        try:
            dtype = np.dtype(self.dtype)
        except (TypeError, ValueError) as error:
            raise InputError(f"output {self.name}: unknown dtype {self.dtype!r}") from error
        if dtype.kind not in "biuf":
            raise InputError(f"output {self.name}: dtype {self.dtype!r} is not a number or bool")


Feed = Mapping[str, np.ndarray]
