"""Builds a plan from an ONNX file with the target's TensorRT, through Polygraphy.

TensorRT runs in a child process, so a crash ends only the child. If a build fails and TensorRT's
message names no node, the build runs again with verbose logging. The log shows the last node.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeline.build.custom_nodes import prepare
from pipeline.build.gpu_needs import gpus_for
from pipeline.build.lean import lean_library, need_lean
from pipeline.build.network import open_network, parsed_network
from pipeline.build.refusal import explain, readable
from pipeline.build.refused_node import BuildFailure, NodeIndex, find
from pipeline.build.settings import BuildOptions, TimingCache, configure
from pipeline.errors import BuildError
from pipeline.graph.files import check_model
from pipeline.machine.child import Child, ChildDied, ChildFailed, ChildLate
from pipeline.machine.gpu import Capability, check_capabilities
from pipeline.machine.polygraphy import collected
from pipeline.machine.resources import Stopwatch
from pipeline.machine.target import Target, require, use
from pipeline.plugins.loading import RequestedPlugin, find_plugins, library_folder, load_plugins
from pipeline.rewrite.half import write_in_half
from pipeline.spec.effort import check_effort
from pipeline.spec.file_names import HALF
from pipeline.spec.interface import Interface
from pipeline.spec.plan_flags import check_flags
from pipeline.spec.precision import check_precision

_MALFORMED = 32  # EngineInvalidityDiagnostics.MALFORMED_ENGINE of TensorRT-RTX
_PHASE, _PARSING, _LAYERS, _UNIT = "phase ", "parsing ", "layers ", "\x1f"
# the messages of a verbose run that name nodes: "Parsing node: X [Op]", "Static check for parsing
# node: X [Op]", "ForeignNode {...} metadata: [ONNX Layer: a][ONNX Layer: b]"
_AT_NODE = re.compile(r"arsing node: (?P<name>.*) \[\w+\]$")
_LAYER = re.compile(r"\[ONNX Layer: (?P<name>[^\]]*)\]")


_NOTES = {
    "libraries": "tactics of cuBLAS and cuDNN were allowed",
    "plain": "built with TensorRT's defaults; the types of layers were TensorRT's choice",
}


@dataclass(frozen=True)
class Built:
    """The facts of a plan and its build.

    Args:
        version: The version of TensorRT.
        plan_bytes: The size of the plan in bytes.
        validity: The result of TensorRT's validity check, as text.
        layers: The number of layers before fusion.
        warnings: Warnings of the build.
        library_seconds: Seconds in TensorRT, by step.
        plugins: The given plugins that must be loaded before the plan.
        peak_memory: Peak memory of the build process in bytes.
        timing_cache: What was kept of the timings, as text.
        gpus: The compute capabilities that a plan of TensorRT-RTX is for; empty if it runs on
            all of `pipeline.machine.gpu.PORTABLE`.
    """

    version: str
    plan_bytes: int
    validity: str
    layers: int
    warnings: Sequence[str]
    library_seconds: Mapping[str, float]
    plugins: tuple[str, ...] = ()
    peak_memory: int = 0
    timing_cache: str = "none"
    gpus: tuple[Capability, ...] = ()


@dataclass(frozen=True)
class _BuildJob:
    """One build for the child process."""

    model: Path
    plan: Path
    interface: Interface
    options: BuildOptions
    plugins: tuple[RequestedPlugin, ...]
    trail: Path
    verbose: bool = False

    @property
    def target(self) -> Target:
        return self.options.target

    @property
    def source(self) -> Path:
        """The model to build: for fp16 and bf16, the copy in half precision."""
        return self.plan.with_name(HALF) if self.options.in_half else self.model

    @property
    def spare(self) -> Path:
        """The path of a changed copy, in the same folder because of the external data."""
        return self.source.with_name(f".{self.source.name}.parsed")


@dataclass(frozen=True)
class _NoEngine:
    """TensorRT's message if it returned no engine."""

    text: str


