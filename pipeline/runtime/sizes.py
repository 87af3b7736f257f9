"""What an artifact says of its engine's sizes: which are legal, and what comes out.

No GPU is needed for any of this.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.errors import EngineError, InputError
from pipeline.runtime.arrays import Port
from pipeline.spec.dims import DimExpr, Size, check_rules, shape_at, size_text, sizes_text
from pipeline.spec.interface import Interface
from pipeline.spec.profiles import Profile

Shape = tuple[int, ...]

# for the text of sizes where an engine has no dims
ONE_SIZE = "its only size"


@dataclass(frozen=True, eq=False, slots=True)
class Output:
    """An output at certain sizes; no shape and no bytes where they depend on data.

    Args:
        what: it is called in errors.
    """

    port: Port
    shape: Shape | None
    nbytes: int
    what: str


@dataclass(frozen=True, eq=False, slots=True)
class Sized:
    """All that is known of a call by its inputs' shapes (and values, of those on the host)."""

    key: Hashable
    sizes: Mapping[str, int]
    profile: int
    inputs: tuple[tuple[str, Shape], ...]
    input_bytes: tuple[int, ...]
    outputs: tuple[Output, ...]


class Sizes:
    """The sizes that an engine takes and gives, asked at every call.

    Args:
        interface: the artifact's.
    """

    def __init__(self, interface: Interface) -> None:
        self.interface = interface
        self._dims = interface.dims
        self._outputs = {
            name: tuple(map(_expr, shape)) for name, shape in interface.output_shapes.items()
        }

    def solve(self, shapes: Mapping[str, Shape]) -> dict[str, int]:
        """The dims' sizes in the inputs' shapes.

        Raises:
            InputError: a wrong rank or size, in the dims' names.
        """
        return self.interface.sizes_of(shapes)

    def check(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Sizes by dim, each checked, in the dims' order.

        Raises:
            InputError: a dim that is missing, unknown, or of an illegal size.
        """
        known = ", ".join(self._dims) or "none"
        for name in sizes:
            if name not in self._dims:
                raise InputError(f"no dim {name!r}; the dims are: {known}")
        for name, dim in self._dims.items():
            if name not in sizes:
                raise InputError(f"no size for {name}; the dims are: {known}")
            if type(sizes[name]) is not int:
                raise InputError(f"{name}={sizes[name]!r} is no whole number")
            dim.check(sizes[name])
        check_rules(self.interface.rules, sizes)
        return {name: sizes[name] for name in self._dims}

    def input_shapes(self, sizes: Mapping[str, int]) -> dict[str, Shape]:
        """Every input's shape where the dims have these sizes."""
        shapes = self.interface.input_shapes
        return {name: shape_at(shape, sizes) for name, shape in shapes.items()}

    def sample(self, sizes: Mapping[str, int]) -> dict[str, np.ndarray[Any, Any]]:
        """Inputs that the model takes: random values of the ranges that it is verified with."""
        return self.interface.sample(sizes, seed=0)

    def profile(self, sizes: Mapping[str, int], forced: int | None = None) -> int:
        """The place of the profile that fits best (see `best_profile`), or the forced one.

        Raises:
            InputError: it does not allow the sizes.
        """
        if forced is None:
            return best_profile(self.interface.profiles, sizes)
        best_profile(self.interface.profiles[forced : forced + 1], sizes)
        return forced

    def check_output(self, name: str, shape: Shape, sizes: Mapping[str, int]) -> None:
        """Holds an output's shape against the manifest, where that knows it.

        Raises:
            EngineError: it is another one.
        """
        declared = self._outputs[name]
        known = [size.value(sizes) if size.names <= sizes.keys() else None for size in declared]
        right = len(known) == len(shape) and all(
            want is None or want == got for want, got in zip(known, shape, strict=True)
        )
        if not right:
            said = ", ".join(size.text for size in declared)
            raise EngineError(
                f"output {name} came out as {list(shape)} at {sizes_text(sizes, ONE_SIZE)}, but "
                f"the manifest says [{said}]: the plan does not belong to it, or TensorRT is "
                "wrong; convert again"
            )

    def most_bytes(self, itemsizes: Mapping[str, int]) -> dict[str, int]:
        """The most bytes that each input and output can have, where the profiles tell it."""
        inputs = self.interface.input_shapes
        shapes = {name: tuple(map(_expr, shape)) for name, shape in inputs.items()}
        most: dict[str, int] = {}
        for name, shape in {**shapes, **self._outputs}.items():
            for profile in self.interface.profiles:
                for corner in (profile.sizes(0), profile.sizes(2)):
                    with suppress(InputError):  # a size of an output that is no expression of dims
                        count = math.prod(size.value(corner) for size in shape)
                        most[name] = max(most.get(name, 1), count * itemsizes[name])
        return most


def _expr(size: Size | str) -> DimExpr:
    return DimExpr(size_text(size))


def best_profile(profiles: Sequence[Profile], sizes: Mapping[str, int]) -> int:
    """The place of the profile whose opt is nearest, among those that allow the sizes.

    Nearness is the sum over the dims of the logarithms' distance; of equally near ones the
    narrower profile is taken, then the first.

    Raises:
        InputError: none allows the sizes.
    """
    allowing = [n for n, profile in enumerate(profiles) if profile.allows(sizes)]
    if not allowing:
        there = "; ".join(f"{p.name}: {_ranges(p)}" for p in profiles)
        raise InputError(
            f"no profile allows {sizes_text(sizes, ONE_SIZE)}; the engine's profiles are {there}; "
            "give other sizes, or build with another --profile"
        )

    def rank(place: int) -> tuple[float, float, int]:
        distance = width = 0.0
        for name, (low, opt, high) in profiles[place].ranges.items():
            distance += abs(_log(sizes[name]) - _log(opt))
            width += _log(high) - _log(low)
        return (round(distance, 9), round(width, 9), place)

    return min(allowing, key=rank)


def _ranges(profile: Profile) -> str:
    return ", ".join(f"{n} {low}..{high}" for n, (low, _, high) in profile.ranges.items())


def _log(size: int) -> float:
    return math.log(max(size, 1))
