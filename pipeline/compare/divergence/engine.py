"""Finds the first value at which an engine differs from ONNX Runtime.

Engines are built with values of model.onnx as further outputs. At first the values are spread over
the model, then between the last right and the first wrong value. An output inside the graph
prevents fusion there, so the fault may disappear. Then one value at a time becomes an output. If
the fault still disappears, the result names the values between which TensorRT fuses wrongly.

Each build takes as long as the engine's own. 200 values need two or three builds, or eight builds
one value at a time.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import numpy as np
import onnx

from pipeline.artifact.artifact import Artifact
from pipeline.artifact.manifest import Manifest
from pipeline.artifact.values import filled
from pipeline.build.build import build
from pipeline.build.settings import BuildOptions
from pipeline.errors import InputError
from pipeline.graph.external_data import check_models
from pipeline.graph.names import name_nodes
from pipeline.graph.origin import called, origin_of
from pipeline.graph.session import run_onnx
from pipeline.machine.files import link_or_copy
from pipeline.machine.progress import Announce
from pipeline.machine.target import find_target
from pipeline.runtime.engine import load_own, open_plan, settled
from pipeline.spec.closeness import Difference
from pipeline.spec.dims import DimExpr, check_rules
from pipeline.spec.effort import DEFAULT_EFFORT
from pipeline.spec.file_names import MODEL, PLAN
from pipeline.spec.interface import Interface
from pipeline.spec.profiles import parse_sizes
from pipeline.spec.recipe import stored_recipe
from pipeline.spec.tensors import Feed, Output, Precision

# builds an engine with these values as further outputs, and measures all differences
Distances = Callable[[Sequence[str] | None], Mapping[str, float]]
_AT_ONCE = 24  # further outputs of one engine
# The largest distance from rounding in a precision, as a share of a value's norm
NOISE: Mapping[str, float] = {"fp32": 1e-4, "tf32": 1e-2, "fp16": 3e-2, "bf16": 0.2}
_ZERO = 1e-6  # a norm below this counts as zero
_PART = 10  # a value is wrong if its distance is above a tenth of the worst output's
_FLOATS: Mapping[int, str] = {
    onnx.TensorProto.FLOAT: "float32", onnx.TensorProto.FLOAT16: "float16",
    onnx.TensorProto.DOUBLE: "float64",
}  # fmt: skip


@dataclass(frozen=True)
class EngineParting:
    """The first difference of an engine from the reference.

    Args:
        far: The distance of the engine's worst output, as a share of the reference's norm.
        first: The first wrong value; empty if no output is wrong.
        before: The last value before it, in the graph's order, that is right.
        fused: True if the outputs are right as soon as any value between the two is an output.
        fresh: True if a new engine of the same model is right.
        builds: The number of built engines.
    """

    far: float
    first: str = ""
    before: str = ""
    fused: bool = False
    fresh: bool = False
    builds: int = 0


def distance(got: np.ndarray, wanted: np.ndarray) -> float:
    """Returns ||got - wanted|| / ||wanted||; infinite if the shapes or the NaN differ."""
    if got.shape != wanted.shape:
        return float("inf")
    return Difference(wanted, got).norm(_ZERO)


def search(
    values: Sequence[str], outputs: Sequence[str], run: Distances, noise: float, announce: Announce
) -> EngineParting:
    """Finds the first value that an engine computes differently.

    Args:
        values: The values in topological order.
        outputs: The engine's own outputs.
        run: Builds an engine with these values as further outputs, and returns the distances of all
            outputs. For None it measures the existing engine.
        noise: The largest distance that rounding makes.
        announce: Called with each build.
    """
    first = run(None)
    far = max(first[name] for name in outputs)
    if far <= noise:
        return EngineParting(far)
    tries = _Tries(values, outputs, run, announce, max(noise, min(far, 1.0) / _PART))
    low, high = -1, len(values)  # right up to `low`, wrong from `high` on
    while high - low > 1:
        step = -(-(high - low - 1) // _AT_ONCE)
        chosen = list(range(low + 1 + step // 2, high, step)) or [low + 1]
        off, healed = tries.run(chosen)
        if healed:
            if tries.run([])[1]:
                return EngineParting(far, fresh=True, builds=tries.builds)
            low, high, fused = _one_by_one(tries, low, high)
            break
        high = min(off, default=high)
        low = max((n for n in chosen if n < high), default=low)
    else:
        fused = False
    value = values[high] if high < len(values) else max(outputs, key=first.__getitem__)
    return EngineParting(far, value, values[low] if low >= 0 else "", fused, builds=tries.builds)


def _one_by_one(tries: _Tries, low: int, high: int) -> tuple[int, int, bool]:
    """Returns the last right value, the first wrong value, and `EngineParting.fused`."""
    while high - low > 1:
        middle = (low + high) // 2
        off, healed = tries.run([middle])
        if healed:
            break
        low, high = (low, middle) if off else (middle, high)
    else:
        return low, high, False
    start = end = middle  # the values that make the outputs right
    while start - low > 1:
        middle = (low + start) // 2
        low, start = (low, middle) if tries.run([middle])[1] else (middle, start)
    while high - end > 1:
        middle = (end + high) // 2
        end, high = (middle, high) if tries.run([middle])[1] else (end, middle)
    return low, high, True


class _Tries:
    """Builds engines with further outputs, and judges them."""

    def __init__(
        self, values: Sequence[str], outputs: Sequence[str], run: Distances, announce: Announce,
        bar: float,
    ) -> None:  # fmt: skip
        self._values, self._outputs, self._run, self._announce = values, outputs, run, announce
        self._bar, self.builds = bar, 0

    def run(self, chosen: Sequence[int]) -> tuple[list[int], bool]:
        """Returns the wrong values, and whether all values and outputs are right."""
        self.builds += 1
        self._announce(f"build engine {self.builds} with {len(chosen)} further outputs")
        found = self._run([self._values[n] for n in chosen])
        off = [n for n in chosen if found[self._values[n]] > self._bar]
        return off, not off and max(found[name] for name in self._outputs) <= self._bar


class Engines:
    """Builds engines of an artifact's model with further outputs, and compares them with ONNX
    Runtime.

    Args:
        artifact: An artifact with an engine.
        sizes: The size of every dim.
        plugins: The plugins that TensorRT loads first.
    """

    def __init__(
        self, artifact: Artifact, sizes: Mapping[str, int], plugins: Sequence[str]
    ) -> None:
        self.place = artifact.path
        self.manifest: Manifest = filled(artifact.manifest, artifact.path)
        self.model = artifact.model
        self.plugins = plugins
        self.feed: Feed = self.manifest.interface.sample(sizes, 0)
        self.proto = onnx.load(self.model, load_external_data=False)
        name_nodes(self.proto.graph)
        self.outputs = [output.name for output in self.proto.graph.output]
        self._floats = _float_values(self.proto)
        self.values = [name for name in self._floats if name not in self.outputs]

    def maker(self, value: str) -> onnx.NodeProto | None:
        """Returns the node that makes a value."""
        return next((n for n in self.proto.graph.node if value in n.output), None)

    def __call__(self, names: Sequence[str] | None) -> dict[str, float]:
        """Returns the distances of the outputs and of these values; see `search`."""
        if names is None:
            wanted = next(run_onnx(self.model, [self.feed]))
            got = self._own()
            return {name: distance(got[name], wanted[name]) for name in self.outputs}
        with tempfile.TemporaryDirectory(prefix="pipeline-") as text:
            folder = Path(text)
            for path in self.model.parent.glob(f"{MODEL}*"):  # external data
                if path.name != MODEL:
                    link_or_copy(path.resolve(), folder / path.name)
            proto = onnx.ModelProto()
            proto.CopyFrom(self.proto)
            proto.graph.output.extend(self._floats[name] for name in names)
            onnx.save(proto, folder / MODEL)
            wanted = next(run_onnx(folder / MODEL, [self.feed]))
            got = self._engine(folder, {name: wanted[name].ndim for name in names})
        return {name: distance(got[name], wanted[name]) for name in (*self.outputs, *names)}

    def _own(self) -> Mapping[str, np.ndarray]:
        """Returns the outputs of the artifact's engine."""

        with load_own(self.place, self.plugins, settled(self.manifest)) as engine:
            return {name: np.array(array) for name, array in engine(self.feed).items()}

    def _engine(self, folder: Path, ranks: Mapping[str, int]) -> Mapping[str, np.ndarray]:
        """Builds a folder's model and returns its outputs; `ranks` has the further outputs."""

        manifest = self.manifest
        target = find_target(manifest.target.name)
        level = manifest.build.optimization_level if manifest.build else None
        declared = manifest.interface
        options = BuildOptions(
            target, cast(Precision, manifest.precision), replace(DEFAULT_EFFORT, level=level),
            tuple(self.plugins), stored_recipe(self.place), gpus=manifest.target.gpus,
            flags=manifest.flags,
        )  # fmt: skip
        build(folder / MODEL, folder / PLAN, declared, options)
        more = tuple(
            Output(
                name,
                tuple(DimExpr(f"size_{n}") for n in range(rank)),
                dtype=_float_type(self._floats[name]),
            )
            for name, rank in ranks.items()
        )
        wider = replace(manifest, interface=replace(declared, outputs=(*declared.outputs, *more)))
        plan = (folder / PLAN).read_bytes()
        with open_plan(plan, wider, where=PLAN, plugins=self.plugins, how=settled(wider)) as engine:
            return {name: np.array(array) for name, array in engine(self.feed).items()}


