"""Gets output sizes from TensorRT's shape inference, without running the model.

For each set of sizes, the input dims are made static and TensorRT parses the model. The output dims
of the network are those of an engine. So this finds sizes that are baked in, or that a pass or the
parser got wrong, also if a run needs too much memory. TensorRT-RTX does this on any machine. The
other flavour needs a GPU to make a builder.
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
    """Returns why the target's TensorRT cannot run here; empty if it can."""
    if installed_version(target) is None:
        return f"{target.flavour} is not installed here"
    return "" if target.flavour == "tensorrt_rtx" else why_not(target)


def output_sizes(
    model: Path, shapes: Sequence[Mapping[str, Sequence[int]]], target: Target
) -> list[Sizes | str]:
    """Returns the output sizes for each set of input shapes, or TensorRT's error message.

    A size is -1 if TensorRT leaves it open.

    Args:
        model: The ONNX file, with its external data in the same folder.
        shapes: Input shapes by name.
        target: The TensorRT to use; see `why_not_asked`.
    """
    require(target)
    found: list[Sizes | str] = []
    with Child() as child:
        for each in shapes:
            try:
                found.append(child.call(_sizes, model, dict(each), target))
            except ChildDied as died:
                found.append(f"TensorRT's parser crashed: {died.how}")
            except ChildFailed as failure:  # not an ONNX file; the run of the file reports it
                found.append(str(failure))
    return found


_models: dict[Path, onnx.ModelProto] = {}


def _sizes(model: Path, shapes: Mapping[str, Sequence[int]], target: Target) -> Sizes | str:
    """Runs in the child, which keeps the model between calls."""
    if model not in _models:
        _models[model] = onnx.load(model, load_external_data=False)
    return static_sizes(use(target), target, _models[model], shapes, model)
