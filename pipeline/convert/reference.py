"""What the models of an artifact are compared with: a torch module, or another ONNX file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.artifact.manifest import Manifest
from pipeline.artifact.values import filled
from pipeline.compare import run_names
from pipeline.compare.runners import TorchRunner
from pipeline.convert.keys import weights_info
from pipeline.convert.options import Verify
from pipeline.errors import InputError
from pipeline.graph.session import OnnxRunner
from pipeline.models import MODELS
from pipeline.source.find import find_source
from pipeline.source.hub import is_hub
from pipeline.spec.config import Config
from pipeline.spec.model import ModelSpec, holds_weights
from pipeline.spec.runner import Runner
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
        output_names=(),
        output_tolerances={},
        rules=interface.rules,
        padding=interface.padding,
    )
    return reference(declared, module, interface.output_shapes)


def reference_runner(
    spec: ModelSpec,
    manifest: Manifest,
    weights: Path | None,
    module: torch.nn.Module | None = None,
) -> Runner | None:
    """Returns what runs the reference; None for an ONNX file that is its own reference.

    Args:
        spec, manifest, weights, module: See `reference_module`.
    """
    if spec.reference is not None:
        return OnnxRunner(spec.reference, run_names.REFERENCE)
    if spec.onnx is not None:
        return None
    found = reference_module(spec, manifest, weights, module)
    names = [output.name for output in manifest.interface.outputs]
    return TorchRunner(found, names, first=bool(spec.state))


def needed_options(manifest: Manifest) -> list[str]:
    """The options with which `verify` makes the torch reference of an artifact."""
    info = manifest.model
    if info.source.startswith("spec:"):
        return ["--torch"]
    own = holds_weights(info.source) or is_hub(info.source)
    trust = [] if info.source in MODELS else ["--trust"]
    return ["--torch", *trust, *(["--weights FILE"] if info.weights.file and not own else [])]


def check_needed(manifest: Manifest, where: str, *, trust: bool, weights: Path | None) -> None:
    """Raises `InputError`, with all that is missing, unless `rebuilt` has what it needs.

    Args:
        manifest: The artifact's manifest.
        where: The artifact, for the beginning of errors.
        trust: Whether the source may run.
        weights: The weights, if any are given.
    """
    info, needed = manifest.model, needed_options(manifest)
    texts = []
    if "--trust" in needed and not trust:
        texts.append(
            f"--torch would run {info.source}, which the artifact's manifest names. If you trust "
            "it, add --trust (in Python: trust=True)"
        )
    if "--weights FILE" in needed and weights is None:
        texts.append(
            f"this artifact was made with the weights {info.weights.file}. Pass that file with "
            "--weights"
        )
    if texts:
        raise InputError(f"{where}: {'. Also, '.join(texts)}")


def rebuilt(manifest: Manifest, how: Verify, where: str) -> Runner | None:
    """Makes the torch reference of an artifact again.

    Args:
        manifest: The artifact's manifest. Somebody else may have written it, so the source that it
            names runs only if `how.trust` is set, or if it comes with pipeline.
        how: The spec, the weights, and whether the source may run.
        where: The artifact, for the beginning of errors.

    Raises:
        InputError: The source has no torch model, or may not run. Or the spec or the weights are
            missing or differ.
    """
    info, spec, weights = manifest.model, how.spec, how.weights
    if spec is None and info.source.startswith("spec:"):
        raise InputError(
            f"this artifact was made from a spec object, {info.source}. Pass the same spec in "
            "Python: pipeline.verify(path, torch_model=True, spec=spec). For a module, "
            "make it again: spec = pipeline.source.module.module_spec(module, inputs, dims)"
        )
    check_needed(manifest, where, trust=how.trust or spec is not None, weights=weights)
    config = Config(
        info.source,
        options=info.options,
        weights=weights,
        inputs=info.inputs,
        dims=info.dims,
        ranges=info.ranges,
        trust=how.trust,
    )
    spec = replace(spec or find_source(config), dtype=info.dtype)
    if spec.onnx is not None:
        raise InputError(
            f"{info.source} is an ONNX file and has no torch model. Run verify without --torch"
        )
    manifest = filled(manifest, Path(where))
    values = {i.name: i.values for i in manifest.interface.inputs}
    spec = replace(spec, inputs=tuple(replace(i, values=values.get(i.name)) for i in spec.inputs))
    if weights_info(config, spec) != info.weights:
        raise InputError(
            f"weights {weights}: the artifact was made with other weights. Pass the same file"
        )
    return reference_runner(spec, manifest, weights)