def _float_values(proto: onnx.ModelProto) -> dict[str, onnx.ValueInfoProto]:
    """Returns the float values of the main graph, in the nodes' order.

    Values that depend on no input are left out. So are values of unknown rank, because a valid
    model cannot have them as outputs.
    """
    inferred = onnx.shape_inference.infer_shapes(proto).graph
    known = {v.name: v for v in (*inferred.value_info, *inferred.output)}
    varying = {value.name for value in proto.graph.input}
    found = {}
    for node in proto.graph.node:
        if varying.isdisjoint(node.input):
            continue
        varying.update(node.output)
        if node.op_type != "Shape":
            made = [known[name] for name in node.output if name in known]
            found.update({value.name: value for value in made if _float_type(value)})
    return found


def _float_type(value: onnx.ValueInfoProto) -> str:
    """Returns numpy's name of a value's float type; empty for other types or unknown rank."""
    tensor = value.type.tensor_type
    return _FLOATS.get(tensor.elem_type, "") if tensor.HasField("shape") else ""


def locate_engine(
    place: Path, shape: str, announce: Announce, plugins: Sequence[str] = ()
) -> tuple[bool, str]:
    """Finds where an artifact's engine starts to differ from ONNX Runtime.

    Builds new engines with the artifact's target, precision, profiles and optimisation level. Needs
    the engine's kind of GPU. Does not change the artifact.

    Args:
        place: The artifact's folder.
        shape: ``h=440,w=1024``. Other dims use their opt.
        announce: Called with each build.
        plugins: The plugins that TensorRT loads first.

    Returns:
        Whether the engine agrees, and the result in one line.

    Raises:
        InputError: The shape is not legal.
        BuildError, EngineError: An engine cannot be built, or cannot run.
    """
    artifact = Artifact.open(place)
    manifest = artifact.manifest
    check_models(place, manifest.files, manifest.interface)
    declared = manifest.interface
    sizes = parse_sizes(shape, declared.dims) if shape else _opt(declared)
    check_rules(declared.rules, sizes)
    if not any(profile.allows(sizes) for profile in declared.profiles):
        raise InputError(
            f"--shape {shape!r} is outside every profile. Pass sizes that a profile allows"
        )
    engines = Engines(artifact, sizes, plugins)
    found = search(engines.values, engines.outputs, engines, NOISE[manifest.precision], announce)
    return found.far <= NOISE[manifest.precision], describe_parting(
        found, engines.maker, manifest.precision
    )


