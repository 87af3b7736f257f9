"""Whole numbers that a model makes of sizes by way of floats: ``math.floor(h * 0.41)``.

Python computes in float64. TensorRT has only float32, and torch's exporter writes float32:
300 * 0.41 is 122.99999999999999 in one and 123 in the other. So there are four ways:

- a size times or by a number becomes a product and a quotient of integers (`times`)
- if float32 gives the same whole number at all declared sizes, it stays
- otherwise a table, if the float has one size in it, and that has few values
- otherwise the model is refused

Every set of sizes is tried, so more than 16777216 are refused. A size without a largest value is
tried up to 32768. A float that is made by another function than those below, or of a size without a
smallest value, stays float32 untried.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from onnx import TensorProto
from torch.fx import Node

from pipeline.errors import ExportError
from pipeline.export.ops.sizes import (
    TABLE,
    Value,
    as_size,
    bounds,
    ints,
    known,
    op,
    times,
)

ToWhole = Callable[[Any], np.ndarray]  # of numpy: trunc, floor or ceil

_MOST = 1 << 24  # sets of sizes at which float32 is compared with float64; 1 s
_CHUNK = 1 << 18  # of them at a time
_FAR = 1 << 15  # the largest value that is tried of a size without a largest value
_FUNCTIONS: Mapping[Any, Callable[..., Any]] = {
    operator.add: np.add,
    operator.sub: np.subtract,
    operator.mul: np.multiply,
    operator.truediv: np.divide,
    operator.pow: np.power,
    operator.neg: np.negative,
    operator.abs: np.abs,
    torch.sym_max: np.maximum,
    torch.sym_min: np.minimum,
    torch.sym_float: np.asarray,
}


@dataclass(frozen=True)
class _Leaf:
    """A size that goes into a float: its smallest and its largest value."""

    low: int
    high: float

    @property
    def count(self) -> int:
        """How many values are tried: all, or some if there is no largest."""
        high = int(self.high) if math.isfinite(self.high) else max(_FAR, self.low)
        return max(0, high - self.low + 1)

    def values(self) -> np.ndarray:
        """The values that are tried."""
        return self.low + np.arange(self.count)


def trunc(value: Any) -> Any:
    """``int(size * factor)``, and the truncation of any other float of sizes."""
    # ONNX's Cast rounds towards zero
    return _whole(value, np.trunc, lambda v: op.Cast(v, to=TensorProto.INT64))


def floor(value: Any) -> Any:
    """``math.floor`` of a float of sizes."""
    return _whole(value, np.floor, lambda v: op.Cast(op.Floor(v), to=TensorProto.INT64))


def ceil(value: Any) -> Any:
    """``math.ceil`` of a float of sizes."""
    return _whole(value, np.ceil, lambda v: op.Cast(op.Ceil(v), to=TensorProto.INT64))


def _whole(value: Any, to_whole: ToWhole, plain: Callable[[Any], Any]) -> Any:
    """The whole number of a float, exactly as Python computes it.

    Raises:
        ExportError: float32 differs from Python, and no table is small enough.
    """
    product = value.producer()
    node = None if product is None else product.meta.get("node")
    if node is None:
        return plain(value)
    exact = _product(product, node, to_whole)
    if exact is not None:
        return exact
    leaves: dict[str, _Leaf] = {}
    if not _read(node, leaves) or not leaves:
        return plain(value)
    wrong = _differing(node, leaves, to_whole)
    if not wrong:
        return plain(value)
    if len(leaves) == 1:
        ((name, leaf),) = leaves.items()
        size = _size_in(value)
        if size is not None and leaf.high - leaf.low < TABLE:
            want = _made(node, {name: leaf.values()}, np.float64, to_whole)
            return _looked_up(size, leaf, want)
    raise ExportError(
        f"makes a whole number of a float of sizes, and {wrong}. Compute it in integers, such as "
        "h * 41 // 100 in place of int(h * 0.41), or declare a smaller max"
    )


def _differing(node: Node, leaves: Mapping[str, _Leaf], to_whole: ToWhole) -> str:
    """Why float32 can't compute a whole number; empty if it is right at every set of sizes."""
    counts = [leaf.count for leaf in leaves.values()]
    total = math.prod(counts)
    if total > _MOST:
        return f"the sizes have too many values ({total}) to check whether float32 is exact enough"
    values = [leaf.values() for leaf in leaves.values()]
    for first in range(0, total, _CHUNK):
        places = np.unravel_index(np.arange(first, min(total, first + _CHUNK)), counts)
        sizes = {n: v[k] for n, v, k in zip(leaves, values, places, strict=True)}
        want = _made(node, sizes, np.float64, to_whole)
        if (want != _made(node, sizes, np.float32, to_whole)).any():
            return "float32 rounds that float differently from Python at some sizes"
    return ""


