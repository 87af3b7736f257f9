"""Inputs of the correlation lookup, and models with one node of it."""

from __future__ import annotations

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper

from pipeline.plugins.base import DOMAIN
from pipeline.plugins.correlation_lookup.function import LEVELS, NAME, function
from pipeline.plugins.correlation_lookup.torch_op import OnDemandCorrelation

INPUTS = ("features", *(f"level_{n}" for n in range(LEVELS)), "coordinates")
Tensors = tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]


def maps(batch: int, channels: int, height: int, width: int) -> list[torch.Tensor]:
    """Two feature maps and coordinates. Some are whole numbers, and some are outside of the map."""
    generator = torch.Generator().manual_seed(height)
    shape = (batch, channels, height, width)
    first, second = (torch.randn(shape, generator=generator) for _ in range(2))
    reach = torch.tensor([width + 14.0, height + 14.0]).view(1, 2, 1, 1)
    coordinates = torch.rand((batch, 2, height, width), generator=generator) * reach - 7
    coordinates[:, :, ::3] = coordinates[:, :, ::3].round()
    return [first, second, coordinates]


def arguments(batch: int, channels: int, height: int, width: int) -> Tensors:
    """The op's arguments, without the radius."""
    first, second, coordinates = maps(batch, channels, height, width)
    block = OnDemandCorrelation(4)
    block.build_pyramid(first, second)
    assert block._features is not None
    return block._features, block._levels, coordinates


def feed(inputs: Tensors) -> dict[str, np.ndarray]:
    features, levels, coordinates = inputs
    return dict(zip(INPUTS, (t.numpy() for t in (features, *levels, coordinates)), strict=True))


def one_node(
    radius: int, channels: int, *, half: bool = False, opset: int = 18, body: bool = True
) -> onnx.ModelProto:
    """A model of one CorrelationLookup with dynamic N, H and W."""
    kind = TensorProto.FLOAT16 if half else TensorProto.FLOAT
    inputs = [helper.make_tensor_value_info("features", kind, ["n", "h", "w", channels])]
    inputs += [
        helper.make_tensor_value_info(f"level_{n}", kind, ["n", f"h{n}", f"w{n}", channels])
        for n in range(LEVELS)
    ]
    inputs.append(
        helper.make_tensor_value_info("coordinates", TensorProto.FLOAT, ["n", 2, "h", "w"])
    )
    points = LEVELS * (2 * radius + 1) ** 2
    output = helper.make_tensor_value_info("windows", kind, ["n", points, "h", "w"])
    node = helper.make_node(NAME, INPUTS, ["windows"], "lookup", domain=DOMAIN, radius=radius)
    imports = [helper.make_opsetid("", opset), helper.make_opsetid(DOMAIN, 1)]
    functions = [function(opset)] if body else []
    graph = helper.make_graph([node], "lookup", inputs, [output])
    return helper.make_model(graph, opset_imports=imports, functions=functions, ir_version=10)
