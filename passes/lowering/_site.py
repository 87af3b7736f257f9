"""A node whose form differs between two opsets, and what a converter may ask about it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from onnx.defs import OpSchema

from pipeline.passes.infra import Refused
from pipeline.passes.lib.sizes import elements_of


@dataclass(frozen=True)
class Site:
    """A node to lower.

    Args:
        graph: the graph (or body of If, Loop, Scan) that holds it.
        node: the node.
        old: the op's schema at the opset to reach; None if it came later.
        new: its schema at the graph's opset.
        level: the opset to reach.
    """

    graph: gs.Graph
    node: gs.Node
    old: OpSchema | None
    new: OpSchema
    level: int

    def crosses(self, since: int) -> bool:
        """Whether the change of that opset lies between the two schemas."""
        return (self.old.since_version if self.old else 0) < since <= self.new.since_version

    def input(self, place: int) -> gs.Tensor | None:
        """The input at that place, or None if it is left out."""
        inputs = self.node.inputs
        if place >= len(inputs) or (
            isinstance(inputs[place], gs.Variable) and inputs[place].is_empty()
        ):
            return None
        return inputs[place]

    def rank(self) -> int:
        """The first input's rank.

        Raises:
            Refused: it is not known.
        """
        shape = self.node.inputs[0].shape
        if shape is None:
            raise Refused("the rank of its input is not known: declare it in value_info")
        return len(shape)

    def axes(self, given: gs.Tensor | list[int], rank: int) -> list[int]:
        """Axes counted from the front.

        Raises:
            Refused: they are computed, out of range, or one is there twice.
        """
        axes = numbers(given) if isinstance(given, gs.Tensor) else [int(axis) for axis in given]
        if axes is None:
            raise Refused("its axes are computed: use constants")
        axes = [axis + rank if axis < 0 else axis for axis in axes]
        if len(set(axes)) != len(axes) or not all(0 <= axis < rank for axis in axes):
            raise Refused(f"its axes {axes} are out of range for rank {rank}, or repeated")
        return axes


Steps = Iterator[str]
"""A converter is a generator: what stands before its ``yield`` only looks at the node (and may
raise `Refused`), what stands after it changes the graph. It yields once, what it is going to do,
or not at all if the node is fine as it stands."""


@dataclass(frozen=True)
class Converter:
    """How one op is brought from newer opsets to an older one.

    Args:
        steps: see `Steps`.
        attrs: attributes that the old schema lacks and that `steps` takes care of.
        inputs: how many inputs `steps` takes care of, where that is more than the old schema has.
        types: dtypes that the old schema lacks and that `steps` takes care of.
    """

    steps: Callable[[Site], Steps]
    attrs: tuple[str, ...] = ()
    inputs: int = 0
    types: tuple[str, ...] = ()


def numbers(tensor: gs.Tensor) -> list[int] | None:
    """The integers in a tensor of rank 0 or 1 whose values follow from constants and static
    sizes, else None."""
    elements = elements_of(tensor)
    if elements is None or not all(value.is_Integer for value in elements.values):
        return None
    return [int(value) for value in elements.values]


def type_name(dtype: object) -> str:
    """A dtype as schemas write it: ``tensor(float16)``; nothing if it is None.

    Args:
        dtype: numpy's, or ONNX's number for those that numpy lacks.
    """
    if dtype is None:
        return ""
    number = (
        dtype if isinstance(dtype, int) else onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))  # type: ignore[call-overload]
    )
    return f"tensor({onnx.TensorProto.DataType.Name(number).lower()})"
