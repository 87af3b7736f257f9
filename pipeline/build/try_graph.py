"""Trying a small graph on the installed TensorRT: what becomes of it, as far as this machine tells.

Without a GPU: whether it parses and builds, and whether TensorRT's own shape inference gives the
sizes that ONNX Runtime gives. With one that runs the engine: the numbers too. Each trial runs in
a child process, since a library that crashes is one of the answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx

from pipeline.build import layer_types
from pipeline.build.network import ParserError, open_network
from pipeline.graph.session import run_reference
from pipeline.machine.child import Child, ChildDied
from pipeline.machine.gpu import why_not
from pipeline.machine.polygraphy import collected
from pipeline.machine.target import Target, use
from pipeline.rewrite.half import in_half
from pipeline.spec.closeness import Difference
from pipeline.spec.tensors import Feed, Precision

# of the largest value, what several products in half precision may be off
_HALF = 2e-2
Verdict = Literal["parse", "build", "crash", "sizes", "numbers", "builds", "right"]


@dataclass(frozen=True)
class Outcome:
    """What became of a graph.

    Args:
        verdict: ``parse``, ``build``, ``crash``, ``sizes`` and ``numbers`` say what failed;
            ``builds`` that nothing did, but no GPU here could run the engine; ``right`` that its
            numbers were compared too.
        detail: TensorRT's words, or what differs.
    """

    verdict: Verdict
    detail: str = ""

    @property
    def failed(self) -> bool:
        return self.verdict not in ("builds", "right")


def attempt(
    child: Child,
    model: onnx.ModelProto,
    feeds: Sequence[Feed],
    target: Target,
    precision: Precision = "fp32",
) -> Outcome:
    """Parses, builds, and compares as far as this machine can.

    Args:
        child: where TensorRT runs.
        model: the graph.
        feeds: inputs, at the sizes to compare at; the profile spans them, its opt is the last.
        target: whose TensorRT is installed.
        precision: ``fp32`` or ``fp16``, as `pipeline.build.build` has it.
    """
    half = precision == "fp16"
    try:
        verdict, detail = child.call(_attempt, model.SerializeToString(), list(feeds), target, half)
    except ChildDied as died:
        return Outcome("crash", f"{died.how}: {died.words.splitlines()[-1] if died.words else ''}")
    return Outcome(verdict, detail)


def static_sizes(
    trt: Any,
    target: Target,
    model: onnx.ModelProto,
    shapes: Mapping[str, Sequence[int]],
    path: Path | None = None,
) -> dict[str, tuple[int, ...]] | str:
    """The outputs' dims by TensorRT's own shape inference at these input shapes, -1 where it
    leaves them open; its words where it refuses to parse.

    Args:
        trt: the target's TensorRT.
        target: what kind of network it builds.
        model: the model; its weights may be outside of it.
        shapes: input shapes by name.
        path: the model's file, if its weights are beside it.
    """
    fixed = onnx.ModelProto()
    fixed.CopyFrom(model)
    for value in fixed.graph.input:
        for dim, size in zip(
            value.type.tensor_type.shape.dim, shapes.get(value.name, ()), strict=False
        ):
            dim.Clear()
            dim.dim_value = int(size)
    opened = open_network(trt, target)
    if errors := opened.parse(fixed.SerializeToString(), path):
        return _reasons(errors)
    outputs = [opened.network.get_output(n) for n in range(opened.network.num_outputs)]
    return {o.name: tuple(o.shape) for o in outputs}


def _attempt(
    model_bytes: bytes, feeds: Sequence[Feed], target: Target, half: bool
) -> tuple[Verdict, str]:
    """In the child."""
    trt = use(target)
    model = onnx.load_from_string(model_bytes)
    parsed = model_bytes
    if half:
        copy = onnx.load_from_string(model_bytes)
        in_half(copy)
        parsed = copy.SerializeToString()
    logger = _last_error_log(trt)
    opened = open_network(trt, target, logger)
    if errors := opened.parse(parsed):
        return "parse", _reasons(errors)
    builder, network = opened.builder, opened.network
    config = builder.create_builder_config()
    config.clear_flag(trt.BuilderFlag.TF32)
    profile = builder.create_optimization_profile()
    for n in range(network.num_inputs):
        tensor = network.get_input(n)
        if tensor.name not in feeds[0]:
            # an input that is also an output is renamed
            missing = sorted({*feeds[0]} - {i.name for i in _inputs(network)})
            return "build", f"the network has no input {', '.join(missing)}, but {tensor.name}"
        if tensor.is_shape_tensor:
            values = np.array([feed[tensor.name] for feed in feeds])
            profile.set_shape_input(
                tensor.name, *([*np.ravel(v)] for v in (values.min(0), values[-1], values.max(0)))
            )
            continue
        sizes = np.array([feed[tensor.name].shape for feed in feeds], int).reshape(len(feeds), -1)
        profile.set_shape(tensor.name, *(tuple(s) for s in (sizes.min(0), sizes[-1], sizes.max(0))))
    if config.add_optimization_profile(profile) < 0:
        return "build", "the profile is not valid"
    if half and not target.strongly_typed:
        layer_types.apply(trt, config, network)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        return "build", logger.last
    expected = run_reference(model_bytes, feeds)
    wrong = _wrong_sizes(trt, target, model, feeds, expected)
    if wrong:
        return "sizes", wrong
    why = why_not(target)
    return ("builds", why) if why else _numbers(bytes(plan), feeds, expected, half)


def _inputs(network: Any) -> list[Any]:
    return [network.get_input(n) for n in range(network.num_inputs)]


def _wrong_sizes(
    trt: Any,
    target: Target,
    model: onnx.ModelProto,
    feeds: Sequence[Feed],
    expected: Sequence[Feed],
) -> str:
    for feed, want in zip(feeds, expected, strict=True):
        sizes = static_sizes(trt, target, model, {k: v.shape for k, v in feed.items()})
        if isinstance(sizes, str):
            return f"refused at {_words(feed)}: {sizes}"
        for name, size in sizes.items():
            if name in want and -1 not in size and size != want[name].shape:
                return f"{name} is {size}, not {want[name].shape}, at {_words(feed)}"
    return ""


def _numbers(
    plan: bytes, feeds: Sequence[Feed], expected: Sequence[Feed], half: bool
) -> tuple[Verdict, str]:
    from polygraphy.backend.trt import EngineFromBytes, TrtRunner

    with collected(), TrtRunner(EngineFromBytes(plan)) as runner:
        metadata = runner.get_input_metadata(use_numpy_dtypes=True)
        for feed, want in zip(feeds, expected, strict=True):
            got = runner.infer({k: v.astype(metadata[k].dtype) for k, v in feed.items()})
            for name, array in want.items():
                why = differs(np.array(got[name]), array, _HALF if half else None)
                if why:
                    return "numbers", f"{name} {why} at {_words(feed)}"
    return "right", ""


def differs(got: np.ndarray, want: np.ndarray, near: float | None = None) -> str:
    """How an array differs from what it should be; nothing where it does not: integers equal,
    floats within `near` of the largest value (by default 1e-4, half 4e-3)."""
    if got.shape != want.shape:
        return f"has the shape {got.shape}, not {want.shape}"
    if want.dtype.kind != "f":
        unequal = Difference(want.astype(np.int64), got.astype(np.int64)).unequal
        return f"differs in {unequal} of {want.size} values" if unequal else ""
    near = near or (4e-3 if want.dtype == np.float16 else 1e-4)
    difference = Difference(want, got)
    if not difference.finite_alike:
        return "has NaN or infinity elsewhere"
    scale, far = max(difference.scale, 1e-3), difference.largest_finite
    return (
        f"is off by {far:.3g} where the largest value is {scale:.3g}" if far > near * scale else ""
    )


def _last_error_log(trt: Any) -> Any:
    """A logger that keeps the last error."""

    class LastErrorLog(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.last = "no engine came out"

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR):
                self.last = message

    return LastErrorLog()


def _reasons(errors: Sequence[ParserError]) -> str:
    return "; ".join(error.why for error in errors)


def _words(feed: Feed) -> str:
    return ", ".join(f"{name} {list(array.shape)}" for name, array in feed.items())