def _product(product: Any, node: Node, to_whole: ToWhole) -> Any:
    """A size times or by a number, in integers. None for another float, or if no way is exact."""
    over = node.target is operator.truediv
    if node.target is not operator.mul and not over:
        return None
    numbers = [a for a in node.args if isinstance(a, (int, float))]
    sizes = [size for size in map(_before_casts, product.inputs) if size is not None]
    if len(numbers) != 1 or len(sizes) != 1 or numbers[0] <= 0:
        return None
    if over and node.args[1] is not numbers[0]:
        return None
    (size,) = sizes
    symbol = known(size)
    if bounds(symbol)[0] < 0:
        return None
    up = to_whole is np.ceil
    try:
        exact = times(as_size(size), numbers[0], bounds(symbol)[1], up=up, over=over)
    except ExportError:
        return None
    return op.Squeeze(exact, ints(0))


def _before_casts(value: Any) -> Value | None:
    """The size that becomes a float by nothing but Casts; None for another float."""
    while not isinstance(known(value), torch.SymInt):
        producer = value.producer()
        if producer is None or producer.op_type != "Cast":
            return None
        (value,) = producer.inputs
    return value


def _looked_up(size: Value, leaf: _Leaf, whole: np.ndarray) -> Value:
    """The whole number in a table; `whole` has it for each value of the size."""
    index = op.Sub(size, op.Constant(value_int=leaf.low)) if leaf.low else size
    return op.Gather(ints(*whole.astype(np.int64).tolist()), index, axis=0)


def _read(node: Any, leaves: dict[str, _Leaf]) -> bool:
    """Notes the sizes that go into a float. False if it has a function that is not known here."""
    if not isinstance(node, Node):
        return isinstance(node, (int, float))
    size = node.meta.get("val")
    if isinstance(size, torch.SymInt):
        low, high = bounds(size)
        if low == -math.inf:
            return False
        leaves[_name(size)] = _Leaf(int(low), high)
        return True
    if isinstance(size, int):
        return True
    return node.target in _FUNCTIONS and all(_read(arg, leaves) for arg in node.args)


def _name(size: torch.SymInt) -> str:
    return str(size.node.expr)


def _made(node: Node, sizes: Mapping[str, np.ndarray], real: Any, to_whole: ToWhole) -> np.ndarray:
    """The whole number at each set of sizes, if it is computed in `real`; 0 where it fails."""

    def value(part: Any) -> Any:
        if not isinstance(part, Node):
            return np.asarray(part, real)
        size = part.meta.get("val")
        if isinstance(size, torch.SymInt):
            return sizes[_name(size)].astype(real)
        if isinstance(size, int):
            return np.asarray(size, real)
        return _FUNCTIONS[part.target](*map(value, part.args))

    with np.errstate(all="ignore"):
        made = np.asarray(to_whole(value(node)), np.float64)
    made = np.broadcast_to(made, next(iter(sizes.values())).shape)
    whole: np.ndarray = np.where(np.isfinite(made), made, 0)  # where Python fails, any will do
    return whole


def _size_in(value: Any) -> Value | None:
    """The size, an int64 scalar, of which ONNX nodes make a float."""
    rest = [value]
    while rest:
        found = rest.pop()
        if isinstance(known(found), torch.SymInt):
            return found
        product = found.producer()
        rest += [] if product is None else [v for v in product.inputs if v is not None]
    return None


TRANSLATIONS: dict[Any, Callable[..., Any]] = {
    math.trunc: trunc,
    math.floor: floor,
    math.ceil: ceil,
}
