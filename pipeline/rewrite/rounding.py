"""Nodes that round float32 values to fewer digits, with the range of float32.

ONNX Runtime has few bfloat16 nodes, and before opset 13 no Cast to bfloat16. So values are rounded
as float32: with ``c = x * (2**s + 1)``, the difference ``c - (c - x)`` has the first ``24 - s``
digits of x (Veltkamp's splitting; Dekker, "A floating-point technique for extending the available
precision", 1971). There is no overflow and no underflow, which a float16 would have.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import onnx
from onnx import helper, numpy_helper

_DIGITS = 24  # of float32
_LARGE = 1e30  # the product of a larger number could overflow: it stays as it is


def rounded_array(array: np.ndarray, digits: int) -> np.ndarray:
    """A float32 array with each value rounded to this many digits."""
    if not array.size:
        return array
    # a change of the exponent alone is exact
    fraction, exponent = np.frexp(array.astype(np.float64))
    whole = np.round(np.ldexp(fraction, digits))
    rounded: np.ndarray = np.ldexp(whole, exponent - digits).astype(np.float32)
    return rounded


class Rounding:
    """Makes the nodes that round.

    Args:
        graph: The graph of the nodes; it gets three constants.
        taken: The names of its tensors.
        digits: The digits that are left, of the 24 of float32.
    """

    def __init__(self, graph: onnx.GraphProto, taken: Collection[str], digits: int) -> None:
        self._mark = "/rounding"
        while any(self._mark in name for name in taken):
            self._mark += "_"
        # a tensor may be called "factor"
        self._factor, self._large = f"{self._mark}/factor", f"{self._mark}/large"
        factor = 2.0 ** (_DIGITS - digits) + 1
        self._below = f"{self._mark}/below"
        # a number with this many digits, times this, is nearer to the next lower one, or is it
        below = 1 - 2.0**-digits
        constants = ((self._factor, factor), (self._large, _LARGE), (self._below, below))
        for name, value in constants:
            graph.initializer.append(numpy_helper.from_array(np.array(value, np.float32), name))

    def new(self, name: str) -> str:
        """The name of a new tensor that is made from another one."""
        return f"{name}{self._mark}"

    def nodes(self, source: str, output: str) -> list[onnx.NodeProto]:
        """The nodes that make `output`, the rounded `source`. No other call may have the output."""

        def name(step: str) -> str:
            return f"{output}{self._mark}/{step}"

        steps = [
            ("Mul", [source, self._factor], name("scaled")),
            ("Sub", [name("scaled"), source], name("rest")),
            ("Sub", [name("scaled"), name("rest")], name("digits")),
            ("Abs", [source], name("magnitude")),
            ("Less", [name("magnitude"), self._large], name("fits")),
            ("Where", [name("fits"), name("digits"), source], output),
        ]
        return [
            helper.make_node(op, ins, [out], name=name(f"{op}_{number}"))
            for number, (op, ins, out) in enumerate(steps)
        ]

    def cut(self, source: str, output: str) -> list[onnx.NodeProto]:
        """The nodes that make `output`: `source` without its last digits, rounded towards zero."""

        def name(step: str) -> str:
            return f"{output}{self._mark}/{step}"

        near, lower = name("nearest"), name("lower")
        steps = [
            ("Abs", [near], name("near_size")),
            ("Abs", [source], name("size")),
            ("Greater", [name("near_size"), name("size")], name("above")),
            ("Where", [name("above"), lower, near], output),
        ]
        return [
            *self.nodes(source, near),
            helper.make_node("Mul", [near, self._below], [name("less")], name=name("Mul_below")),
            *self.nodes(name("less"), lower),
            *(
                helper.make_node(op, ins, [out], name=name(f"{op}_cut_{number}"))
                for number, (op, ins, out) in enumerate(steps)
            ),
        ]
