"""The torch module that the models of an artifact are compared with."""

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
    """Returns the module that the ONNX file must equal, with its padding. Makes it if not given."""
    from pipeline.export.export import reference
    from pipeline.export.module import built

    if module is None:
        spec, module = built(spec, weights)
    interface = manifest.interface  # its dims, rules and padding may have been refined
    declared = replace(
        spec,
        inputs=interface.inputs,
        outputs=tuple(Output(o.name) for o in interface.outputs),
        rules=interface.rules,
        padding=interface.padding,
    )
    return reference(declared, module, interface.output_shapes)


def rebuilt(manifest: Manifest, spec: ModelSpec | None, weights: Path | None) -> torch.nn.Module:
    """Makes the torch reference of an artifact again.

    Raises:
        InputError: The source has no torch model, or the spec or the weights are missing or differ.
    """
    info = manifest.model
    if spec is None and info.source.startswith("spec:"):
        raise InputError(
            f"this artifact was made from a spec object, {info.source}. Pass the same spec in "
            "Python: pipeline.convert.driver.run_verify(place, Verify(torch_model=True, spec=spec))"
        )
    stated = info.weights.file
    if stated is not None and weights is None and not holds_weights(info.source):
        raise InputError(
            f"this artifact was made with the weights {stated}. Pass that file with --weights"
        )
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
        raise InputError(
            f"{info.source} is an ONNX file and has no torch model. Run verify without --torch"
        )
    if weights_info(config, spec) != info.weights:
        raise InputError(
            f"weights {weights}: the artifact was made with other weights. Pass the same file"
        )
    return reference_module(spec, manifest, weights)
