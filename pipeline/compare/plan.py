"""Which runs are compared, at which sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.artifact.manifest import PointInfo
from pipeline.compare.run_names import TORCH, in_precision
from pipeline.compare.verdict import failed
from pipeline.graph.memory import Estimator
from pipeline.spec.dims import Size, shape_at
from pipeline.spec.model import Tolerance
from pipeline.spec.padding import padded_name
from pipeline.spec.profiles import Point, Profile


@dataclass(frozen=True)
class Job:
    """What is compared, and where.

    Args:
        inputs, outputs: shapes by name, in terms of the dims.
        tolerance: by output name.
        points: the sizes.
        memory_limit: bytes that a run may take by its estimate.
        padding: dim name to the multiple that the model inside is padded to.
        profiles: each has to be compared somewhere, if memory allows it.
        precision: the engine's.
        engine_tolerance: of all outputs of an engine, and of half.onnx, in place of `tolerance`.
    """

    inputs: Mapping[str, Sequence[Size | str]]
    outputs: Mapping[str, Sequence[Size | str]]
    tolerance: Mapping[str, Tolerance]
    points: Sequence[Point]
    memory_limit: int
    padding: Mapping[str, int] = field(default_factory=dict)
    profiles: Sequence[Profile] = ()
    precision: str = "fp32"
    engine_tolerance: Tolerance | None = None

    def tolerances(self, run: str) -> Mapping[str, Tolerance]:
        """What the outputs of a run are held to, by name."""
        if self.engine_tolerance is None or not in_precision(run):
            return self.tolerance
        return dict.fromkeys(self.outputs, self.engine_tolerance)

    @property
    def untold(self) -> bool:
        """True if nobody said how far an engine of this precision may be off."""
        return self.precision != "fp32" and self.engine_tolerance is None

    def symbols(self, point: Point) -> dict[str, int]:
        """The sizes of all names in the ONNX file: the dims, and the dims as padded."""
        padded = {padded_name(n): -(-point.sizes[n] // m) * m for n, m in self.padding.items()}
        return {**point.sizes, **padded}

    def shapes(self, point: Point) -> dict[str, tuple[int, ...]]:
        return {name: shape_at(shape, point.sizes) for name, shape in self.inputs.items()}


@dataclass
class Plan:
    """Which points are run, and why the others are not; made before anything runs."""

    run: list[Point] = field(default_factory=list)
    infos: list[PointInfo] = field(default_factory=list)
    shapes: list[dict[str, tuple[int, ...]]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def plan_points(job: Job, model: Path) -> Plan:
    """Sorts the points into those that fit into memory and those that don't.

    The shapes that ONNX's shape inference finds for the outputs are held against the declared
    ones at every point, also at those too large to run.
    """
    estimator = Estimator(model)
    plan = Plan()
    for point in job.points:
        plan.shapes.append(job.shapes(point))
        estimate = estimator.at(plan.shapes[-1], job.symbols(point))
        wrong = []
        if estimate.failure:
            plan.notes.append(f"{point}: output sizes not checked ahead: {estimate.failure}")
        if estimate.unknown:
            plan.notes.append(
                f"{point}: the memory of {estimate.unknown} tensors of unknown size is not counted"
            )
        for name, shape in job.outputs.items():
            want, got = shape_at(shape, point.sizes), estimate.output_shapes.get(name, ("?",))
            if want != got and all(isinstance(size, int) for size in got):
                wrong.append(failed((TORCH, "shape inference"), name, f"shape {got}, not {want}"))
        fits = estimate.peak_bytes <= job.memory_limit
        need, limit = _readable(estimate.peak_bytes), _readable(job.memory_limit)
        why = "" if fits else f"needs about {need}, the limit is {limit}"
        if fits:
            plan.run.append(point)
        plan.infos.append(
            PointInfo(point.label, dict(point.sizes), fits, why, estimate.peak_bytes, tuple(wrong))
        )
    return plan


def _readable(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 / 10 else f"{size / 2**20:.1f} MiB"
