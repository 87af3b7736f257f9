"""The torch module that an artifact is held against."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.artifact.manifest import Manifest
from pipeline.convert.keys import weights_info
from pipeline.errors import InputError
from pipeline.source.find import find_source
from pipeline.spec.config import Config
from pipeline.spec.model import ModelSpec, holds_weights
from pipeline.spec.tensors import Output

if TYPE_CHECKING:
    import torch


def reference_module(
    spec: ModelSpec,
    manifest: Manifest,
    weights: Path | None,
    module: torch.nn.Module | None = None,
) -> torch.nn.Module:
    """What the ONNX has to equal: the module (made now unless given), padding round it."""
    from pipeline.export.export import reference
    from pipeline.export.module import built

    if module is None:
        spec, module = built(spec, weights)
    interface = manifest.interface  # its padding may have been refined, like the dims
    declared = replace(
        spec,
        inputs=interface.inputs,
        outputs=tuple(Output(o.name) for o in interface.outputs),
        padding=interface.padding,
    )
    return reference(declared, module, interface.output_shapes)


def rebuilt(manifest: Manifest, spec: ModelSpec | None, weights: Path | None) -> torch.nn.Module:
    """The torch reference of an artifact, made anew."""
    info = manifest.model
    if spec is None and info.source.startswith("spec:"):
        raise InputError(
            f"the model of this artifact, {info.source}, was handed over as an object: from "
            "Python, give pipeline.convert.driver.run_verify its spec"
        )
    stated = info.weights.file
    if stated is not None and weights is None and not holds_weights(info.source):
        raise InputError(f"this artifact was made with the weights {stated}: give --weights")
    config = Config(
        info.source,
        options=info.options,
        weights=weights,
        inputs=info.inputs,
        dims=info.dims,
        ranges=info.ranges,
    )
    spec = spec or find_source(config)
    if spec.onnx is not None:
        raise InputError(f"{info.source}: an ONNX file has no torch model to run")
    if weights_info(config, spec) != info.weights:
        raise InputError(f"weights {weights}: not those that the artifact was made with")
    return reference_module(spec, manifest, weights)
