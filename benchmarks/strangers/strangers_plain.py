"""The least that a user would do: torch.onnx.export and TensorRT-RTX's builder, with no check."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tensorrt_rtx as trt
import torch
from strangers_set import Stranger
from strangers_truth import feed, leaves, passed


def _named(inputs: Sequence[str]) -> list[tuple[str, str]]:
    return [(text.split(":")[0].split("[")[0], text.split(":")[1]) for text in inputs]


def _free(text: str, value: Any) -> Any:
    """torch.export's dynamic shapes of an argument, from its text such as ``{b}x3x{h}``."""
    parts = re.findall(r"\{[^}]*\}|\d+", text)
    axes = {n: torch.export.Dim.AUTO for n, part in enumerate(parts) if part.startswith("{")}
    # torch sees a cache of transformers as the keys of each layer and the values of each layer
    return [[axes] * len(value)] * 2 if isinstance(value, list) else axes


def export_and_build(stranger: Stranger, module: torch.nn.Module) -> int:
    """Exports and builds a model over the asked ranges. Returns the size of the plan in bytes."""
    ends = {name: (low, (low + high) // 2, high) for name, low, high in stranger.dims}
    sizes = [{name: ends[name][n] for name in ends} for n in range(3)]
    middle = {name: opt + n for n, (name, (_, opt, _)) in enumerate(ends.items())}
    example = feed(stranger, {**middle, **({"b": 2} if "b" in ends else {})})
    if any(isinstance(value, list) for value in example.values()):
        from transformers.integrations import executorch  # the step that transformers documents

        executorch.register_dynamic_cache_export_support()
    shapes = {name: _free(text, example[name]) for name, text in _named(stranger.inputs)}
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        path = Path(folder) / "plain.onnx"
        torch.onnx.export(
            module.eval(), (), str(path), kwargs={n: passed(v) for n, v in example.items()},
            dynamo=True, verbose=False, opset_version=18, external_data=False,
            dynamic_shapes=shapes,
        )  # fmt: skip
        logger = trt.Logger(trt.Logger.ERROR)
        builder = trt.Builder(logger)
        network = builder.create_network(0)
        parser = trt.OnnxParser(network, logger)
        if not parser.parse_from_file(str(path)):
            raise RuntimeError(f"TensorRT does not parse it: {parser.get_error(0).desc()}")
        profile = builder.create_optimization_profile()
        places = [[tuple(t.shape) for t in leaves(feed(stranger, s))] for s in sizes]
        for number, place in enumerate(zip(*places, strict=True)):
            profile.set_shape(network.get_input(number).name, *place)
        config = builder.create_builder_config()
        config.add_optimization_profile(profile)
        plan = builder.build_serialized_network(network, config)
        if plan is None:
            raise RuntimeError("TensorRT does not build it")
        return len(bytes(plan))
