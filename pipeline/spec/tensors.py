"""Inputs, outputs, and the tolerance of a comparison."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from pipeline.errors import InputError
from pipeline.spec.dims import Dim, DimExpr, Size, evaluate, shape_at, size_text
from pipeline.spec.given import named_fields
from pipeline.spec.metrics import METRICS, Metric
from pipeline.spec.values import Values

Precision = Literal["fp32", "tf32", "fp16", "bf16"]
End = float | Dim | DimExpr  # of a range of values
Pattern = Literal["", "prefix", "padding", "causal", "all"]
Edge = Literal["0", "least", "largest", "in the upper half"]
EDGES: tuple[Edge, ...] = get_args(Edge)  # of the range of an input, see `Input.edge`


_PATTERNS = "known: prefix, padding, causal, all"
_FORM = 'Write for example Tolerance(rtol=1e-3, atol=1e-5, why="float32 rounding")'
MOST_DIFFERING = 0.1  # a larger share could hide a fault


@named_fields
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
        InputError: A number is none, is not finite, or is outside of its range.
    """

    rtol: float
    atol: float
    why: str
    differing: float = 0.0
    axis: int | None = None
    parts: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for word in ("rtol", "atol", "differing"):
            value = getattr(self, word)
            if isinstance(value, bool) or not isinstance(value, (int, float, np.number)):
                raise InputError(f"tolerance {word}={value!r}: is not a number. {_FORM}")
        if not (math.isfinite(self.rtol) and math.isfinite(self.atol)):
            raise InputError(f"tolerance rtol={self.rtol} atol={self.atol}: must be finite")
        if self.rtol < 0 or self.atol < 0:
            raise InputError(f"tolerance rtol={self.rtol} atol={self.atol}: can't be negative")
        if self.rtol >= 1:
            raise InputError(f"tolerance rtol={self.rtol}: 1 or more would pass anything")
        if not 0 <= self.differing <= MOST_DIFFERING:
            raise InputError(
                f"tolerance differing={self.differing}: must be a share from 0 to {MOST_DIFFERING}"
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


def check_tolerance(value: object, where: str) -> None:
    """Raises `InputError` unless the value is a `Tolerance` or None."""
    if value is not None and not isinstance(value, Tolerance):
        raise InputError(f"{where}={value!r}: is not a Tolerance. {_FORM}")


@named_fields
@dataclass(frozen=True)
class Input:
    """One input tensor of the model.

    Args:
        name: The name in ONNX and in the engine. By default it comes from the position in the
            spec's `inputs`.
        shape: A number, a dim or an expression of dims for each axis.
        dtype: A numpy dtype name.
        low: The lowest random value for verification; values are uniform. A bool is true where
            the value is positive, so low=1, high=2 gives a mask of ones. It may be a dim or an
            expression of dims.
        high: The highest random value. Integers exclude a number, and include an expression: with
            low=1 and the dim t as high, they are 1 to t.
        pattern: The pattern of a bool or an integer mask, in place of a range. ``prefix``: in each
            row of the last axis, the first elements are 1; their number is random and at least 1.
            ``padding``: the opposite, as in PyTorch's ``key_padding_mask``: the last elements are
            1, but never all. ``causal``: in the last two axes, each query has its own key and those
            before it; the last query has all keys. ``all``: ones.
        values: The user's values, in place of random ones (`pipeline.source.values`).

    Raises:
        InputError: The shape, the dtype or the range is not valid.
    """

    name: str = ""
    shape: tuple[Size, ...] = ()
    dtype: str = "float32"
    low: End = -1.0
    high: End = 1.0
    pattern: Pattern = ""
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
            hint = "; declare it float32" if str(self.dtype) == "bfloat16" else ""
            raise InputError(f"{self.name}: dtype {self.dtype!r} is not a number or bool{hint}")
        self._check_range(dtype)
        if self.values is not None:
            self._check_values(self.values)

    def _check_range(self, dtype: np.dtype) -> None:
        if self.pattern not in get_args(Pattern):
            raise InputError(f"{self.name}: unknown pattern {self.pattern!r}; {_PATTERNS}")
        if self.pattern and dtype.kind == "f":
            raise InputError(f"{self.name}: a {self.pattern} mask is a bool or an integer")
        if len(self.shape) < {"prefix": 1, "padding": 1, "causal": 2}.get(self.pattern, 0):
            raise InputError(f"{self.name}: too few axes for a {self.pattern} mask")
        for word in ("low", "high"):
            end = getattr(self, word)
            if isinstance(end, Dim):
                object.__setattr__(self, word, end := DimExpr(end.name, (end,)))
            if isinstance(end, DimExpr) and dtype.kind == "b":
                raise InputError(f"{self.name}: {word}={end}: the range of a bool is of numbers")
        low, high = self.low, self.high
        if isinstance(low, (Dim, DimExpr)) or isinstance(high, (Dim, DimExpr)):
            return
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            raise InputError(f"{self.name}: low={low} must be less than high={high}")
        if dtype.kind in "iu":
            kind = np.iinfo(dtype)
            if not kind.min <= int(low) < int(high) <= int(kind.max) + 1:
                raise InputError(
                    f"{self.name}: low={low}, high={high} is not a range of "
                    f"{self.dtype}; set the range of integers that the model accepts"
                )

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
        if self.pattern:
            return _mask(self.pattern, shape, rng).astype(dtype)
        low, high = self.range_at(sizes)
        if dtype.kind == "b":
            return np.asarray(rng.uniform(low, high, shape) > 0)  # () gives a scalar
        if dtype.kind in "iu":
            return rng.integers(int(low), int(high), shape, dtype=dtype)
        return np.asarray(rng.uniform(low, high, shape)).astype(dtype)

    def edge(self, sizes: Mapping[str, int], edge: Edge) -> np.ndarray:
        """Values at an edge of the range, in place of random ones.

        Integers at the least go up from it, one by one, and at the largest down. The user's values,
        masks of a pattern and bools stay as in `sample`.

        Args:
            sizes: The size of each dim.
            edge: One of `EDGES`.
        """
        dtype = np.dtype(self.dtype)
        if self.values is not None or self.pattern or dtype.kind == "b":
            return self.sample(sizes, 0)
        shape = shape_at(self.shape, sizes)
        low, high = self.range_at(sizes)
        middle = (low + high) / 2
        if dtype.kind == "f":
            rng = np.random.default_rng([0, *shape, *self.name.encode()])
            values = {
                "0": min(max(low, 0.0), high), "least": low, "largest": high,
                "in the upper half": rng.uniform(middle, high, shape),
            }  # fmt: skip
            return np.full(shape, values[edge]).astype(dtype)
        low, high, count = int(low), int(high), math.prod(shape)
        steps = np.arange(count).reshape(shape) % min(high - low, max(count, 1))
        whole = {
            "0": min(max(low, 0), high - 1), "least": low + steps, "largest": high - 1 - steps,
            "in the upper half": high - 1 - steps % max(min((high - low) // 2, count), 1),
        }  # fmt: skip
        return np.full(shape, whole[edge]).astype(dtype)

    @property
    def drawn(self) -> str:
        """How random values are drawn, as text: ``0..1000``, ``1..t`` or ``prefix``."""
        ends = (
            size_text(end) if isinstance(end, (Dim, DimExpr)) else f"{end:g}"
            for end in (self.low, self.high)
        )
        return self.pattern or "..".join(ends)

    def range_at(self, sizes: Mapping[str, int]) -> tuple[float, float]:
        """The range at these sizes. Integers exclude its end.

        Raises:
            InputError: The range is empty, or the dtype does not hold it.
        """
        low, high = (
            end if isinstance(end, (int, float)) else evaluate(end, sizes)
            for end in (self.low, self.high)
        )
        kind = np.dtype(self.dtype).kind
        if kind in "iu" and isinstance(self.high, (Dim, DimExpr)):
            high += 1
        info = np.iinfo(self.dtype) if kind in "iu" else None
        if low > high or (info and not info.min <= low < high <= int(info.max) + 1):
            words = ", ".join(f"{name}={size}" for name, size in sizes.items())
            raise InputError(
                f"input {self.name}: the range {self.drawn} has no {self.dtype} at {words}. "
                "Change the range, or the sizes of the dim"
            )
        return low, high


def _mask(pattern: Pattern, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """A mask in which each row has an element that counts; see `Input.pattern`."""
    if pattern in ("prefix", "padding"):
        counts = rng.integers(1, max(shape[-1], 1) + 1, (*shape[:-1], 1))
        return np.asarray((np.arange(shape[-1]) < counts) == (pattern == "prefix"))
    mask = np.ones(shape, bool)
    if pattern == "causal":
        queries, keys = shape[-2:]
        last = np.maximum(np.arange(queries) + keys - queries, 0)
        mask &= np.arange(keys) <= last[:, None]
    return mask


@named_fields
@dataclass(frozen=True)
class Output:
    """One output tensor.

    Args:
        name: The name in ONNX and in the engine.
        shape: The shape that torch's output must have; None allows any. In an artifact every
            output has one.
        tolerance: The tolerance of this output, in place of the spec's.
        dtype: A numpy dtype name; None until the model is exported.
        metric: A measure of the error for the summary, beside the tolerance (`METRICS`).

    Raises:
        InputError: The dtype or the metric is unknown, or the tolerance is no `Tolerance`.
    """

    name: str
    shape: tuple[Size, ...] | None = None
    tolerance: Tolerance | None = None
    dtype: str | None = None
    metric: Metric | None = None

    def __post_init__(self) -> None:
        check_tolerance(self.tolerance, f"output {self.name}: tolerance")
        if self.metric is not None and self.metric not in METRICS:
            known = ", ".join(METRICS)
            raise InputError(f"output {self.name}: unknown metric {self.metric!r}; known: {known}")
        if self.dtype is None:
            return
        try:
            dtype = np.dtype(self.dtype)
        except (TypeError, ValueError) as error:
            raise InputError(f"output {self.name}: unknown dtype {self.dtype!r}") from error
        if dtype.kind not in "biuf":
            raise InputError(f"output {self.name}: dtype {self.dtype!r} is not a number or bool")


Feed = Mapping[str, np.ndarray]
