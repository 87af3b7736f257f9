"""What a plugin of the pipeline's own is: an op that TensorRT lacks, and all that stands for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.machine.target import Target, Versions

if TYPE_CHECKING:  # the runtime loads plugins where onnx need not be installed
    import onnx

DOMAIN = "trt_pipeline"


@dataclass(frozen=True)
class Plugin:
    """A custom op: a node ``<DOMAIN>::<name>`` in the ONNX graph.

    ONNX Runtime runs `function`, and a target for which the plugin is not asked for or does not
    exist gets that body inlined; TensorRT runs what `register` registers.

    Args:
        name: the op's name in ONNX and the plugin creator's in TensorRT.
        version: the plugin creator's version.
        function: makes the ONNX function that says what the op computes, of domain `DOMAIN`.
        register: registers the creator with the TensorRT module that it is given; called once in
            the process that builds or runs the engine.
        targets: the versions of TensorRT that `register` is for.
        summary: one line.
        state: what was tried where, in one line; what was not.
    """

    name: str
    version: str
    function: Callable[[], onnx.FunctionProto]
    register: Callable[[Any], None]
    targets: tuple[Versions, ...]
    summary: str
    state: str

    def runs_on(self, target: Target) -> bool:
        return any(needs.covers(target) for needs in self.targets)
