"""Finds the values that half precision makes 0 or infinite because of a constant.

Example: ``x / (x.norm() + 1e-8)``. The Add stays float32, because float16 makes 0 of 1e-8. But it
makes 0 of the sum too, so the division has to read the sum in float32. ``x * rsqrt(s + 1e-12)``
needs the root's reciprocal in float32: 1e6 would be infinite. A comparison with random inputs does
not show this, because the sum is almost never that small.

A constant that is too large is the same at the other end. ``scores + (1 - mask) * -1e9`` is -inf in
float16, and NaN after a softmax of a row that is wholly masked: the softmax stays float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import onnx

from pipeline.rewrite.half_rules import MOVE, Constants, Node

# what a constant does in an op, apart from reaching the result
_KEEP_FROM_0 = frozenset({"Add", "Clip", "Max", "Sub", "Where"})
_MAKE_INFINITE = frozenset({"Add", "Mul", "Sub", "Where"})
# a result may be the smallest of the inputs
_MOVES = MOVE | {"Abs", "Gather", "Min", "ReduceMax", "ReduceMin"}


class Extremes:
    """The tensors of a graph that a small constant keeps from 0, the reciprocals of such, and those
    that a large constant makes infinite.

    Args:
        constants: The constants of the graph.
        least: Half precision makes 0 of this and less.
        largest: The largest number of half precision.
    """

    def __init__(self, constants: Constants, least: float, largest: float) -> None:
        self._constants, self._least, self._small = constants, least, 1 / largest
        self._found: dict[str, float] = {}  # the least magnitude by tensor, if it is small
        self._infinite: set[str] = set()  # tensors that may be infinite in half precision

    def stays(self, node: onnx.NodeProto, seen: Node) -> bool:
        """True if a node must compute in float32. Call it for each node, in the graph's order."""
        if not self._infinite.isdisjoint(seen.inputs):
            self._infinite.update(seen.outputs if seen.op in _MOVES | {"Add", "Sub"} else ())
            return True
        found = [self._found[name] for name in seen.inputs if name in self._found]
        constants = [m for name in seen.inputs for m in self._constants.magnitudes(name)]
        if max(constants, default=0) * self._small > 1 and seen.op in _MAKE_INFINITE:
            self._infinite.update(seen.outputs)
            return True
        small = [each for each in constants if 0 < each < self._small]
        if small and seen.op in _KEEP_FROM_0 and not found:
            self._note(seen, min(small))
            return min(small) <= self._least
        return bool(found) and self._reads(node, seen, found, constants)

    def _reads(
        self, node: onnx.NodeProto, seen: Node, found: list[float], constants: list[float]
    ) -> bool:
        """The same for a node that reads small values."""
        divides = seen.op == "Div" and node.input[1] in self._found
        if seen.op in ("Pow", "Reciprocal") or (divides and node.input[0] in self._constants.made):
            self._infinite.update(seen.outputs)
            return True
        combine = self._combination(seen)
        if combine is not None:
            self._note(seen, combine([*found, *constants]))
        matters = divides or seen.op == "Log" or combine is not None
        return matters and min(found) <= self._least

    def _combination(self, seen: Node) -> Callable[[list[float]], float] | None:
        """How the least magnitude of a result follows from those of the inputs; None if it may be 0
        or is not known."""
        known = all(name in self._found or name in self._constants.made for name in seen.inputs)
        if seen.op == "Sqrt":
            return lambda values: math.sqrt(values[0])
        if seen.op in _MOVES:
            return min
        if seen.op in ("Clip", "Max"):
            return max
        if seen.op == "Add":
            return math.fsum
        return math.prod if seen.op == "Mul" and known else None

    def _note(self, seen: Node, least: float) -> None:
        if least < self._small:
            self._found.update(dict.fromkeys(seen.outputs, least))
