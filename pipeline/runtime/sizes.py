"""The sizes of an engine by its artifact: which are legal, and which outputs they give.

This module needs no GPU.
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
class OutputAtSizes:
    """An output at certain sizes; its shape is None if it depends on data.

    Args:
        nbytes: the output's size in bytes; 0 if it depends on data.
        what: the output's name in error messages.
    """

    port: Port
    shape: Shape | None
    nbytes: int
    what: str


@dataclass(eq=False, slots=True)
class Sized:
    """A call's sizes, worked out from its inputs' shapes (and values of inputs on the host).

    Attributes:
        calls, graph_calls: the calls of these sizes, without and with a captured graph, that
            `pipeline.runtime.metrics.Counters` has not added to its totals yet.
    """

    key: Hashable
    sizes: Mapping[str, int]
    profile: int
    inputs: tuple[tuple[str, Shape], ...]
    input_bytes: tuple[int, ...]
    outputs: tuple[OutputAtSizes, ...]
    calls: int = 0
    graph_calls: int = 0


class EngineSizes:
    """The sizes of an engine's inputs and outputs; every call is checked with it.

    Args:
        interface: the artifact's interface.
    """

    def __init__(self, interface: Interface) -> None:
        self.interface = interface
        self._dims = interface.dims
        self._outputs = {
            name: tuple(map(_expr, shape)) for name, shape in interface.output_shapes.items()
        }

    def solve(self, shapes: Mapping[str, Shape]) -> dict[str, int]:
        """Returns the dims' sizes in the inputs' shapes.

        Raises:
            InputError: a rank or size is wrong; the message names the dim.
        """
        return self.interface.sizes_of(shapes)

    def check(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Checks sizes by dim, and returns them in the dims' order.

        Raises:
            InputError: a dim is missing or unknown, or its size is illegal.
        """
        known = ", ".join(self._dims) or "none"
        for name in sizes:
            if name not in self._dims:
                raise InputError(f"no dim {name!r}; the dims are: {known}")
        for name, dim in self._dims.items():
            if name not in sizes:
                raise InputError(f"no size for {name}; the dims are: {known}")
            if type(sizes[name]) is not int:
                raise InputError(f"{name}={sizes[name]!r} is not a whole number")
            dim.check(sizes[name])
        check_rules(self.interface.rules, sizes)
        return {name: sizes[name] for name in self._dims}

    def input_shapes(self, sizes: Mapping[str, int]) -> dict[str, Shape]:
        """Every input's shape at these sizes of the dims."""
        shapes = self.interface.input_shapes
        return {name: shape_at(shape, sizes) for name, shape in shapes.items()}

    def sample(self, sizes: Mapping[str, int]) -> dict[str, np.ndarray[Any, Any]]:
        """Valid inputs: random values in the inputs' ranges."""
        return {i.name: i.random(sizes, seed=0) for i in self.interface.inputs}

    def profile(self, sizes: Mapping[str, int], forced: int | None = None) -> int:
        """The index of the profile that fits best (see `best_profile`), or the forced one.

        Raises:
            InputError: the profile does not allow the sizes.
        """
        if forced is None:
            return best_profile(self.interface.profiles, sizes)
        best_profile(self.interface.profiles[forced : forced + 1], sizes)
        return forced

    def check_output(self, name: str, shape: Shape, sizes: Mapping[str, int]) -> None:
        """Compares an output's shape with the manifest, if the manifest has it.

        Raises:
            EngineError: the shape differs.
        """
        declared = self._outputs[name]
        known = [size.value(sizes) if size.names <= sizes.keys() else None for size in declared]
        right = len(known) == len(shape) and all(
            want is None or want == got for want, got in zip(known, shape, strict=True)
        )
        if not right:
            said = ", ".join(size.text for size in declared)
            raise EngineError(
                f"output {name} has shape {list(shape)} at {sizes_text(sizes, ONE_SIZE)}, but the "
                f"manifest says [{said}]: the plan is from another build, or TensorRT is wrong; "
                "convert again"
            )

    def most_bytes(self, itemsizes: Mapping[str, int]) -> dict[str, int]:
        """The most bytes of each input and output, if the profiles determine them."""
        inputs = self.interface.input_shapes
        shapes = {name: tuple(map(_expr, shape)) for name, shape in inputs.items()}
        most: dict[str, int] = {}
        for name, shape in {**shapes, **self._outputs}.items():
            for profile in self.interface.profiles:
                for corner in (profile.sizes(0), profile.sizes(2)):
                    with suppress(InputError):  # an output's size that is not an expression of dims
                        count = math.prod(size.value(corner) for size in shape)
                        most[name] = max(most.get(name, 1), count * itemsizes[name])
        return most


def _expr(size: Size | str) -> DimExpr:
    return DimExpr(size_text(size))


def best_profile(profiles: Sequence[Profile], sizes: Mapping[str, int]) -> int:
    """The index of the profile whose opt is nearest, among those that allow the sizes.

    The distance is the sum over the dims of ``abs(log(size) - log(opt))``. If two profiles are
    equally near, the narrower one wins, then the first.

    Raises:
        InputError: no profile allows the sizes.
    """
    allowing = [n for n, profile in enumerate(profiles) if profile.allows(sizes)]
    if not allowing:
        there = "; ".join(f"{p.name}: {_ranges(p)}" for p in profiles)
        raise InputError(
            f"no profile allows {sizes_text(sizes, ONE_SIZE)}; the engine's profiles are {there}; "
            "pass other sizes, or build with another --profile"
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
