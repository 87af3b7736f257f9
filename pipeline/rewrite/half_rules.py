"""Decides which nodes of a float32 graph compute in half precision: torch.autocast's rules, and the
cases that autocast leaves to the author of the model.

Half precision everywhere is silently wrong. A pixel coordinate of 200 has an error of up to 1/16
px, and a rotary angle of 100 an error of 1/32. A variance overflows. So, for the standard ops:

* Convolutions and matrix products compute in half precision.
* Ops that only move or gate values (`_FOLLOW`) compute in half if all their inputs are half.
  Constant numbers and the biases of products become half too. A larger constant makes the result
  float32, as a float32 parameter does under autocast. Example: the grid that a detector adds.
* A Softmax computes in half if its input is half and only half products read its result. This is
  attention, and TensorRT fuses it only as a whole. Inside, its kernels sum in float32.
* All other ops compute in float32: sums, means, exponentials, divisions, softmax, sampling.
* An op with a constant that half precision cannot hold computes in float32: -3.4e38 would become
  -inf, and in float16 1e-7 would become 0. A tensor fits if its largest magnitude does.
  `half_masks` makes the masks of attention fit before.
* Values that become a sampling grid, an integer, an angle or the scale of a resize stay float32
  (`_STEER`). So do sampled values, and values that custom ops and the bodies of If, Loop and Scan
  read. This rule goes back to convolutions, whose results are cast to float32, and to matrix
  products with weights, which compute in float32. It continues through products without weights.

The rules are the same for float16 and bfloat16. What fits differs, and bfloat16 lacks some ops.

Source of the lists: torch/csrc/autocast (https://pytorch.org/docs/stable/amp.html,
"CUDA Op-Specific Behavior").
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx

from pipeline.graph.files import inner_nodes
from pipeline.spec.precision import HALVES, NarrowType

STANDARD = ("", "ai.onnx")
PRODUCTS = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})
# ops of `PRODUCTS` that may compute in half if their result must be float32
CONVERTS = frozenset({"Conv", "ConvTranspose"})
_FOLLOW = frozenset(
    {
        "Abs", "Add", "AveragePool", "Clip", "Concat", "DepthToSpace", "Expand", "Flatten",
        "Gather", "GatherElements", "GatherND", "GlobalMaxPool", "HardSigmoid",
        "HardSwish", "Identity", "LeakyRelu", "Max", "MaxPool", "Min", "Mul", "Neg", "PRelu", "Pad",
        "Relu", "Reshape", "Resize", "Sigmoid", "Slice", "SpaceToDepth", "Split", "Squeeze", "Sub",
        "Tanh", "Tile", "Transpose", "Unsqueeze", "Where",
    }
)  # fmt: skip
# ops of `_FOLLOW` that compute with all their inputs in the same way
_ARITHMETIC = frozenset({"Add", "Max", "Min", "Mul", "Sub"})
# ops that only move or choose values: constants in, constants out
MOVE = frozenset(
    {
        "Cast", "Concat", "Expand", "Flatten", "Identity", "Reshape", "Slice", "Split", "Squeeze",
        "Tile", "Transpose", "Unsqueeze", "Where",
    }
)  # fmt: skip
# ops whose inputs, and all tensors that these are computed from, stay float32
_STEER = frozenset(
    {
        "Ceil", "Cos", "DeformConv", "Floor", "GridSample", "MaxRoiPool", "Mod",
        "NonMaxSuppression", "RoiAlign", "Round", "Sin", "Tan",
    }
)  # fmt: skip
# ops that TensorRT-RTX 1.7 does not take in bfloat16, and does in float16. ConvTranspose: "Myelin
# ([type.cpp:186: infer_type] Could not infer output types"; the others: the parser's check of types
_NOT_IN_BFLOAT16 = frozenset(
    {
        "ConvTranspose", "GlobalLpPool", "HardSwish", "LpNormalization", "LpPool", "Mish", "Shrink",
    }
)  # fmt: skip
# inputs that always stay float32, by op
_FIXED: Mapping[str, frozenset[int]] = {"Resize": frozenset({1, 2})}
_INTEGERS = frozenset(
    {
        onnx.TensorProto.INT8, onnx.TensorProto.INT16, onnx.TensorProto.INT32,
        onnx.TensorProto.INT64, onnx.TensorProto.UINT8, onnx.TensorProto.UINT16,
        onnx.TensorProto.UINT32, onnx.TensorProto.UINT64,
    }
)  # fmt: skip
_BIAS = 1 / 16  # times 1 / eps: above this, a bias has an error of more than 1/32


@dataclass(frozen=True)
class HalfPlan:
    """The result of `plan`.

    Args:
        half: indices of the nodes that compute in half precision.
        slots: by such a node's index, the indices of its inputs that are read in half.
    """

    half: frozenset[int]
    slots: Mapping[int, tuple[int, ...]]


@dataclass(frozen=True)
class Node:
    """A node for the rules: only the float32 tensors that it reads and makes.

    Args:
        op: The op, with its domain if this is not ONNX's own.
        inputs, outputs: The names of the tensors.
        slots: The indices of the inputs.
        steers: The inputs that stay float32, with all tensors that they are computed from.
        fits: Whether half precision can hold the numbers in the attributes.
    """

    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    slots: tuple[int, ...]
    steers: frozenset[str]
    fits: bool


def plan(
    nodes: Sequence[onnx.NodeProto],
    dtypes: Mapping[str, int],
    constants: Mapping[str, Callable[[], np.ndarray]],
    kind: NarrowType = HALVES["fp16"],
) -> HalfPlan:
    """The nodes of a graph that compute in half precision.

    Args:
        nodes: the nodes, in topological order.
        dtypes: known dtypes of the tensors (`onnx.TensorProto.DataType`). Tensors of unknown dtype
            do not change.
        constants: the float32 initializers and outputs of Constant nodes.
        kind: the type of half precision.
    """
    seen = [view(node, dtypes, kind) for node in nodes]
    steered = leading_to([node.steers for node in seen], seen, frozenset(constants))
    users: dict[str, list[Node]] = {}
    for node in seen:
        for name in node.inputs:
            users.setdefault(name, []).append(node)
    values = Constants(constants, kind)
    products = frozenset(
        name
        for node in seen
        if node.op in CONVERTS or (node.op in PRODUCTS and steered.isdisjoint(node.outputs))
        for name in node.outputs
    )
    fed = _feeding(seen, products)
    made_by = {name: node.op for node in seen if node.op in PRODUCTS for name in node.outputs}
    half: set[str] = set()  # tensors that exist in half precision
    found: set[int] = set()
    for place, node in enumerate(seen):
        if not node.outputs or values.follow(node):
            continue
        own = [name in half for name in node.inputs if name not in values.made]
        follows = node.op in _FOLLOW and not _squares(node)
        follows = follows and not values.promotes(node, made_by)
        fits = node.fits and all(map(values.fits, node.inputs))
        # the weights of attention
        handed = node.op == "Softmax" and not fed.isdisjoint(node.outputs)
        computes = (
            fits
            and bool(node.inputs)
            and (node.op in PRODUCTS or ((follows or handed) and bool(own) and all(own)))
        )
        if not steered.isdisjoint(node.outputs) and node.op not in CONVERTS:
            computes = False
        if computes:
            found.add(place)
        # a tensor that products read in half is also half for `_FOLLOW` ops
        read = follows and fits and _read_in_half(node, users, products)
        if computes or handed or read:
            half.update(name for name in node.outputs if name not in steered)
    return HalfPlan(frozenset(found), {place: seen[place].slots for place in found})


class Constants:
    """Constants, and tensors that ops of `MOVE` make from them."""

    def __init__(self, constants: Mapping[str, Callable[[], np.ndarray]], kind: NarrowType) -> None:
        self._read, self._kind = constants, kind
        self.made = set(constants)
        self._sources: dict[str, tuple[str, ...]] = {name: (name,) for name in constants}
        self._bounds: dict[str, float] = {}

    def follow(self, node: Node) -> bool:
        """True for a node that makes a constant. Its outputs then count as constants."""
        if all(name in self.made for name in node.outputs):
            return True
        if node.op not in MOVE or not node.inputs or not self.made.issuperset(node.inputs):
            return False
        sources = tuple(dict.fromkeys(s for name in node.inputs for s in self._sources[name]))
        for name in node.outputs:
            self.made.add(name)
            self._sources[name] = sources
        return True

    def fits(self, name: str) -> bool:
        """True if half precision can hold the tensor. Small values beside large ones may lose
        digits, as under autocast: the error is below 2**-24, and the others' is larger."""
        return all(_fits(high, self._kind) for high in self.magnitudes(name))

    def magnitudes(self, name: str) -> list[float]:
        """The largest magnitude of each constant that the tensor is made from. Empty for a tensor
        that is no constant."""
        return [self._largest(source) for source in self._sources.get(name, ())]

    def promotes(self, node: Node, products: Mapping[str, str]) -> bool:
        """True if the node computes with a constant of several elements that is not a bias.

        Args:
            products: the op of each product, by the name of its result.
        """
        if node.op not in _ARITHMETIC:
            return False
        made_by = next((products[name] for name in node.inputs if name in products), "")
        for name in node.inputs:
            sources = self._sources.get(name, ())
            if any(self._read[source]().size > 1 for source in sources) and not (
                node.op == "Add" and made_by and self._is_bias(name, made_by)
            ):
                return True
        return False

    def _is_bias(self, name: str, op: str) -> bool:
        """True for one number per channel, none of them large. A detector's positions are large."""
        if name not in self._read:
            return False
        shape = self._read[name]().shape
        axis = len(shape) - 1 if op in ("MatMul", "Gemm") else len(shape) - 3
        others = [size for n, size in enumerate(shape) if n != axis]
        largest = _BIAS / self._kind.eps
        return axis >= 0 and set(others) <= {1} and self._largest(name) <= largest

    def _largest(self, name: str) -> float:
        """The largest magnitude. Infinity does not count: half precision has it."""
        if name not in self._bounds:
            magnitudes = np.abs(self._read[name]())
            some = magnitudes[~np.isinf(magnitudes)]
            self._bounds[name] = float(some.max()) if some.size else 0.0
        return self._bounds[name]