def _opt(declared: Interface) -> dict[str, int]:
    if not declared.profiles:
        raise InputError("the artifact has no profile. Pass sizes with --shape")
    return declared.profiles[0].resolve(declared.dims).sizes(1)


def describe_parting(
    found: EngineParting, maker: Callable[[str], onnx.NodeProto | None], precision: str
) -> str:
    """Returns the result in one line."""
    if found.fresh:
        return (
            f"the worst output differs by {found.far:.1e} of its norm, but a new engine built from "
            "the same model.onnx is right. TensorRT chose other kernels, or the plan belongs to "
            "another model. Run `pipeline build` again"
        )
    if not found.first:
        return (
            f"agrees with ONNX Runtime: the worst output differs by {found.far:.1e} of its norm "
            f"(the limit for {precision} is {NOISE[precision]:g})"
        )
    node = maker(found.first)
    who = f"{called(node)}{origin_of(node)}" if node is not None else "the output"
    before = f"; {found.before} is right" if found.before else ""
    ends = f"the worst output differs by {found.far:.1e} of its norm; {found.builds} engines built"
    if found.fused:
        return (
            f"wrong in the layers that TensorRT fuses from {found.before or 'the inputs'} up to "
            f"{who}: if any value between them is an output, the engine is right ({ends})"
        )
    return f"first difference: {who}: {found.first}{before} ({ends})"
