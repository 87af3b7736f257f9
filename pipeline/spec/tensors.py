"""Inputs, outputs, and the tolerance of a comparison."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from pipeline.errors import InputError
from pipeline.spec.dims import Dim, DimExpr, Size, shape_at
from pipeline.spec.values import Values

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

    Raises:
        InputError: A number is not finite or outside of its range.
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
            raise InputError(f"tolerance rtol={self.rtol}: 1 or more would pass anything")
        if not 0 <= self.differing <= _MOST_DIFFERING:
            raise InputError(
                f"tolerance differing={self.differing}: must be a share from 0 to {_MOST_DIFFERING}"
            )

    def __str__(self) -> str:
        more = f", {self.differing:g} of integers may differ" if self.differing else ""
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
        values: The user's values, in place of random ones (`pipeline.source.values`).

    Raises:
        InputError: The shape, the dtype or the range is not valid.
    """

    name: str = ""
    shape: tuple[Size, ...] = ()
    dtype: str = "float32"
    low: float = -1.0
    high: float = 1.0
    values: Values | None = None

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
        if self.values is not None:
            self._check_values(self.values)

    def _check_values(self, values: Values) -> None:
        if values.dtype is not None and values.dtype != np.dtype(self.dtype):
            raise InputError(
                f"{self.name} is {self.dtype}, but its values are {values.dtype}. Convert the "
                f"values, or declare {self.name}:SHAPE:{values.dtype}"
            )
        if len(values.shape) != len(self.shape):
            raise InputError(
                f"{self.name} has {len(self.shape)} axes, but its values have {len(values.shape)}"
            )
        for axis, (got, size) in enumerate(zip(values.shape, self.shape, strict=True)):
            if isinstance(size, int) and got != size:
                raise InputError(f"{self.name} axis {axis}: its values have size {got}, not {size}")
            if got < 1 and not isinstance(size, int):
                raise InputError(
                    f"{self.name} axis {axis}: its values have no element there, so values at "
                    "other sizes can't be made. Pass at least one"
                )

    @property
    def dims(self) -> tuple[Dim, ...]:
        """The dims in the shape, including those inside of expressions."""
        return tuple(
            dim for size in self.shape if isinstance(size, (Dim, DimExpr)) for dim in size.dims
        )

    def sample(self, sizes: Mapping[str, int], seed: int) -> np.ndarray:
        """The user's values at these sizes, or else random ones. Each seed gives other values."""
        if self.values is None:
            return self.random(sizes, seed)
        dynamic = [not isinstance(size, int) for size in self.shape]
        return self.values.at(shape_at(self.shape, sizes), dynamic, turn=seed)

    def random(self, sizes: Mapping[str, int], seed: int) -> np.ndarray:
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
