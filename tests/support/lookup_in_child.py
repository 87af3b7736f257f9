"""The steps of the correlation lookup tests that run in a child process without torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from pipeline.machine.target import TARGETS, use
from pipeline.plugins.correlation_lookup import PLUGIN


def peak_of_run(model: bytes, inputs: dict[str, np.ndarray]) -> int:
    """The bytes that the run adds to the process's memory."""
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    session.run(None, inputs)
    return _status("VmHWM") - before


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


def build_with_plugin(model: bytes, shapes: dict[str, list[list[int]]]) -> dict[str, Any]:
    """The messages of parse and build, with the plugin registered."""
    trt = use(TARGETS["rtx-1.7"])
    PLUGIN.register(trt)
    PLUGIN.register(trt)
    builder = trt.Builder(trt.Logger(trt.Logger.INTERNAL_ERROR))
    network = builder.create_network(1)
    parser = trt.OnnxParser(network, trt.Logger(trt.Logger.INTERNAL_ERROR))
    if not parser.parse(model):
        return {"errors": [parser.get_error(n).desc() for n in range(parser.num_errors)]}
    config, profile = builder.create_builder_config(), builder.create_optimization_profile()
    for name, ranges in shapes.items():
        profile.set_shape(name, *ranges)
    assert config.add_optimization_profile(profile) == 0
    plan = builder.build_serialized_network(network, config)
    layers = [network.get_layer(n) for n in range(network.num_layers)]
    return {
        "plugins": sum(layer.type == trt.LayerType.PLUGIN_V3 for layer in layers),
        "output": tuple(network.get_output(0).shape),
        "half": network.get_output(0).dtype == trt.float16,
        "plan": None if plan is None else bytes(plan),
    }
