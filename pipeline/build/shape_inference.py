"""Gets output sizes from TensorRT's shape inference, without running the model.

TensorRT parses the model once, as for an engine. For each set of sizes, the network's inputs get
these sizes, and TensorRT infers those of its outputs. If it leaves one open, or refuses the sizes,
it parses the model again with static input dims: then it knows more, and says why it refuses. So
this finds sizes that are baked in, or that a pass or the parser got wrong, also if a run needs too
much memory. TensorRT-RTX does this on any machine. The other flavour needs a GPU to make a builder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import onnx

from pipeline.build.network import OpenNetwork, open_network
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


@dataclass
class _Opened:
    """A model in the child, which keeps it between calls."""

    file: Path
    target: Target

    @cached_property
    def model(self) -> onnx.ModelProto:
        return onnx.load(self.file, load_external_data=False)

    @cached_property
    def network(self) -> OpenNetwork | None:
        """The network with dynamic dims; None if TensorRT refuses it."""
        opened = open_network(use(self.target), self.target)
        return None if opened.parse_file(self.file) else opened

    def sizes(self, shapes: Mapping[str, Sequence[int]]) -> Sizes | str:
        found = self.inferred(shapes)
        if found and all(size >= 0 for shape in found.values() for size in shape):
            return found
        return static_sizes(use(self.target), self.target, self.model, shapes, self.file)

    def inferred(self, shapes: Mapping[str, Sequence[int]]) -> Sizes:
        """The output sizes at these input shapes; empty if TensorRT refuses them."""
        if self.network is None:
            return {}
        network = self.network.network
        inputs = {
            tensor.name: tensor for tensor in map(network.get_input, range(network.num_inputs))
        }
        if inputs.keys() != shapes.keys():
            return {}
        for name, shape in shapes.items():
            inputs[name].shape = tuple(shape)
        outputs = map(network.get_output, range(network.num_outputs))
        try:
            return {tensor.name: tuple(tensor.shape) for tensor in outputs}
        except (RuntimeError, ValueError):  # no shape
            return {}


_asked: list[_Opened] = []


def _sizes(model: Path, shapes: Mapping[str, Sequence[int]], target: Target) -> Sizes | str:
    """Runs in the child."""
    if not _asked or (_asked[0].file, _asked[0].target) != (model, target):
        _asked[:] = [_Opened(model, target)]
    return _asked[0].sizes(shapes)
