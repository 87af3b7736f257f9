"""Tries a small graph on the installed TensorRT.

Without a GPU, a trial parses and builds, and compares the sizes of TensorRT's shape inference with
those of ONNX Runtime. With a GPU, it also compares the numbers. Each trial runs in a child process,
because TensorRT may crash.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx

from pipeline.build import layer_types
from pipeline.build.network import OpenNetwork, ParserError, open_network
from pipeline.graph.session import run_reference
from pipeline.machine.child import Child, ChildDied
from pipeline.machine.gpu import why_not
from pipeline.machine.polygraphy import collected
from pipeline.machine.target import Target, use
from pipeline.rewrite.half import in_half
from pipeline.spec.closeness import Difference
from pipeline.spec.precision import HALVES
from pipeline.spec.tensors import Feed, Precision

# the allowed error after several products in half precision, as a share of the largest value
_NEAR: Mapping[str, float] = {"fp16": 2e-2, "bf16": 0.16}
_NO_ENGINE = "TensorRT returned no engine"
# the builder and its logger; TensorRT 8.6 takes seconds to make one
_builders: dict[Target, tuple[Any, Any]] = {}
Verdict = Literal["parse", "build", "crash", "sizes", "numbers", "builds", "right"]


@dataclass(frozen=True)
class Outcome:
    """The result of a trial.

    Args:
        verdict: ``parse``, ``build``, ``crash``, ``sizes`` and ``numbers`` name what failed.
            ``builds``: nothing failed, but no GPU ran the engine. ``right``: the numbers agree too.
        detail: TensorRT's message, or the difference.
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
    """Parses and builds a graph, and compares as much as this machine can.

    Args:
        child: The child process for TensorRT.
        model: The graph.
        feeds: The inputs at the sizes to compare. The profile spans all; the last is its opt.
        target: The installed TensorRT.
        precision: ``fp32``, ``fp16`` or ``bf16``, as in `pipeline.build.build`.
    """
    try:
        verdict, detail = child.call(
            _attempt, model.SerializeToString(), list(feeds), target, precision
        )
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
    """Returns the output shapes of TensorRT's shape inference at these input shapes.

    A size is -1 if TensorRT leaves it open. If TensorRT does not parse the model, the result is its
    message.

    Args:
        trt: The target's TensorRT.
        target: The target, for the kind of network.
        model: The model; its weights may be external.
        shapes: Input shapes by name.
        path: The model's file, if the model has external weights.
    """
    fixed = onnx.ModelProto()
    fixed.CopyFrom(model)
    for value in fixed.graph.input:
        for dim, size in zip(
            value.type.tensor_type.shape.dim, shapes.get(value.name, ()), strict=False
        ):
            dim.Clear()
            dim.dim_value = int(size)
    opened = _opened(trt, target)
    if errors := opened.parse(fixed.SerializeToString(), path):
        return _reasons(errors)
    outputs = [opened.network.get_output(n) for n in range(opened.network.num_outputs)]
    return {o.name: tuple(o.shape) for o in outputs}


def _attempt(
    model_bytes: bytes, feeds: Sequence[Feed], target: Target, precision: Precision
) -> tuple[Verdict, str]:
    """Runs in the child."""
    trt = use(target)
    model = onnx.load_from_string(model_bytes)
    parsed = model_bytes
    if precision in HALVES:
        copy = onnx.load_from_string(model_bytes)
        in_half(copy, precision)
        parsed = copy.SerializeToString()
    opened = _opened(trt, target)
    if errors := opened.parse(parsed):
        return "parse", _reasons(errors)
    builder, network = opened.builder, opened.network
    config = builder.create_builder_config()
    config.clear_flag(trt.BuilderFlag.TF32)
    profile = builder.create_optimization_profile()
    for n in range(network.num_inputs):
        tensor = network.get_input(n)
        if tensor.name not in feeds[0]:
            # TensorRT renames an input that is also an output
            missing = sorted({*feeds[0]} - {i.name for i in _inputs(network)})
            return "build", f"the network has no input {', '.join(missing)}, but has {tensor.name}"
        if tensor.is_shape_tensor:
            values = np.array([feed[tensor.name] for feed in feeds])
            profile.set_shape_input(
                tensor.name, *([*np.ravel(v)] for v in (values.min(0), values[-1], values.max(0)))
            )
            continue
        sizes = np.array([feed[tensor.name].shape for feed in feeds], int).reshape(len(feeds), -1)
        profile.set_shape(tensor.name, *(tuple(s) for s in (sizes.min(0), sizes[-1], sizes.max(0))))
    if config.add_optimization_profile(profile) < 0:
        return "build", "TensorRT refuses the profile"
    if precision in HALVES and not target.strongly_typed:
        layer_types.apply(trt, config, network, precision)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        return "build", opened.logger.last
    expected = run_reference(model_bytes, feeds)
    wrong = _wrong_sizes(trt, target, model, feeds, expected)
    if wrong:
        return "sizes", wrong
    why = why_not(target)
    near = _NEAR.get(precision)
    return ("builds", why) if why else _numbers(bytes(plan), feeds, expected, near)


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
    plan: bytes, feeds: Sequence[Feed], expected: Sequence[Feed], near: float | None
) -> tuple[Verdict, str]:
    from polygraphy.backend.trt import EngineFromBytes, TrtRunner

    with collected(), TrtRunner(EngineFromBytes(plan)) as runner:
        metadata = runner.get_input_metadata(use_numpy_dtypes=True)
        for feed, want in zip(feeds, expected, strict=True):
            got = runner.infer({k: v.astype(metadata[k].dtype) for k, v in feed.items()})
            for name, array in want.items():
                why = differs(np.array(got[name]), array, near)
                if why:
                    return "numbers", f"{name} {why} at {_words(feed)}"
    return "right", ""


def differs(got: np.ndarray, want: np.ndarray, near: float | None = None) -> str:
    """Returns how an array differs from the wanted array; empty if it does not.

    Integers must be equal. Floats may differ by `near` times the largest value (by default 1e-4,
    4e-3 for float16).
    """
    if got.shape != want.shape:
        return f"has the shape {got.shape}, not {want.shape}"
    if want.dtype.kind != "f":
        unequal = Difference(want.astype(np.int64), got.astype(np.int64)).unequal
        return f"differs in {unequal} of {want.size} values" if unequal else ""
    near = near or (4e-3 if want.dtype == np.float16 else 1e-4)
    difference = Difference(want, got)
    if not difference.finite_alike:
        return "has NaN or infinity at other places"
    scale, far = max(difference.scale, 1e-3), difference.largest_finite
    return f"differs by {far:.3g}; the largest value is {scale:.3g}" if far > near * scale else ""


def _opened(trt: Any, target: Target) -> OpenNetwork:
    """An empty network of this process's builder."""
    builder, logger = _builders.get(target) or (None, _last_error_log(trt))
    logger.last = _NO_ENGINE
    opened = open_network(trt, target, logger, builder)
    _builders[target] = opened.builder, logger
    return opened


def _last_error_log(trt: Any) -> Any:
    """A logger that keeps the last error."""

    class LastErrorLog(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.last = _NO_ENGINE

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR):
                self.last = message

    return LastErrorLog()


def _reasons(errors: Sequence[ParserError]) -> str:
    return "; ".join(error.why for error in errors)


def _words(feed: Feed) -> str:
    return ", ".join(f"{name} {list(array.shape)}" for name, array in feed.items())
