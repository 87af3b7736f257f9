"""TensorRT as a shape oracle: the output sizes that its own shape inference finds, without a GPU.

At each set of sizes the model's input dims are made static and the model is parsed; the dims of
the network's outputs are what an engine would give. Sizes that a pass or the parser got wrong, or
that are baked in, show here though nothing is run, also where a run would not fit into memory.
TensorRT-RTX does this on any machine; the other flavour needs a GPU to make a builder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import onnx

from pipeline.build.try_graph import static_sizes
from pipeline.machine.child import Child, ChildDied, ChildFailed
from pipeline.machine.gpu import why_not
from pipeline.machine.target import Target, installed_version, require, use

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
                found.append(child.call(_sizes, model, dict(each), target))
            except ChildDied as died:
                found.append(f"TensorRT's parser died: {died.how}")
            except ChildFailed as failure:  # no ONNX file; running it says it better
                found.append(str(failure))
    return found


_models: dict[Path, onnx.ModelProto] = {}


def _sizes(model: Path, shapes: Mapping[str, Sequence[int]], target: Target) -> Sizes | str:
    """In the child, which keeps the model between calls."""
    if model not in _models:
        _models[model] = onnx.load(model, load_external_data=False)
    return static_sizes(use(target), target, _models[model], shapes, model)
