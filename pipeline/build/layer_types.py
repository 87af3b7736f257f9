"""Sets the types of the layers in a weakly typed network (TensorRT 8.6, 10) as in its graph.

With the FP16 or BF16 flag alone, TensorRT ignores the graph's Casts and chooses a type for each
layer by speed, also for coordinates and normalisations. So each layer gets its type in the graph
(`pipeline/rewrite/half.py` writes it), and the builder must obey.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Layer:
    """One layer for `types_of`.

    Args:
        kind: TensorRT's layer type.
        inputs, outputs: The names of its floating-point tensors.
        own: The type of a constant or a Cast: True for half. None for other layers.
    """

    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    own: bool | None = None


def types_of(layers: Sequence[Layer], half_inputs: frozenset[str]) -> list[bool | None]:
    """Returns the type of every layer's outputs: True for half, None without float outputs.

    Args:
        layers: The layers in topological order.
        half_inputs: The names of the network's half inputs.
    """
    half = set(half_inputs)
    types: list[bool | None] = []
    for layer in layers:
        own = layer.own
        if own is None and layer.outputs:
            own = bool(layer.inputs) and half.issuperset(layer.inputs)
        types.append(own if layer.outputs else None)
        if own:
            half.update(layer.outputs)
    return types


def layers_of(trt: Any, network: Any, half_type: Any = None) -> list[Layer]:
    """Returns the network's layers for `types_of`.

    Args:
        trt: The target's TensorRT.
        network: Its network.
        half_type: TensorRT's type of half precision; ``trt.float16`` by default.
    """
    half_type = trt.float16 if half_type is None else half_type
    floats = {trt.float32, half_type}
    layers = []
    for number in range(network.num_layers):
        layer = network.get_layer(number)
        kind = layer.type.name
        ins = [layer.get_input(n) for n in range(layer.num_inputs)]
        outs = [layer.get_output(n) for n in range(layer.num_outputs)]
        outs = [t for t in outs if t is not None and t.dtype in floats]
        own = None
        if outs and kind == "CONSTANT":
            layer.__class__ = trt.IConstantLayer  # the bindings return the base class
            own = _are_half(trt, layer.weights, half_type)
        elif outs and kind == "CAST":
            layer.__class__ = getattr(trt, "ICastLayer", trt.ILayer)
            own = getattr(layer, "to_type", outs[0].dtype) == half_type
        layers.append(
            Layer(
                kind,
                tuple(t.name for t in ins if t is not None and t.dtype in floats),
                tuple(t.name for t in outs),
                own,
            )
        )
    return layers


def _are_half(trt: Any, weights: Any, half_type: Any) -> bool:
    """Whether a constant's weights are of this type. numpy has no bfloat16, so TensorRT returns
    its own object for these."""
    if half_type == trt.float16:
        return bool(np.asarray(weights).dtype == np.float16)
    return bool(getattr(weights, "dtype", None) == half_type)


def apply(trt: Any, config: Any, network: Any, precision: str) -> Counter[str]:
    """Allows half precision and sets the type of every layer, in a weakly typed network only.

    Half layers get an output type, but no precision. With a precision, TensorRT 8.6.0 finds no
    implementation for some regions ("[verify_output_type] Mismatched type for tensor ..., f32 vs.
    expected type:f16"; docs/results/h200.md).

    Args:
        trt: The target's TensorRT.
        config: The builder's configuration.
        network: The parsed network.
        precision: ``fp16`` or ``bf16``.

    Returns:
        The number of layers of each type.
    """
    half_type = trt.float16 if precision == "fp16" else trt.bfloat16
    config.set_flag(trt.BuilderFlag.FP16 if precision == "fp16" else trt.BuilderFlag.BF16)
    config.set_flag(trt.BuilderFlag.OBEY_PRECISION_CONSTRAINTS)
    inputs = [network.get_input(n) for n in range(network.num_inputs)]
    layers = layers_of(trt, network, half_type)
    types = types_of(layers, frozenset(t.name for t in inputs if t.dtype == half_type))
    done: Counter[str] = Counter()
    for number, (half, seen) in enumerate(zip(types, layers, strict=True)):
        if half is None:
            continue
        done["half" if half else "float32"] += 1
        layer, kind = network.get_layer(number), half_type if half else trt.float32
        if not half or seen.own is not None:
            layer.precision = kind
        for place in range(layer.num_outputs):
            tensor = layer.get_output(place)
            if tensor is not None and tensor.dtype in (trt.float32, half_type):
                layer.set_output_type(place, kind)
    return done
