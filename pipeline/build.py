"""ONNX -> plan, through Polygraphy over whichever TensorRT the target names."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import onnx

from pipeline.dims import Size
from pipeline.errors import BuildError, InputError
from pipeline.polygraphy_log import Messages, collected
from pipeline.profiles import Profile
from pipeline.target import Target, require, use
from pipeline.timing import Stopwatch

Precision = Literal["fp32", "tf32", "fp16"]
PRECISIONS: tuple[Precision, ...] = ("fp32", "tf32", "fp16")
_MALFORMED = 32  # EngineInvalidityDiagnostics.MALFORMED_ENGINE of TensorRT-RTX
# The parser's words: "In node 3 with name: node_X and operator: NonZero (importNonZero): why"
_NODE = re.compile(
    r"In node (?P<index>-?\d+) with name: (?P<name>.*?) and operator: (?P<op>\w+)"
    r"(?: \(\w+\))?(?:: (?P<why>.*))?"
)
# The builder's: "(ITopKLayer node_X: node_X: why In processCheck at ...)"; a layer has its node's
# name, or "node_of_<output>" where the node has none
_LAYER = re.compile(
    r"\(I\w+Layer (?P<name>[^\s:]+): (?:(?P=name): )?(?P<why>.*?)(?: In \w+ at |\)?$)"
)
_UNNAMED = "node_of_"


@dataclass(frozen=True)
class Built:
    """A plan and what TensorRT said of it."""

    version: str
    plan_bytes: int
    validity: str
    layers: int
    warnings: Sequence[str]
    library_seconds: Mapping[str, float]


def check_precision(precision: str, target: Target) -> None:
    """Raises `InputError` unless the target can be told to build in that precision."""
    if precision not in PRECISIONS:
        raise InputError(f"unknown precision {precision!r}; known: {', '.join(PRECISIONS)}")
    if precision == "fp16" and target.strongly_typed:
        raise InputError(
            f"precision fp16: target {target} is strongly typed, so fp16 has to stand in the "
            "graph itself; convert the module with .half() in the spec's build"
        )


def build(
    model: Path,
    plan: Path,
    target: Target,
    inputs: Mapping[str, Sequence[Size]],
    profiles: Sequence[Profile],
    precision: Precision = "fp32",
) -> Built:
    """Builds an engine from an ONNX file and writes its bytes; no GPU is needed on RTX.

    Args:
        model: the ONNX file, its external data beside it.
        plan: where the bytes go.
        target: which TensorRT builds.
        inputs: each input's shape by name.
        profiles: one or more, with a range for every dim.
        precision: ``fp32`` forbids TF32, ``tf32`` allows it, ``fp16`` also allows half
            precision (weakly typed targets only).

    Raises:
        TargetMissing: the target's TensorRT is not installed here.
        BuildError: TensorRT refused; names the ONNX node and the module it came from where
            TensorRT names the node. TensorRT's own words are in ``detail``.
    """
    check_precision(precision, target)
    version = require(target)
    trt = use(target)
    watch = Stopwatch()
    with collected() as messages:
        try:
            with watch("tensorrt parse"):
                builder, network, parser = _parse(model, target)
            config = _config(trt, target, builder, network, inputs, profiles, precision)
            with watch("tensorrt build"):
                data = builder.build_serialized_network(network, config)
        except Exception as error:
            if type(error).__name__ != "PolygraphyException":
                raise
            raise _failure(model, target, messages, str(error)) from error
    if data is None:
        raise _failure(model, target, messages, "no engine came out")
    layers = int(network.num_layers)
    del parser, network, config, builder
    raw = memoryview(data)
    plan.write_bytes(raw)
    return Built(
        version,
        len(raw),
        _validity(trt, target, bytes(raw)),
        layers,
        tuple(dict.fromkeys(messages.warnings)),
        dict(watch.seconds),
    )


def _parse(model: Path, target: Target) -> tuple[Any, Any, Any]:
    from polygraphy.backend.trt import network_from_onnx_path

    return network_from_onnx_path(  # type: ignore[no-any-return]
        str(model), strongly_typed=True if target.strongly_typed else None
    )


def _config(
    trt: Any,
    target: Target,
    builder: Any,
    network: Any,
    inputs: Mapping[str, Sequence[Size]],
    profiles: Sequence[Profile],
    precision: Precision,
) -> Any:
    from polygraphy.backend.trt import CreateConfig
    from polygraphy.backend.trt import Profile as PolygraphyProfile

    ranges = []
    for profile in profiles:
        made = PolygraphyProfile()
        for name, (low, opt, high) in profile.shapes(inputs).items():
            made.add(name, low, opt, high)
        ranges.append(made)
    if target.flavour == "tensorrt_rtx":
        from polygraphy.backend.tensorrt_rtx import CreateConfigRTX

        config = CreateConfigRTX(profiles=ranges)(builder, network)
    else:
        config = CreateConfig(profiles=ranges, fp16=precision == "fp16")(builder, network)
    # add_optimization_profile gives -1 for a profile that contradicts the network, without an
    # error, and Polygraphy does not look at it
    if config.num_optimization_profiles != len(profiles):
        raise BuildError(f"target {target}: TensorRT takes a profile for invalid")
    # CreateConfig clears TF32 by default, CreateConfigRTX leaves it on: say it either way
    (config.clear_flag if precision == "fp32" else config.set_flag)(trt.BuilderFlag.TF32)
    return config


def _validity(trt: Any, target: Target, data: bytes) -> str:
    """What the target's runtime says of the bytes where it can be asked without a GPU.

    TensorRT-RTX answers INVALID with an empty set of diagnostics for a well-formed engine on a
    machine without a GPU, and MALFORMED_ENGINE for other bytes. Only the header is looked at:
    that the rest is whole is the manifest's hash's business.

    Raises:
        BuildError: the bytes are malformed.
    """
    if target.flavour != "tensorrt_rtx":
        return "not asked: this TensorRT has no engine validity check"
    from polygraphy.backend.trt import get_trt_logger

    with collected():  # without a driver the runtime complains that it can't ask the GPU
        validity, diagnostics = trt.Runtime(get_trt_logger()).get_engine_validity(data)
    if int(diagnostics) & _MALFORMED:
        raise BuildError(f"target {target}: TensorRT takes its own engine for malformed")
    if "INVALID" in validity.name:  # what it says on a machine without a GPU, whatever the plan
        return "well-formed (no diagnostics; without a GPU the runtime can't say more)"
    return f"well-formed ({validity.name}, diagnostics {int(diagnostics)})"


def _failure(model: Path, target: Target, messages: Messages, last: str) -> BuildError:
    """The error for what TensorRT said, with the ONNX node and the module it came from."""
    detail = "\n".join([*messages.errors, last])
    first = next((line for line in detail.splitlines() if line.strip()), last).strip()
    for pattern in (_NODE, _LAYER):
        for match in pattern.finditer(detail):
            found = match.groupdict()
            node = _find_node(model, found["name"], found.get("index"))
            why = (found["why"] or first).strip().rstrip(".")
            if node is not None:
                name = node.name or f"that makes {node.output[0]}"
                return BuildError(
                    f"target {target} refuses the {node.op_type} node {name}{_origin(node)}: {why}",
                    detail=detail,
                )
            first = why if "op" not in found else f"{found['op']} {found['name']}: {why}"
    return BuildError(f"target {target} refuses {model.name}: {first}", detail=detail)


def _find_node(model: Path, name: str, index: str | None) -> onnx.NodeProto | None:
    try:
        nodes: list[onnx.NodeProto] = list(onnx.load(model, load_external_data=False).graph.node)
    except Exception:  # protobuf's own error: it is no ONNX file, and that is what is reported
        return None
    for node in nodes:
        if name and node.name == name:
            return node
    if name.startswith(_UNNAMED):
        output = name.removeprefix(_UNNAMED)
        return next((node for node in nodes if output in node.output), None)
    number = -1 if name or index is None else int(index)
    return nodes[number] if 0 <= number < len(nodes) else None


def _origin(node: onnx.NodeProto) -> str:
    """``, from module ... at file:line`` by the exporter's metadata, as far as it is there."""
    metadata = {p.key: p.value for p in node.metadata_props}
    parts = []
    if scopes := metadata.get("pkg.torch.onnx.name_scopes"):
        names = re.findall(r"'([^']*)'", scopes)
        parts.append(f"module {names[-2] or '(top)'}" if len(names) > 1 else "")
    if trace := metadata.get("pkg.torch.onnx.stack_trace"):
        frames = re.findall(r'File "([^"]+)", line (\d+)', trace)
        if frames:
            parts.append(f"at {frames[-1][0]}:{frames[-1][1]}")
    return f", from {' '.join(p for p in parts if p)}" if any(parts) else ""
