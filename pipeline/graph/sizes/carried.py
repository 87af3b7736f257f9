"""The types of tensors, and the values of small tensors, without running a graph."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx

SMALL = 1024  # elements; larger tensors are not shapes

Types = dict[str, onnx.TypeProto]
Value = tuple[np.ndarray, ...]  # one array if all elements are known, otherwise several versions
Carried = tuple[onnx.TypeProto | None, Value | None]


@dataclass
class CarriedSizes:
    """Types and small values by tensor name, and the sizes of the bodies that run.

    The key in `bodies` is the node's first output and the attribute's name. A branch that does
    not run is not in it.
    """

    types: Types = field(default_factory=dict)
    values: dict[str, Value] = field(default_factory=dict)
    bodies: dict[tuple[str, str], CarriedSizes] = field(default_factory=dict)

    def carried(self, name: str) -> Carried:
        return self.types.get(name), self.values.get(name)


def body_key(node: onnx.NodeProto, attribute: str) -> tuple[str, str]:
    """The key of a body in `CarriedSizes.bodies`."""
    return next(filter(None, node.output), ""), attribute


def known_dims(kind: onnx.TypeProto) -> list[int | None]:
    """The sizes of a tensor that has a rank; None for an unknown size."""
    return [d.dim_value if d.HasField("dim_value") else None for d in kind.tensor_type.shape.dim]


def element_count(kind: onnx.TypeProto) -> int | None:
    """The number of a tensor's elements; None if it is unknown or not a tensor."""
    if not kind.tensor_type.HasField("shape"):
        return None
    sizes = [size for size in known_dims(kind) if size is not None]
    return math.prod(sizes) if len(sizes) == len(kind.tensor_type.shape.dim) else None


def settled(versions: Sequence[object]) -> Value | None:
    """A value from its versions: one array if they are equal, None if their shapes differ."""
    if not all(isinstance(v, (np.ndarray, np.generic)) for v in versions):
        return None  # a sequence
    arrays = [np.asarray(version) for version in versions]
    if any((a.shape, a.dtype) != (arrays[0].shape, arrays[0].dtype) for a in arrays):
        return None
    alike = all(np.array_equal(a, arrays[0]) for a in arrays)
    return tuple(arrays[:1] if alike else arrays)


def common(kinds: Sequence[onnx.TypeProto | None]) -> onnx.TypeProto | None:
    """The type with the sizes that all these types share; None if they share nothing."""
    first = kinds[0]
    if first is None or any(k is None or k.WhichOneof("value") != "tensor_type" for k in kinds):
        return None
    found = onnx.TypeProto()
    found.CopyFrom(first)
    for kind in kinds[1:]:
        assert kind is not None
        if kind.tensor_type.elem_type != found.tensor_type.elem_type:
            return None
        ours, theirs = found.tensor_type.shape.dim, kind.tensor_type.shape.dim
        ranked = found.tensor_type.HasField("shape") and kind.tensor_type.HasField("shape")
        if not ranked or len(ours) != len(theirs):
            found.tensor_type.ClearField("shape")
        else:
            for one, other in zip(ours, theirs, strict=True):
                if not other.HasField("dim_value") or one != other:
                    one.Clear()
    return found


def common_carried(several: Sequence[Carried]) -> Carried:
    """The type and the value that all of these have in common."""
    values = [value for _, value in several]
    same = all(same_value(value, values[0]) for value in values)
    return common([kind for kind, _ in several]), values[0] if same else None


def same_value(one: Value | None, other: Value | None) -> bool:
    """True if both are unknown, or equal in all versions."""
    if one is None or other is None:
        return one is other
    return len(one) == len(other) and all(map(np.array_equal, one, other))