def _fits(magnitude: float, kind: NarrowType) -> bool:
    return not magnitude or kind.smallest <= magnitude <= kind.largest


def view(node: onnx.NodeProto, dtypes: Mapping[str, int], kind: NarrowType) -> Node:
    """A node with the float32 tensors that it reads and makes."""

    def is_float(name: str) -> bool:
        return dtypes.get(name) == onnx.TensorProto.FLOAT

    op = node.op_type if node.domain in STANDARD else f"{node.domain}.{node.op_type}"
    fixed = _FIXED.get(op, frozenset())
    slots = tuple(n for n, name in enumerate(node.input) if is_float(name) and n not in fixed)
    outputs = tuple(name for name in node.output if is_float(name))
    if op in PRODUCTS | _FOLLOW and any(n and n not in dtypes for n in (*node.input, *node.output)):
        op = f"{op} of unknown type"
    if kind == HALVES["bf16"] and op in _NOT_IN_BFLOAT16:
        op = f"{op} in float32"
    inside = list(inner_nodes(node))
    steers = {name for n, name in enumerate(node.input) if n in fixed and is_float(name)}
    if _is_steering(node) or inside:
        read = (*node.input, *(name for each in inside for name in each.input))
        steers.update(name for name in read if is_float(name))
    numbers = [abs(a.f) for a in node.attribute if a.type == onnx.AttributeProto.FLOAT]
    fits = all(_fits(number, kind) for number in numbers)
    return Node(op, tuple(node.input[n] for n in slots), outputs, slots, frozenset(steers), fits)