def build(
    model: Path,
    plan: Path,
    interface: Interface,
    options: BuildOptions,
) -> Built:
    """Builds an engine from an ONNX file and writes the plan. TensorRT-RTX needs no GPU.

    Args:
        model: The ONNX file, with its external data in the same folder.
        plan: The path of the plan. For fp16 and bf16, the half-precision model is written to
            ``half.onnx`` in the same folder.
        interface: The shapes of the inputs, and one or more profiles with a range for every dim.
        options: The target, the precision, and the other options.

    Raises:
        TargetMissing: The target's TensorRT is not installed.
        InputError: The ONNX model is not valid, the target does not have the precision, or a
            plugin does not exist or does not load.
        BuildError: TensorRT refused the model or crashed, or a custom op has no plugin. The message
            comes from `pipeline.build.refusal.explain`; ``detail`` has TensorRT's own text.
    """
    target, effort = options.target, options.effort
    check_precision(options.precision, target)
    check_effort(effort, target)
    check_capabilities(options.gpus, target)
    check_flags(options.flags, target)
    version = require(target)
    asked = find_plugins(options.plugins, target)
    with library_folder(target) as found, tempfile.TemporaryDirectory(prefix="pipeline-") as folder:
        trail, cache = Path(folder) / "trail", effort.timing_cache
        effort = replace(effort, timing_cache=cache and cache.resolve())
        job = _BuildJob(
            model.resolve(),
            plan.resolve(),
            interface,
            replace(options, effort=effort),
            asked,
            trail,
        )
        lean = options.flags.version_compatible
        env = {**found, **(lean_library(target, version, Path(folder)) if lean else {})}
        try:
            made, peak = _in_child(env, job)
            if isinstance(made, BuildFailure):
                made = _with_trail(env, job, made)
        finally:
            job.spare.unlink(missing_ok=True)
    if isinstance(made, BuildFailure):
        plan.unlink(missing_ok=True)
        raise explain(job.source, target, made, interface.profiles)
    warnings = made.warnings
    if any("not self-consistent" in warning for warning in warnings):
        graph = NodeIndex(job.source)
        warnings = tuple(readable(warning, graph, interface.profiles) for warning in warnings)
    return replace(made, peak_memory=peak, warnings=warnings)


def _in_child(env: Mapping[str, str], job: _BuildJob) -> tuple[Built | BuildFailure, int]:
    """Runs a job in a child. Returns the result, and the child's peak memory in bytes."""
    with Child(env, time_limit=job.options.time_limit) as child:
        try:
            made: Built | BuildFailure | _NoEngine = child.call(_build_here, job)
        except ChildLate as late:
            raise BuildError(f"target {job.target}: the build {late.how}") from None
        except ChildDied as died:
            made = BuildFailure(died.words, died.how)
        except ChildFailed as failed:
            raise BuildError(f"target {job.target}: building {job.model.name}: {failed}") from None
    if isinstance(made, _NoEngine):
        made = BuildFailure(made.text)
    return made, child.peak_memory


def _with_trail(env: Mapping[str, str], job: _BuildJob, said: BuildFailure) -> BuildFailure:
    """Adds the trail to a failure. Runs again, verbosely, if the message names no node."""
    said = replace(said, **_trail_of(job.trail))
    if said.phase.startswith("plugin ") or (
        not said.died and find(NodeIndex(job.source), said).nodes
    ):
        return said
    again, _ = _in_child(env, replace(job, verbose=True))
    return replace(said, **_trail_of(job.trail)) if isinstance(again, BuildFailure) else said


