"""Replaces the weights of a plan that was built with the flag REFIT.

TensorRT's own parser reads the new ONNX file, so each weight goes through what the parser did to
the old one. From TensorRT 10 on, `OnnxParserRefitter` does this. Before, the new weights are taken
from the parsed network, by the name of the layer and the role of the weights in it. Source of this
way: ``timeRefit`` in trtexec (samples/common/sampleEngines.cpp of TensorRT 8.6).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.lib.stride_tricks import as_strided

from pipeline.build.custom_nodes import prepare
from pipeline.build.network import open_network
from pipeline.build.settings import BuildOptions
from pipeline.errors import BuildError, InputError
from pipeline.graph.files import inner_graphs
from pipeline.graph.same_structure import structure_change
from pipeline.machine.child import Child, ChildDied, ChildFailed
from pipeline.machine.resources import Stopwatch
from pipeline.machine.target import Target, use
from pipeline.plugins.loading import RequestedPlugin, find_plugins, library_folder, load_plugins
from pipeline.rewrite.half import write_in_half
from pipeline.spec.file_names import HALF

_SHOWN = 5
_FOLDED = "tmp_refittable_weight"
# the roles of weights by the type of their layer; the weights are attributes of the layer
_ROLES = {
    "CONSTANT": {"CONSTANT": "weights"},
    "CONVOLUTION": {"KERNEL": "kernel", "BIAS": "bias"},
    "DECONVOLUTION": {"KERNEL": "kernel", "BIAS": "bias"},
    "FULLY_CONNECTED": {"KERNEL": "kernel", "BIAS": "bias"},
    "SCALE": {"SCALE": "scale", "SHIFT": "shift"},
}
_CLASSES = {
    "CONSTANT": "IConstantLayer",
    "CONVOLUTION": "IConvolutionLayer",
    "DECONVOLUTION": "IDeconvolutionLayer",
    "FULLY_CONNECTED": "IFullyConnectedLayer",
    "SCALE": "IScaleLayer",
}


@dataclass(frozen=True)
class Refitted:
    """The facts of a refit.

    Args:
        plan_bytes: The size of the new plan in bytes.
        library_seconds: Seconds in TensorRT, by step.
        peak_memory: Peak memory of the process in bytes.
    """

    plan_bytes: int
    library_seconds: dict[str, float]
    peak_memory: int = 0


@dataclass(frozen=True)
class _RefitJob:
    """One refit for the child process."""

    plan: Path
    model: Path
    old_half: Path
    options: BuildOptions
    plugins: tuple[RequestedPlugin, ...]


def refit(plan: Path, model: Path, old_half: Path, options: BuildOptions) -> Refitted:
    """Replaces the weights in a plan by those of an ONNX file. Needs the GPU that the plan is for.

    Args:
        plan: The plan. It is overwritten.
        model: The rewritten ONNX file with the new weights, of the same structure as the one that
            the plan was built from. For fp16 and bf16, half.onnx is written beside it.
        old_half: The half.onnx that the plan was built from; used for fp16 and bf16 only.
        options: The options of the plan's build.

    Raises:
        InputError: The plan can't be refitted, half.onnx has another structure, or TensorRT does
            not take a weight, or misses one.
        BuildError: TensorRT failed or crashed.
    """
    target = options.target
    plugins = find_plugins(options.plugins, target)
    job = _RefitJob(plan.resolve(), model.resolve(), old_half.resolve(), options, plugins)
    with library_folder(target) as env, Child(env) as child:
        try:
            made = child.call(_refit_here, job)
        except ChildDied as died:
            raise BuildError(
                f"target {target}: refitting {model.name}: {died}", detail=died.words
            ) from None
        except ChildFailed as failed:
            raise BuildError(f"target {target}: refitting {model.name}: {failed}") from None
        return replace(made, peak_memory=child.peak_memory)


def _refit_here(job: _RefitJob) -> Refitted:
    """Runs in the child."""
    options, source = job.options, job.model
    if options.in_half:
        source = job.model.with_name(HALF)
        write_in_half(job.model, source, options.precision, options.recipe)
        check_structure(job.old_half, source)
    trt, watch, log = use(options.target), Stopwatch(), _Errors(options.target)
    logger = log.logger(trt)
    brought, _ = load_plugins(trt, job.plugins, options.target)
    opened = open_network(trt, options.target, logger)
    runtime = trt.Runtime(logger)
    with watch("tensorrt load"):
        engine = runtime.deserialize_cuda_engine(job.plan.read_bytes())
    if engine is None:
        raise log.failed("the plan does not load")
    if not engine.refittable:
        raise InputError("TensorRT reports that the plan is not refittable. Build with --refit")
    refitter = trt.Refitter(engine, logger)
    spare = source.with_name(f".{source.name}.parsed")
    owners: list[Any] = []
    try:
        known = opened.parser.supports_operator
        ready = prepare(trt, source, spare, options.target, brought, known).model
        with watch("tensorrt parse"):
            if hasattr(trt, "OnnxParserRefitter"):
                check_names(refitter.get_all_weights(), ready)
                if not trt.OnnxParserRefitter(refitter, logger).refit_from_file(str(ready)):
                    raise log.failed("the weights were refused")
            elif errors := opened.parse_file(ready):
                raise BuildError(f"target {options.target}: {errors[0].text}")
            else:
                owners += set_weights(trt, refitter, opened.network)
    finally:
        spare.unlink(missing_ok=True)
    _refuse_missing(_missing(trt, refitter))
    with watch("tensorrt refit"):
        if not refitter.refit_cuda_engine():
            raise log.failed("the refit failed")
    with watch("tensorrt serialise"):
        data = _serialised(trt, engine)
    if data is None:
        raise log.failed("the refitted engine can't be serialised")
    job.plan.unlink()  # another name of the file may be the old plan
    job.plan.write_bytes(memoryview(data))
    return Refitted(job.plan.stat().st_size, dict(watch.seconds))


class _Errors:
    """TensorRT's error messages."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._said: list[str] = []

    def logger(self, trt: Any) -> Any:
        """A logger that collects them. Keep it as long as TensorRT is used."""
        said, worst = self._said, (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR)

        class Logger(trt.ILogger):  # type: ignore[misc]
            def __init__(self) -> None:
                trt.ILogger.__init__(self)

            def log(self, severity: Any, message: str) -> None:
                if severity in worst:
                    said.append(message)

        return Logger()

    def failed(self, what: str) -> BuildError:
        """The error with the first message."""
        why = " ".join(self._said[0].split()) if self._said else "no reason given"
        return BuildError(
            f"target {self._target}: {what}: TensorRT reports: {why}. Build again with the new "
            "weights",
            detail="\n".join(self._said),
        )


