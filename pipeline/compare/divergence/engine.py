"""Where an engine parts from ONNX Runtime: the first value that it computes otherwise.

Engines are built with values of model.onnx as further outputs, a few spread over it at first, then
between the last that is right and the first that is off. An output in the middle of the graph ends
what TensorRT fuses there, so the fault may go away: then one value at a time is asked for, and if
the fault still goes, the answer is between which values TensorRT fuses what it gets wrong.

Each build takes as long as the engine's own; 200 values take two or three, one at a time eight.
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
from pipeline.build.build import build
from pipeline.build.settings import BuildOptions
from pipeline.errors import InputError
from pipeline.graph.names import name_nodes
from pipeline.graph.origin import called, origin_of
from pipeline.graph.session import run_onnx
from pipeline.machine.target import find_target
from pipeline.runtime.engine import load, open_plan
from pipeline.spec.closeness import Difference
from pipeline.spec.dims import DimExpr, check_rules
from pipeline.spec.effort import DEFAULT_EFFORT
from pipeline.spec.file_names import MODEL, PLAN
from pipeline.spec.profiles import parse_sizes
from pipeline.spec.tensors import Feed, Output, Precision

Announce = Callable[[str], None]
# makes an engine with these values as further outputs, and measures how far all are off
Distances = Callable[[Sequence[str] | None], Mapping[str, float]]
_AT_ONCE = 24  # values that one engine gives beside its outputs
# Distances, of a value's norm, that rounding in a precision makes; only beyond is there a fault
NOISE: Mapping[str, float] = {"fp32": 1e-4, "tf32": 1e-2, "fp16": 3e-2}
_ZERO = 1e-6  # the norm of a value of zeros
_PART = 10  # a value is off if it is so by this part of how far the worst output is
_FLOATS: Mapping[int, str] = {
    onnx.TensorProto.FLOAT: "float32", onnx.TensorProto.FLOAT16: "float16",
    onnx.TensorProto.DOUBLE: "float64",
}  # fmt: skip


@dataclass(frozen=True)
class EngineParting:
    """Where an engine parts from the reference.

    Args:
        far: how far the engine's worst output is off, of the reference's norm.
        first: the first value that is off; none where no output is.
        before: the last value, in the graph's order, that was seen to be right.
        fused: with any value between the two as an output the engine's own outputs are right.
        fresh: another engine of the same model is right.
        builds: engines that were made.
    """

    far: float
    first: str = ""
    before: str = ""
    fused: bool = False
    fresh: bool = False
    builds: int = 0


def distance(got: np.ndarray, wanted: np.ndarray) -> float:
    """||got - wanted|| / ||wanted||; infinite for another shape, or NaN where there is none."""
    if got.shape != wanted.shape:
        return float("inf")
    return Difference(wanted, got).norm(_ZERO)


def search(
    values: Sequence[str], outputs: Sequence[str], run: Distances, noise: float, announce: Announce
) -> EngineParting:
    """The first of the values that an engine computes otherwise.

    Args:
        values: in an order in which each is made of those before it.
        outputs: the engine's own.
        run: makes an engine with these values as further outputs, and tells how far they and the
            outputs are off; for None of the engine that there is.
        noise: how far rounding may be off.
    """
    first = run(None)
    far = max(first[name] for name in outputs)
    if far <= noise:
        return EngineParting(far)
    tries = _Tries(values, outputs, run, announce, max(noise, min(far, 1.0) / _PART))
    low, high = -1, len(values)  # right up to here, off from here on
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
    """The last value that is right and the first that is off, and whether with any between them as
    an output the engine's own outputs are right."""
    while high - low > 1:
        middle = (low + high) // 2
        off, healed = tries.run([middle])
        if healed:
            break
        low, high = (low, middle) if off else (middle, high)
    else:
        return low, high, False
    start = end = middle  # of those with which the outputs are right
    while start - low > 1:
        middle = (low + start) // 2
        low, start = (low, middle) if tries.run([middle])[1] else (middle, start)
    while high - end > 1:
        middle = (end + high) // 2
        end, high = (middle, high) if tries.run([middle])[1] else (end, middle)
    return low, high, True


class _Tries:
    """Engines with further outputs, and what they show."""

    def __init__(
        self, values: Sequence[str], outputs: Sequence[str], run: Distances, announce: Announce,
        bar: float,
    ) -> None:  # fmt: skip
        self._values, self._outputs, self._run, self._announce = values, outputs, run, announce
        self._bar, self.builds = bar, 0

    def run(self, chosen: Sequence[int]) -> tuple[list[int], bool]:
        """Those of the values that are off, and whether nothing is, the outputs neither."""
        self.builds += 1
        self._announce(f"engine {self.builds}, {len(chosen)} values as further outputs")
        found = self._run([self._values[n] for n in chosen])
        off = [n for n in chosen if found[self._values[n]] > self._bar]
        return off, not off and max(found[name] for name in self._outputs) <= self._bar