def _is_steering(node: onnx.NodeProto) -> bool:
    if node.domain not in STANDARD:
        return True
    to = next((a.i for a in node.attribute if a.name == "to"), 0)
    return node.op_type in _STEER or (node.op_type == "Cast" and to in _INTEGERS)


def _squares(node: Node) -> bool:
    """True for x * x, which overflows from 256 on."""
    return node.op == "Mul" and len(set(node.inputs)) == 1


def _read_in_half(
    node: Node, users: Mapping[str, Sequence[Node]], products: frozenset[str]
) -> bool:
    """True if a half product reads the result, and all other readers only move or gate it. A sum
    stays float32, as under autocast."""
    readers = [user for name in node.outputs for user in users.get(name, ())]
    own = [not products.isdisjoint(user.outputs) for user in readers]
    return any(own) and all(
        in_half or (user.op in _FOLLOW and user.op not in _ARITHMETIC)
        for in_half, user in zip(own, readers, strict=True)
    )


def _feeding(nodes: Sequence[Node], products: frozenset[str]) -> frozenset[str]:
    """The tensors that half products read, directly or through `_FOLLOW` ops alone."""
    found: set[str] = set()
    other: set[str] = set()
    for node in reversed(nodes):
        good = not products.isdisjoint(node.outputs) or (
            node.op in _FOLLOW and bool(node.outputs) and found.issuperset(node.outputs)
        )
        if not node.outputs:  # Shape and IsNaN do not compute with the values
            continue
        (found if good else other).update(node.inputs)
        found.difference_update(other.intersection(node.inputs))
    return frozenset(found)


def leading_to(
    ends: Sequence[Collection[str]], nodes: Sequence[Node], constants: Collection[str]
) -> frozenset[str]:
    """The tensors from which other tensors are computed, back to products with weights.

    Args:
        ends: These tensors, among the inputs of each node.
        nodes: The nodes in the order of the graph.
        constants: The names of constants.
    """
    found: set[str] = set()
    for node, own in zip(reversed(nodes), reversed(ends), strict=True):
        found.update(own)
        weighs = node.op in PRODUCTS and (
            node.op != "MatMul" or any(name in constants for name in node.inputs)
        )
        if not weighs and not found.isdisjoint(node.outputs):
            found.update(node.inputs)
    return frozenset(found)
