"""Which nodes of a float32 graph compute in half precision: what torch.autocast does, and what it
leaves to the author of the model.

Half precision everywhere goes wrong silently: a pixel coordinate of 200 is off by up to 1/16 px, a
rotary angle of 100 by 1/32, a variance overflows. So, of the standard ops:

* Convolutions and matrix products compute in half precision.
* Ops that only move or gate values (`_FOLLOW`) do where all their inputs are in half already.
* Everything else is float32: sums, means, exponentials, divisions, softmax, sampling.
* What meets a constant that half precision does not hold is float32: -3.4e38 would be -inf, 1e-7 0.
* What becomes a sampling grid, an integer, an angle or the scale of a resize stays float32
  (`_STEER`), and so does what is sampled: back to the convolutions that it comes from, of which the
  results are taken as float32, and through the matrix products, which compute in float32 then.

Source of the lists: torch/csrc/autocast (https://pytorch.org/docs/stable/amp.html,
"CUDA Op-Specific Behavior").
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx

_STANDARD = ("", "ai.onnx")
_HALF = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})
# those of them that may compute in half where the result has to be float32
_CONVERTS = frozenset({"Conv", "ConvTranspose"})
_FOLLOW = frozenset(
    {
        "Abs", "Add", "AveragePool", "Clip", "Concat", "DepthToSpace", "Expand", "Flatten",
        "Gather", "GatherElements", "GatherND", "GlobalMaxPool", "HardSigmoid",
        "HardSwish", "Identity", "LeakyRelu", "Max", "MaxPool", "Min", "Mul", "Neg", "PRelu", "Pad",
        "Relu", "Reshape", "Resize", "Sigmoid", "Slice", "SpaceToDepth", "Split", "Squeeze", "Sub",
        "Tanh", "Tile", "Transpose", "Unsqueeze", "Where",
    }
)  # fmt: skip
# ops that only move values: of a constant they leave a constant
_MOVE = frozenset(
    {
        "Cast", "Concat", "Expand", "Flatten", "Identity", "Reshape", "Slice", "Split", "Squeeze",
        "Tile", "Transpose", "Unsqueeze",
    }
)  # fmt: skip
# ops whose inputs, and all that these are made of, stay float32
_STEER = frozenset({"Ceil", "Cos", "Floor", "GridSample", "Mod", "Round", "Sin", "Tan"})
# inputs that are float32 whatever the op computes in, by op
_FIXED: Mapping[str, frozenset[int]] = {"Resize": frozenset({1, 2})}
_INTEGERS = frozenset(
    {
        onnx.TensorProto.INT8, onnx.TensorProto.INT16, onnx.TensorProto.INT32,
        onnx.TensorProto.INT64, onnx.TensorProto.UINT8, onnx.TensorProto.UINT16,
        onnx.TensorProto.UINT32, onnx.TensorProto.UINT64,
    }
)  # fmt: skip
_LARGEST = float(np.finfo(np.float16).max)
_SMALLEST = float(np.finfo(np.float16).tiny)  # below it half precision loses digits, then all


@dataclass(frozen=True)
class Plan:
    """What `plan` says.

    Args:
        half: the nodes, by their places, that compute in half precision.
        slots: of those the inputs, by their places in the node, that are read in half.
    """

    half: frozenset[int]
    slots: Mapping[int, tuple[int, ...]]


@dataclass(frozen=True)
class _Node:
    """A node as the rules see it: the float32 tensors that it reads and makes."""

    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    slots: tuple[int, ...]
    steers: bool


def plan(
    nodes: Sequence[onnx.NodeProto],
    dtypes: Mapping[str, int],
    constants: Mapping[str, Callable[[], np.ndarray]],
) -> Plan:
    """The nodes of a graph that compute in half precision.

    Args:
        nodes: in an order in which every tensor is made before it is used.
        dtypes: of the tensors, as far as known (`onnx.TensorProto.DataType`); those unknown stay
            as they are.
        constants: the float32 initializers and Constant nodes' outputs.
    """
    seen = [_view(node, dtypes) for node in nodes]
    steered = _steer(seen)
    users: dict[str, list[_Node]] = {}
    for node in seen:
        for name in node.inputs:
            users.setdefault(name, []).append(node)
    values = _Values(constants)
    half: set[str] = set()  # tensors that are there in half precision
    found: set[int] = set()
    for place, node in enumerate(seen):
        if not node.outputs or values.follow(node):
            continue
        own = [name in half for name in node.inputs if name not in values.made]
        follows = node.op in _FOLLOW and not _squares(node)
        fits = all(values.fits(name, node.op in _HALF) for name in node.inputs)
        computes = (
            fits
            and bool(node.inputs)
            and (node.op in _HALF or (follows and bool(own) and all(own)))
        )
        if not steered.isdisjoint(node.outputs) and node.op not in _CONVERTS:
            computes = False
        if computes:
            found.add(place)
        # what matrix products read is there in half for all who follow them, too
        if computes or node.op == "Softmax" or (follows and fits and _read_in_half(node, users)):
            half.update(name for name in node.outputs if name not in steered)
    return Plan(frozenset(found), {place: seen[place].slots for place in found})


class _Values:
    """What is known of constants, and of what is made of them by moving alone."""

    def __init__(self, constants: Mapping[str, Callable[[], np.ndarray]]) -> None:
        self._read = constants
        self.made = set(constants)
        self._sources: dict[str, tuple[str, ...]] = {name: (name,) for name in constants}
        self._bounds: dict[str, tuple[float, float]] = {}

    def follow(self, node: _Node) -> bool:
        """True for a node that makes a constant; its outputs count as constants from now on."""
        if all(name in self.made for name in node.outputs):
            return True
        if node.op not in _MOVE or not node.inputs or not self.made.issuperset(node.inputs):
            return False
        sources = tuple(s for name in node.inputs for s in self._sources[name])
        for name in node.outputs:
            self.made.add(name)
            self._sources[name] = sources
        return True

    def fits(self, name: str, weight: bool) -> bool:
        """True if half precision holds it: weights may lose digits of small values, as they do
        under autocast."""
        for source in self._sources.get(name, ()):
            low, high = self._bound(source)
            if high > _LARGEST or (not weight and low < _SMALLEST):
                return False
        return True

    def _bound(self, name: str) -> tuple[float, float]:
        """The smallest magnitude that is not 0, and the largest."""
        if name not in self._bounds:
            magnitudes = np.abs(self._read[name]())
            some = magnitudes[magnitudes > 0]
            low = float(some.min()) if some.size else np.inf
            self._bounds[name] = (low, float(magnitudes.max()) if magnitudes.size else 0.0)
        return self._bounds[name]


def _view(node: onnx.NodeProto, dtypes: Mapping[str, int]) -> _Node:
    def is_float(name: str) -> bool:
        return dtypes.get(name) == onnx.TensorProto.FLOAT

    op = node.op_type if node.domain in _STANDARD else f"{node.domain}.{node.op_type}"
    fixed = _FIXED.get(op, frozenset())
    slots = tuple(n for n, name in enumerate(node.input) if is_float(name) and n not in fixed)
    outputs = tuple(name for name in node.output if is_float(name))
    if op in _HALF | _FOLLOW and any(name and name not in dtypes for name in node.output):
        op = f"{op} of unknown type"
    to_integer = op == "Cast" and dtypes.get(node.output[0]) in _INTEGERS
    steers = op in _STEER or to_integer
    return _Node(op, tuple(node.input[n] for n in slots), outputs, slots, steers)


def _squares(node: _Node) -> bool:
    """x * x overflows from 256 on."""
    return node.op == "Mul" and len(set(node.inputs)) == 1


def _read_in_half(node: _Node, users: Mapping[str, Sequence[_Node]]) -> bool:
    """True if a matrix product reads it, and all others only follow their inputs."""
    readers = [user for name in node.outputs for user in users.get(name, ())]
    return any(user.op in _HALF for user in readers) and all(
        user.op in _HALF or (user.op in _FOLLOW and not _squares(user)) for user in readers
    )


def _steer(nodes: Sequence[_Node]) -> frozenset[str]:
    """The tensors that the inputs of a steering op are made of, up to matrix products."""
    found: set[str] = set()
    for node in reversed(nodes):
        made = not found.isdisjoint(node.outputs)
        if node.steers or (made and node.op not in _HALF):
            found.update(node.inputs)
    return frozenset(found)
