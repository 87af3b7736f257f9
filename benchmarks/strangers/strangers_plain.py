"""The least that a user would do: torch.onnx.export and TensorRT-RTX's builder, with no check."""

from __future__ import annotations

import tempfile
from pathlib import Path

import tensorrt_rtx as trt
import torch
from strangers_set import Stranger
from strangers_truth import image


def export_and_build(stranger: Stranger, module: torch.nn.Module) -> int:
    """Exports and builds a model over the asked ranges. Returns the size of the plan in bytes."""
    middle = (stranger.low + stranger.high) // 2
    low, opt, high = (
        (batch, stranger.channels, side, side)
        for batch, side in (
            (1, stranger.low),
            (max(stranger.batch // 2, 1), middle),
            (stranger.batch, stranger.high),
        )
    )
    auto = torch.export.Dim.AUTO
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        path = Path(folder) / "plain.onnx"
        example = image(stranger, (2, middle + 1, middle + 3), seed=0)
        torch.onnx.export(
            module.eval(), (example,), str(path), dynamo=True, verbose=False, opset_version=18,
            dynamic_shapes=({0: auto, 2: auto, 3: auto},), external_data=False,
        )  # fmt: skip
        logger = trt.Logger(trt.Logger.ERROR)
        builder = trt.Builder(logger)
        network = builder.create_network(0)
        parser = trt.OnnxParser(network, logger)
        if not parser.parse_from_file(str(path)):
            raise RuntimeError(f"TensorRT does not parse it: {parser.get_error(0).desc()}")
        profile = builder.create_optimization_profile()
        profile.set_shape(network.get_input(0).name, low, opt, high)
        config = builder.create_builder_config()
        config.add_optimization_profile(profile)
        plan = builder.build_serialized_network(network, config)
        if plan is None:
            raise RuntimeError("TensorRT does not build it")
        return len(bytes(plan))