class Engines:
    """Makes engines of an artifact's model with further outputs, and holds them against ONNX
    Runtime.

    Args:
        artifact: with an engine.
        sizes: of every dim.
        plugins: what TensorRT loads first.
    """

    def __init__(
        self, artifact: Artifact, sizes: Mapping[str, int], plugins: Sequence[str]
    ) -> None:
        self.place = artifact.path
        self.manifest: Manifest = artifact.manifest
        self.model = artifact.model
        self.plugins = plugins
        self.feed: Feed = self.manifest.interface.sample(sizes, 0)
        self.proto = onnx.load(self.model, load_external_data=False)
        name_nodes(self.proto.graph)
        self.outputs = [output.name for output in self.proto.graph.output]
        self._floats = _float_values(self.proto)
        self.values = [name for name in self._floats if name not in self.outputs]

    def maker(self, value: str) -> onnx.NodeProto | None:
        """The node that makes a value."""
        return next((n for n in self.proto.graph.node if value in n.output), None)

    def __call__(self, names: Sequence[str] | None) -> dict[str, float]:
        """How far the outputs and these values are off; see `search`."""
        if names is None:
            wanted = next(run_onnx(self.model, [self.feed]))
            got = self._own()
            return {name: distance(got[name], wanted[name]) for name in self.outputs}
        with tempfile.TemporaryDirectory(prefix="pipeline-") as text:
            folder = Path(text)
            for path in self.model.parent.glob(f"{MODEL}*"):  # external data
                if path.name != MODEL:
                    (folder / path.name).symlink_to(path.resolve())
            proto = onnx.ModelProto()
            proto.CopyFrom(self.proto)
            proto.graph.output.extend(self._floats[name] for name in names)
            onnx.save(proto, folder / MODEL)
            wanted = next(run_onnx(folder / MODEL, [self.feed]))
            got = self._engine(folder, {name: wanted[name].ndim for name in names})
        return {name: distance(got[name], wanted[name]) for name in (*self.outputs, *names)}

    def _own(self) -> Mapping[str, np.ndarray]:
        """The outputs of the artifact's engine."""

        with load(self.place, plugins=self.plugins) as engine:
            return {name: np.array(array) for name, array in engine(self.feed).items()}

    def _engine(self, folder: Path, ranks: Mapping[str, int]) -> Mapping[str, np.ndarray]:
        """The outputs of the engine of a folder's model, `ranks` those of the further ones."""

        manifest = self.manifest
        target = find_target(manifest.target.name)
        level = manifest.build.optimization_level if manifest.build else None
        declared = manifest.interface
        options = BuildOptions(
            target, cast(Precision, manifest.precision), replace(DEFAULT_EFFORT, level=level),
            tuple(self.plugins),
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
        with open_plan(plan, wider, where=PLAN, plugins=self.plugins) as engine:
            return {name: np.array(array) for name, array in engine(self.feed).items()}


def _float_values(proto: onnx.ModelProto) -> dict[str, onnx.ValueInfoProto]:
    """The values of the main graph that hold floats, in the nodes' order; those are left out that
    hang on no input, and those of unknown rank, which can be no output of a valid model."""
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
    """numpy's name of a value's type; empty if it holds no floats, or is of unknown rank."""
    tensor = value.type.tensor_type
    return _FLOATS.get(tensor.elem_type, "") if tensor.HasField("shape") else ""


def locate_engine(
    place: Path, shape: str, announce: Announce, plugins: Sequence[str] = ()
) -> tuple[bool, str]:
    """Whether an artifact's engine agrees with ONNX Runtime, and if not where it parts.

    Builds anew, with the artifact's target, precision, profiles and optimisation level; needs its
    GPU. The artifact stays as it is.

    Args:
        shape: ``h=440,w=1024``; dims left out take their opt.

    Raises:
        InputError: a shape that is not legal.
        BuildError, EngineError: an engine did not come out, or did not run.
    """
    artifact = Artifact.open(place)
    manifest = artifact.manifest
    declared = manifest.interface
    sizes = parse_sizes(shape, declared.dims) if shape else declared.profiles[0].sizes(1)
    check_rules(declared.rules, sizes)
    if not any(profile.allows(sizes) for profile in declared.profiles):
        raise InputError(f"shape {shape!r}: no profile allows it")
    engines = Engines(artifact, sizes, plugins)
    found = search(engines.values, engines.outputs, engines, NOISE[manifest.precision], announce)
    return found.far <= NOISE[manifest.precision], describe_parting(
        found, engines.maker, manifest.precision
    )


def describe_parting(
    found: EngineParting, maker: Callable[[str], onnx.NodeProto | None], precision: str
) -> str:
    """What was found, in one line."""
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
