"""The naive engine: what a user gets without pipeline. benchmarks/engines/engines.py starts it.

    python3 benchmarks/engines/naive_engine.py export MODEL --exporter dynamo --out naive.onnx
    python3 benchmarks/engines/naive_engine.py check MODEL naive.onnx
    python benchmarks/engines/naive_engine.py build naive.onnx ARTIFACT --out naive.plan

``export`` needs a Python with torch, and the repository on PYTHONPATH. It calls torch.onnx.export
once, with the model's dims and names. ``torchscript-17`` has opset 17, the newest that TensorRT
8.6 knows; the others have their exporter's default opset. ``check`` runs the file at the least
sizes with ONNX Runtime, beside torch. A plain export can contain the sizes of its example. Then its
engine does less than the model, and is right at those sizes alone. ``build`` needs the artifact's
TensorRT. It builds with the artifact's profiles and the flags of its precision. All else is
TensorRT's default: no pass, no type of a layer, no tactic source is set. On 8.6, contexts may share
a profile. The measurement needs that, and it changes no kernel.
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from engine_results import APART
from torch_baselines import add_model, spec_of

from pipeline.artifact.artifact import Artifact
from pipeline.errors import PipelineError
from pipeline.spec.dims import Dim, Size, sizes_text
from pipeline.spec.profiles import Profile, sizes_to_time

EXPORTERS = ("dynamo", "torchscript", "torchscript-17")
_FLAGS = {"fp32": (), "tf32": ("TF32",), "fp16": ("TF32", "FP16")}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    exporting = commands.add_parser("export")
    add_model(exporting)
    exporting.add_argument("--exporter", choices=EXPORTERS, required=True)
    exporting.add_argument("--out", type=Path, required=True)
    checking = commands.add_parser("check")
    add_model(checking)
    checking.add_argument("file", type=Path)
    building = commands.add_parser("build")
    building.add_argument("model", type=Path)
    building.add_argument("artifact", type=Path)
    building.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    try:
        if arguments.command == "export":
            export(arguments)
        elif arguments.command == "check":
            print(json.dumps({"narrow": narrow(arguments)}))
        else:
            print(json.dumps({"seconds": build(arguments)}))
    except PipelineError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def export(arguments: argparse.Namespace) -> None:
    """Writes the file of a plain torch.onnx.export, with external data if the exporter makes it."""
    import torch
    from torch_module import module_of

    spec = spec_of(arguments)
    module = module_of(spec, arguments.weights)
    sizes = {name: dim.legal(dim.opt) for name, dim in spec.dims.items()}
    example = tuple(torch.from_numpy(i.sample(sizes, 0)) for i in spec.inputs)
    names = [i.name for i in spec.inputs]
    outputs = [o.name for o in spec.outputs]
    free = [
        {n: str(size) for n, size in enumerate(i.shape) if not _fixed(size)} for i in spec.inputs
    ]
    more: dict[str, Any]
    if arguments.exporter == "dynamo":
        dynamic: tuple[Any, ...]
        dynamic = tuple(dict.fromkeys(axes, torch.export.Dim.DYNAMIC) for axes in free)
        parameters = inspect.signature(module.forward).parameters.values()
        if any(p.kind is p.VAR_POSITIONAL for p in parameters):
            dynamic = (dynamic,)
        more = {"dynamo": True, "dynamic_shapes": dynamic}
    else:
        # in its fast path torch calls an op that this exporter does not know
        torch.backends.mha.set_fastpath_enabled(False)
        more = {"dynamo": False, "dynamic_axes": dict(zip(names, free, strict=True))}
        if arguments.exporter == "torchscript-17":
            more["opset_version"] = 17
    with torch.no_grad():
        torch.onnx.export(
            module, example, str(arguments.out), input_names=names, output_names=outputs, **more
        )


def narrow(arguments: argparse.Namespace) -> str:
    """Why the file is not right at the model's least sizes; empty if it is."""
    import onnxruntime
    import torch
    from torch_module import flat, module_of

    spec = spec_of(arguments)
    profiles = [p.resolve(spec.dims) for p in spec.profiles or (Profile("default"),)]
    points = sizes_to_time(spec.dims, profiles, spec.rules, ())
    sizes = min((p.sizes for p in points), key=lambda s: math.prod(s.values()))
    feed = {i.name: i.sample(sizes, 0) for i in spec.inputs}
    module = module_of(spec, arguments.weights)
    with torch.no_grad():
        right = [t.numpy() for t in flat(module(*map(torch.from_numpy, feed.values())))]
    try:
        session = onnxruntime.InferenceSession(arguments.file, providers=["CPUExecutionProvider"])
        own = {i.name for i in session.get_inputs()}  # an input that nothing reads may be missing
        found = session.run(None, {name: feed[name] for name in own})
    except Exception as error:  # ONNX Runtime has a class of its own for each fault
        return f"at {sizes_text(sizes)} ONNX Runtime says: {str(error).strip().splitlines()[-1]}"
    for one, other in zip(found, right, strict=True):
        if one.shape != other.shape:
            return f"at {sizes_text(sizes)} the shape is {one.shape}, and torch's is {other.shape}"
        off, usual = np.linalg.norm(one - other), np.linalg.norm(other)
        if not off <= APART * usual:
            return f"at {sizes_text(sizes)} it is off by {off:.1e}, and torch's norm is {usual:.1e}"
    return ""


def _fixed(size: Size) -> bool:
    return isinstance(size, int) or (isinstance(size, Dim) and size.static)


def build(arguments: argparse.Namespace) -> float:
    """Builds the plan with the flags of the artifact's precision. Returns the seconds.

    Raises:
        PipelineError: TensorRT lacks a flag, or refuses the model.
    """
    from pipeline.build.network import open_network
    from pipeline.machine.target import find_target, use

    manifest = Artifact.open(arguments.artifact, check=False).manifest
    target = find_target(manifest.target.name)
    trt = use(target)
    start = time.perf_counter()
    made = open_network(trt, target, trt.Logger(trt.Logger.ERROR))
    errors = made.parse_file(arguments.model)
    if errors:
        raise PipelineError(f"the parser refuses it: {errors[0].text}")
    config = made.builder.create_builder_config()
    for name in _FLAGS[manifest.precision]:
        if not hasattr(trt.BuilderFlag, name):
            raise PipelineError(f"{target} has no flag {name}")
        config.set_flag(getattr(trt.BuilderFlag, name))
    if manifest.precision == "fp32":
        config.clear_flag(trt.BuilderFlag.TF32)
    if target.version < (9,):
        # each captured graph has its own context; without this, 8.6.0 ends at the second one
        config.set_preview_feature(trt.PreviewFeature.PROFILE_SHARING_0806, True)
    interface = manifest.interface
    for profile in interface.profiles:
        ranges = made.builder.create_optimization_profile()
        for name, shapes in profile.shapes(interface.input_shapes).items():
            ranges.set_shape(name, *shapes)
        if config.add_optimization_profile(ranges) < 0:
            raise PipelineError("TensorRT refuses a profile")
    plan = made.builder.build_serialized_network(made.network, config)
    if plan is None:
        raise PipelineError("TensorRT builds no engine")
    arguments.out.write_bytes(memoryview(plan))
    return time.perf_counter() - start


if __name__ == "__main__":
    sys.exit(main())
