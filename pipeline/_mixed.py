"""Which layers of a weakly typed network compute in half precision: what torch.autocast does.

With the FP16 flag alone TensorRT 8.6 and 10 choose per layer by speed, coordinates and
normalisations included: a pixel coordinate of 200 in half precision is off by up to 1/16 px,
and a variance overflows (its own warning: "Detected layernorm nodes in FP16"). So the layers that
have to be float32 are told so, and the builder to obey; for the others it is free to choose.
Telling those to compute in half fails: 8.6.0 then has "No supported formats" for a subtraction
from a constant, and for a matrix product with a float32 result.

* Convolutions and matrix products may compute in half precision; but a matrix product whose result
  has to be float32 computes in float32.
* Layers that only move or gate values (`_FOLLOW`) may be in half where all their inputs may.
* Everything else is float32: sums, means, exponentials, divisions, softmax, sampling.
* What meets a constant that half precision does not hold is float32: -3.4e38 would be -inf.
* What a sampling grid or the scale of a resize is made of stays float32 back to the matrix
  products that it comes from (`_steer`), and so does what is sampled.

Source of the lists: torch/csrc/autocast (https://pytorch.org/docs/stable/amp.html,
"CUDA Op-Specific Behavior").
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

_HALF = frozenset({"CONVOLUTION", "DECONVOLUTION", "MATRIX_MULTIPLY", "FULLY_CONNECTED"})
# those of them that give float32 from half
_CONVERTS = frozenset({"CONVOLUTION", "DECONVOLUTION"})
_FOLLOW = frozenset(
    {
        "ACTIVATION", "POOLING", "CONCATENATION", "SLICE", "SHUFFLE", "SELECT", "RESIZE", "GATHER",
        "PADDING", "IDENTITY", "PARAMETRIC_RELU", "SCALE",
        "ELEMENTWISE.SUM", "ELEMENTWISE.PROD", "ELEMENTWISE.SUB", "ELEMENTWISE.MAX",
        "ELEMENTWISE.MIN", "UNARY.NEG", "UNARY.ABS",
    }
)  # fmt: skip
# ACTIVATION kinds that hold an exponential without a bound
_WIDE = frozenset({"ACTIVATION.SOFTPLUS", "ACTIVATION.ELU", "ACTIVATION.SELU"})
# layers that only move values: of a constant they leave a constant
_MOVE = frozenset({"SHUFFLE", "SLICE", "IDENTITY", "CAST", "CONCATENATION"})
# layers whose inputs and all that these are made of stay float32
_STEER = frozenset({"GRID_SAMPLE"})


@dataclass(frozen=True)
class Layer:
    """One layer as the plan sees it.

    Args:
        kind: TensorRT's layer type, with its operation where that decides
            (``ELEMENTWISE.SUM``).
        inputs, outputs: names of its floating-point tensors.
        wide: a constant with a value that half precision does not hold, such as a mask's -3.4e38.
    """

    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    wide: bool = False

    def is_a(self, kinds: frozenset[str]) -> bool:
        return self.kind in kinds or self.kind.partition(".")[0] in kinds


@dataclass(frozen=True)
class Types:
    """What one layer computes in, and what its outputs are stored as; True is half."""

    compute: bool
    store: bool


def plan(layers: Sequence[Layer], fixed: frozenset[str] = frozenset()) -> list[Types | None]:
    """The types of every layer; None for one that is told nothing: it has no floating-point output,
    or is a constant (moved perhaps) that a layer reads which may compute in half precision.

    A constant that only float32 layers read is float32: 8.6.0 otherwise builds the region that it
    lies in with half-precision ends alone, and fails in it ("Mismatched type for tensor ... f16 vs.
    expected type:f32", "Could not find any implementation").

    Args:
        layers: in an order in which every tensor is made before it is used.
        fixed: tensors that stay float32: the network's inputs and outputs.
    """
    steered = _steer(layers) | fixed
    users: dict[str, list[int]] = {}
    for number, layer in enumerate(layers):
        for name in layer.inputs:
            users.setdefault(name, []).append(number)
    half: dict[str, bool] = {}  # constants are in neither: they take the type of their layer
    constants: set[str] = set()
    wide: set[str] = set()
    types: list[Types | None] = []
    for layer in layers:
        moved = layer.kind in _MOVE and bool(layer.inputs) and constants.issuperset(layer.inputs)
        if not layer.outputs or layer.kind == "CONSTANT" or moved:
            constants.update(layer.outputs)
            if layer.wide or not wide.isdisjoint(layer.inputs):
                wide.update(layer.outputs)
            types.append(None)
            continue
        own = [half.get(name, False) for name in layer.inputs if name not in constants]
        follows = layer.is_a(_FOLLOW) and not layer.is_a(_WIDE) and wide.isdisjoint(layer.inputs)
        compute = layer.is_a(_HALF) or (follows and bool(own) and all(own))
        kept = any(name in steered for name in layer.outputs)
        if kept and not layer.is_a(_CONVERTS):
            compute = False
        # what is read by matrix products is stored as these read it, unless it was float32 and
        # something besides layers that follow their inputs reads it too
        store = compute or (
            _read_as_half(layers, [n for name in layer.outputs for n in users.get(name, ())])
            and (follows or layer.is_a(frozenset({"CAST"})))
        )
        store = store and not kept
        types.append(Types(compute, store))
        half.update(dict.fromkeys(layer.outputs, store))
    for number in reversed(range(len(layers))):
        outputs = layers[number].outputs
        reads = [types[n] for name in outputs for n in users.get(name, ())]
        if types[number] is None and reads and all(own and not own.compute for own in reads):
            types[number] = Types(False, False)
    return types


def _read_as_half(layers: Sequence[Layer], users: Sequence[int]) -> bool:
    """True if a matrix product reads it and all others only follow their inputs."""
    kinds = [layers[n] for n in users]
    return any(layer.is_a(_HALF) for layer in kinds) and all(
        layer.is_a(_HALF) or (layer.is_a(_FOLLOW) and not layer.is_a(_WIDE)) for layer in kinds
    )


def _steer(layers: Sequence[Layer]) -> frozenset[str]:
    """The tensors that the inputs of a steering layer are made of, up to matrix products."""
    found: set[str] = set()
    for layer in reversed(layers):
        made = any(name in found for name in layer.outputs)
        if layer.is_a(_STEER) or (made and not layer.is_a(_HALF)):
            found.update(layer.inputs)
    return frozenset(found)


def layers_of(trt: Any, network: Any) -> list[Layer]:
    """The network's layers as `plan` wants them."""
    floats = {trt.float32, trt.float16}
    layers = []
    for number in range(network.num_layers):
        layer = network.get_layer(number)
        kind = layer.type.name
        if kind in _OPERATIONS:
            name, attribute = _OPERATIONS[kind]
            layer.__class__ = getattr(trt, name)  # the bindings give the base class
            kind = f"{kind}.{getattr(layer, attribute).name}"
        ins = [layer.get_input(n) for n in range(layer.num_inputs)]
        if kind == "ELEMENTWISE.PROD" and ins[0].name == ins[1].name:
            kind = "ELEMENTWISE.SQUARE"  # overflows in half from 256 on
        outs = [layer.get_output(n) for n in range(layer.num_outputs)]
        layers.append(
            Layer(
                kind,
                tuple(t.name for t in ins if t is not None and t.dtype in floats),
                tuple(t.name for t in outs if t is not None and t.dtype in floats),
                kind == "CONSTANT" and outs[0].dtype in floats and _is_wide(trt, layer),
            )
        )
    return layers


def _is_wide(trt: Any, layer: Any) -> bool:
    layer.__class__ = trt.IConstantLayer
    weights = np.asarray(layer.weights)
    return bool(weights.size and np.abs(weights).max() > np.finfo(np.float16).max)


_OPERATIONS: Mapping[str, tuple[str, str]] = {
    "ELEMENTWISE": ("IElementWiseLayer", "op"),
    "UNARY": ("IUnaryLayer", "op"),
    "ACTIVATION": ("IActivationLayer", "type"),
}


def apply(trt: Any, config: Any, network: Any) -> Counter[str]:
    """Allows half precision, and tells the layers that have to be float32 so; returns how many
    those are, and the others. Only for a network that is weakly typed.
    """
    config.set_flag(trt.BuilderFlag.FP16)
    config.set_flag(trt.BuilderFlag.OBEY_PRECISION_CONSTRAINTS)
    ends = [network.get_input(n) for n in range(network.num_inputs)]
    ends += [network.get_output(n) for n in range(network.num_outputs)]
    types = plan(layers_of(trt, network), frozenset(tensor.name for tensor in ends))
    done: Counter[str] = Counter()
    for number, own in enumerate(types):
        if own is None:
            continue
        layer = network.get_layer(number)
        done["free" if own.compute else "float32"] += 1
        if not own.compute:
            layer.precision = trt.float32
        if own.store:
            continue
        for place in range(layer.num_outputs):
            tensor = layer.get_output(place)
            if tensor is not None and tensor.dtype in (trt.float32, trt.float16):
                layer.set_output_type(place, trt.float32)
    return done
