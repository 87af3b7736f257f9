"""TensorRT as a shape oracle: the output sizes that its own shape inference finds, without a GPU.

At each set of sizes the model's input dims are made static and the model is parsed; the dims of
the network's outputs are what an engine would give. Sizes that a pass or the parser got wrong, or
that are baked in, show here though nothing is run, also where a run would not fit into memory.
TensorRT-RTX does this on any machine; the other flavour needs a GPU to make a builder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import onnx

from pipeline.compare.runners import TORCH, Job, Plan
from pipeline.compare.verdict import failed
from pipeline.machine.child import Child, ChildDied, ChildFailed
from pipeline.machine.gpu import why_not
from pipeline.machine.target import Target, installed_version, require, use
from pipeline.spec.dims import shape_at

ORACLE = "TensorRT's shape inference"
Sizes = Mapping[str, tuple[int, ...]]


def why_not_asked(target: Target) -> str:
    """Why the target's TensorRT can't be asked here; an empty text where it can."""
    if installed_version(target) is None:
        return f"{target.flavour} is not installed here"
    return "" if target.flavour == "tensorrt_rtx" else why_not(target)


def output_sizes(
    model: Path, shapes: Sequence[Mapping[str, Sequence[int]]], target: Target
) -> list[Sizes | str]:
    """The outputs' sizes at each set of input shapes, -1 where TensorRT leaves them open; or its
    words where it refuses them.

    Args:
        model: the ONNX file, its external data beside it.
        shapes: input shapes by name.
        target: whose TensorRT is asked; see `why_not_asked`.
    """
    require(target)
    found: list[Sizes | str] = []
    with Child() as child:
        for each in shapes:
            try:
                found.append(
                    child.call("pipeline.build.shape_inference:_sizes", model, dict(each), target)
                )
            except ChildDied as died:
                found.append(f"TensorRT's parser died: {died.how}")
            except ChildFailed as failure:  # no ONNX file; running it says it better
                found.append(str(failure))
    return found


def check_sizes(model: Path, target: Target, job: Job, plan: Plan) -> list[str]:
    """Holds TensorRT's sizes against the declared ones, which are torch's, at every point.

    What disagrees is added to the plan's points as failed, those that are too large to run
    included. Returns notes for the manifest: at how many points it agreed, or why it was not
    asked.
    """
    why = why_not_asked(target)
    if why:
        return [f"output sizes not asked of TensorRT's shape inference: {why}"]
    found = output_sizes(model, plan.shapes, target)
    open_axes = set()
    agreed = 0
    for n, (info, sizes) in enumerate(zip(plan.infos, found, strict=True)):
        wrong = []
        for name, shape in job.outputs.items():
            want = shape_at(shape, info.sizes)
            if isinstance(sizes, str):
                wrong.append(failed((TORCH, ORACLE), name, f"TensorRT refuses the sizes: {sizes}"))
                break
            got = sizes.get(name, ())
            open_axes |= {f"{name} axis {axis}" for axis, size in enumerate(got) if size < 0}
            same = len(got) == len(want) and all(
                a in (-1, b) for a, b in zip(got, want, strict=True)
            )
            if not same:
                wrong.append(failed((TORCH, ORACLE), name, f"shape {got}, not {want}"))
        told = not isinstance(sizes, str) and any(
            not got or any(n >= 0 for n in got) for got in sizes.values()
        )
        agreed += told and not wrong
        plan.infos[n] = replace(info, results=(*info.results, *wrong))
    notes = [f"output sizes by TensorRT's own shape inference: right at {agreed} of {len(found)}"]
    if open_axes:
        notes.append(f"sizes that TensorRT leaves to the run: {', '.join(sorted(open_axes))}")
    return notes


_models: dict[Path, onnx.ModelProto] = {}


def _sizes(model: Path, shapes: Mapping[str, Sequence[int]], target: Target) -> Sizes | str:
    """In the child, which keeps the model between calls."""
    from pipeline.build.try_graph import static_sizes

    if model not in _models:
        _models[model] = onnx.load(model, load_external_data=False)
    return static_sizes(use(target), _models[model], shapes, model)
