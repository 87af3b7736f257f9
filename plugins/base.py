"""`Plugin`: an op that TensorRT lacks, as the pipeline implements it."""

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

    ONNX Runtime runs `function`. TensorRT runs the creator from `register`. If you did not ask for
    the plugin, or it does not exist for the target, the function's body is inlined instead.

    Args:
        name: the op's name in ONNX, and the plugin creator's name in TensorRT.
        version: the plugin creator's version.
        function: makes the ONNX function that defines the op, in the domain `DOMAIN`.
        register: registers the creator with a TensorRT module; called once in the process that
            builds or runs the engine.
        targets: the versions of TensorRT that `register` supports.
        summary: one line about the op.
        state: one line that says what was tested, and where.
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