def _build_here(job: _BuildJob) -> Built | _NoEngine:
    """Runs in the child."""
    with job.trail.open("w", buffering=1, encoding="utf-8") as trail:

        def doing(phase: str) -> None:
            trail.write(f"{_PHASE}{phase}\n")

        check_model(job.model)
        said = [text for name, text in _NOTES.items() if getattr(job.options, name)]
        if job.source != job.model:
            doing("half precision")
            half = write_in_half(job.model, job.source, job.options.precision, job.options.recipe)
            if not half:
                said.append("no node computes in half precision: half.onnx equals model.onnx")
        gpus = gpus_for(job.source, job.options)
        version = require(job.target)
        if job.options.flags.version_compatible:
            need_lean(job.target, version)
        trt = use(job.target)
        brought, warnings = load_plugins(trt, job.plugins, job.target, doing)
        # TensorRT keeps using the first logger of a process, so keep this logger alive
        logger = trt.Logger(trt.Logger.INTERNAL_ERROR)
        first = open_network(trt, job.target, logger)
        known = first.parser.supports_operator
        ready = prepare(trt, job.source, job.spare, job.target, brought, known)
        if job.verbose:
            return _build_verbosely(trt, ready.model, job, trail)
        doing("parse")
        watch = Stopwatch()
        with collected() as messages:
            try:
                with watch("tensorrt parse"):
                    builder, network, parser = parsed_network(ready.model, job.target)
                config = configure(trt, builder, network, job.interface, job.options)
                cache = TimingCache(job.options.effort.timing_cache, job.target)
                cache.attach(config)
                doing("build")
                with watch("tensorrt build"):
                    data = builder.build_serialized_network(network, config)
            except Exception as error:
                if type(error).__name__ != "PolygraphyException":
                    raise
                return _NoEngine("\n".join([*messages.errors, str(error)]))
        if data is None:
            return _NoEngine("\n".join([*messages.errors, "TensorRT returned no engine"]))
        layers = int(network.num_layers)
        kept = cache.save()
        said += [*warnings, *([cache.note] if cache.note else []), *messages.warnings]
        del parser, network, config, builder, first
        raw = memoryview(data)
        job.plan.write_bytes(raw)
        return Built(
            version,
            len(raw),
            _validity(trt, job.target, bytes(raw)),
            layers,
            tuple(dict.fromkeys(said)),
            dict(watch.seconds),
            ready.plugins,
            timing_cache=kept,
            gpus=gpus,
        )


def _build_verbosely(trt: Any, model: Path, job: _BuildJob, trail: Any) -> _NoEngine:
    """Parses and builds again, and writes each node that TensorRT reaches to the trail."""

    class TrailLog(trt.ILogger):  # type: ignore[misc]
        def log(self, severity: Any, message: str) -> None:
            del severity
            for line in _trail_lines(message):
                trail.write(f"{line}\n")

    opened = open_network(trt, job.target, TrailLog())
    trail.write(f"{_PHASE}parse\n")
    if not opened.parse_file(model):
        config = configure(trt, opened.builder, opened.network, job.interface, job.options)
        trail.write(f"{_PHASE}build\n")
        opened.builder.build_serialized_network(opened.network, config)
    return _NoEngine("")


def _trail_lines(message: str) -> Iterator[str]:
    for line in message.splitlines():
        if at := _AT_NODE.search(line):
            yield f"{_PARSING}{at['name']}"
        elif layers := _LAYER.findall(line):
            yield f"{_LAYERS}{_UNIT.join(layers)}"


def _trail_of(path: Path) -> dict[str, Any]:
    """Returns the fields of `BuildFailure` in a trail."""
    phase, parsing, layers = "", "", dict[str, None]()
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        if line.startswith(_PHASE):
            phase, parsing = line.removeprefix(_PHASE), ""
        elif line.startswith(_PARSING):
            parsing = line.removeprefix(_PARSING)
        # the builder costs all layers before it compiles, so all costed layers are candidates
        elif line.startswith(_LAYERS):
            layers |= dict.fromkeys(line.removeprefix(_LAYERS).split(_UNIT))
    return {"phase": phase, "parsing": parsing, "layers": tuple(layers)}


def _validity(trt: Any, target: Target, data: bytes) -> str:
    """Returns the result of TensorRT-RTX's validity check, which needs no GPU.

    Without a GPU, the result of a well-formed engine is INVALID without diagnostics, and
    MALFORMED_ENGINE for other bytes. The check reads only the header. The manifest's hash covers
    the rest.

    Raises:
        BuildError: The bytes are malformed.
    """
    if target.flavour != "tensorrt_rtx":
        return "not checked: this TensorRT has no engine validity check"
    from polygraphy.backend.trt import get_trt_logger

    with collected():  # without a driver the runtime reports that it has no GPU
        validity, diagnostics = trt.Runtime(get_trt_logger()).get_engine_validity(data)
    if int(diagnostics) & _MALFORMED:
        raise BuildError(
            f"target {target}: TensorRT reports that its new engine is malformed. Build again"
        )
    if "INVALID" in validity.name:  # the answer for every plan on a machine without a GPU
        return "well-formed (no diagnostics; a full check needs a GPU)"
    return f"well-formed ({validity.name}, diagnostics {int(diagnostics)})"