def check_structure(old: Path, new: Path) -> None:
    """Raises `InputError` if an ONNX file has another structure than the engine's."""
    if change := structure_change(old, new):
        raise InputError(
            f"the new weights make another {new.name}: {change}. Convert again with these weights"
        )


def set_weights(trt: Any, refitter: Any, network: Any) -> list[Any]:
    """Gives a refitter the weights of a parsed network.

    Args:
        trt: The target's TensorRT.
        refitter: TensorRT's Refitter of an engine of the same structure.
        network: The parsed network.

    Returns:
        The weights. Keep them, the network and its parser until the engine is refitted: they own
        the memory.

    Raises:
        InputError: The refitter refuses a weight, because its number of elements or its dtype
            differs. Or the network lacks a weight of the engine. TensorRT would keep the old one:
            `Refitter.get_missing` has only what is combined with a weight that was set.
    """
    given: list[Any] = []
    wanted = dict.fromkeys(zip(*refitter.get_all(), strict=True))
    for name, role, weights in network_weights(trt, network):
        if (name, role) not in wanted:
            continue
        given.append(trt.Weights(weights))  # 8.6 takes no array
        if not refitter.set_weights(name, role, given[-1]):
            raise InputError(
                f"the {role.name.lower()} of layer {name} does not fit the engine: it has "
                f"{weights.size} elements of {weights.dtype}. Build again with the new weights"
            )
        del wanted[name, role]
    _refuse_missing([f"{name} ({role.name.lower()})" for name, role in wanted])
    return given


def check_names(names: Iterable[str], model: Path) -> None:
    """Checks that a file has all weights of an engine, before TensorRT's parser sets them.

    The parser names what it folds, such as a batch normalisation, ``tmp_refittable_weight``. It
    sets these weights too. Source: ModelRefitter.cpp and WeightsContext.cpp of onnx-tensorrt.

    Args:
        names: `Refitter.get_all_weights`.
        model: The ONNX file with the new weights.

    Raises:
        InputError: A name is neither an initializer nor the output of a Constant.
    """
    known = set()
    for graph in inner_graphs(onnx.load(model, load_external_data=False).graph):
        known |= {tensor.name for tensor in graph.initializer}
        known |= {node.output[0] for node in graph.node if node.op_type == "Constant"}
    _refuse_missing([n for n in names if n not in known and not n.startswith(_FOLDED)])


def _refuse_missing(names: Sequence[str]) -> None:
    """Raises `InputError` if there are names of weights that were not set."""
    if names:
        more = ", ..." if len(names) > _SHOWN else ""
        raise InputError(
            f"the new weights lack {len(names)} weights of the engine: "
            f"{', '.join(names[:_SHOWN])}{more}. Build again with the new weights"
        )


def network_weights(trt: Any, network: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yields the layer's name, the role and the array of all float weights of a network.

    TensorRT refits no integers ("Int32 weights are not permitted for refittable layer").
    """
    for place in range(network.num_layers):
        layer = network.get_layer(place)
        kind, name = layer.type.name, layer.name
        if kind not in _ROLES:
            continue
        # get_layer returns an ILayer; TensorRT's samples change the class too
        layer.__class__ = getattr(trt, _CLASSES[kind])
        for role, attribute in _ROLES[kind].items():
            weights = getattr(layer, attribute)
            if isinstance(weights, np.ndarray) and weights.size and weights.dtype.kind == "f":
                yield name, getattr(trt.WeightsRole, role), _with_strides(weights)


def _with_strides(weights: np.ndarray) -> np.ndarray:
    """The array with the right strides. 8.6.0 gives stride 0 with NumPy 2, newer than its own."""
    return as_strided(weights, (weights.size,), (weights.itemsize,))


def _missing(trt: Any, refitter: Any) -> list[str]:
    """What the refitter still needs: names of weights, or of layers with the role.

    Before TensorRT 10, asking for names fails if a weight has none.
    """
    if hasattr(trt, "OnnxParserRefitter"):
        return list(refitter.get_missing_weights())
    pairs = zip(*refitter.get_missing(), strict=True)
    return [f"{name} ({role.name.lower()})" for name, role in pairs]


def _serialised(trt: Any, engine: Any) -> Any:
    """The plan of a refitted engine, which can be refitted again."""
    if not hasattr(getattr(trt, "SerializationFlag", None), "INCLUDE_REFIT"):
        return engine.serialize()
    config = engine.create_serialization_config()
    config.clear_flag(trt.SerializationFlag.EXCLUDE_WEIGHTS)
    config.set_flag(trt.SerializationFlag.INCLUDE_REFIT)
    return engine.serialize_with_config(config)
