"""A node whose form differs between two opsets, with helpers for converters."""

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
        graph: the graph (or body of If, Loop, Scan) that holds the node.
        node: the node.
        old: the op's schema at `level`; None if the op is newer.
        new: its schema at the graph's opset.
        level: the opset to lower to.
    """

    graph: gs.Graph
    node: gs.Node
    old: OpSchema | None
    new: OpSchema
    level: int

    def crosses(self, since: int) -> bool:
        """Whether the change of this opset lies between the two schemas."""
        return (self.old.since_version if self.old else 0) < since <= self.new.since_version

    def input(self, place: int) -> gs.Tensor | None:
        """The input at this index, or None if it is omitted."""
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
            Refused: the axes are computed, out of range or repeated.
        """
        axes = numbers(given) if isinstance(given, gs.Tensor) else [int(axis) for axis in given]
        if axes is None:
            raise Refused("its axes are computed: use constants")
        axes = [axis + rank if axis < 0 else axis for axis in axes]
        if len(set(axes)) != len(axes) or not all(0 <= axis < rank for axis in axes):
            raise Refused(f"its axes {axes} are out of range for rank {rank}, or repeated")
        return axes


Steps = Iterator[str]
"""A converter is a generator. Before its ``yield`` it only inspects the node, and may raise
`Refused`. After it, it changes the graph. It yields a description of the change once, or never if
the node needs no change."""


@dataclass(frozen=True)
class Converter:
    """How one op is lowered from newer opsets to an older one.

    Args:
        steps: see `Steps`.
        attrs: attributes that the old schema lacks and that `steps` handles.
        inputs: number of inputs that `steps` handles, if the old schema has fewer.
        types: dtypes that the old schema lacks and that `steps` handles.
    """

    steps: Callable[[Site], Steps]
    attrs: tuple[str, ...] = ()
    inputs: int = 0
    types: tuple[str, ...] = ()


def numbers(tensor: gs.Tensor) -> list[int] | None:
    """The integers in a tensor of rank 0 or 1. None if they do not follow from constants and
    static sizes."""
    elements = elements_of(tensor)
    if elements is None or not all(value.is_Integer for value in elements.values):
        return None
    return [int(value) for value in elements.values]


def type_name(dtype: object) -> str:
    """A dtype as schemas write it: ``tensor(float16)``; empty for None.

    Args:
        dtype: a numpy dtype, or ONNX's number for dtypes that numpy lacks.
    """
    if dtype is None:
        return ""
    number = (
        dtype if isinstance(dtype, int) else onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))  # type: ignore[call-overload]
    )
    return f"tensor({onnx.TensorProto.DataType.Name(number).lower()})"
