"""Plans the sizes of a comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.artifact.manifest import Manifest, PointInfo
from pipeline.compare.memory import Memory
from pipeline.compare.run_names import TORCH, in_precision
from pipeline.compare.verdict import other_shape
from pipeline.graph.memory import Estimator
from pipeline.machine.resources import default_limit
from pipeline.spec.dims import shape_at
from pipeline.spec.findings import Facts, Note, note
from pipeline.spec.interface import Interface
from pipeline.spec.padding import padded_name
from pipeline.spec.profiles import Point, parse_sizes, points
from pipeline.spec.tensors import Feed, Tolerance


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """The options of a comparison.

    Args:
        memory_limit: The largest estimated memory of one run, in bytes. None for the default, which
            depends on the free memory.
        seed: The seed of the inputs' values.
        shapes: Further sizes, as text; only with the torch reference.
        quick: Compare at few sizes of each profile, and at no random sizes.
        plugins, host_code: The code that the engine may run; see `pipeline.load`.
        memory: Keeps what the models gave, for other comparisons in this process. By default, each
            comparison runs them.
    """

    memory_limit: int | None = None
    seed: int = 0
    shapes: tuple[str, ...] = ()
    quick: bool = False
    plugins: tuple[str, ...] = ()
    host_code: bool = False
    memory: Memory | None = None


@dataclass(frozen=True)
class Job:
    """The task of a comparison.

    Args:
        interface: The artifact's interface. Each profile must be compared at some size, if memory
            allows it.
        points: The sizes.
        memory_limit: The largest estimated memory of one run, in bytes.
        precision: The engine's precision.
        measured: The measured tolerance of each output of an engine in tf32 or half precision, by
            name; empty if one is stated.
    """

    interface: Interface
    points: Sequence[Point]
    memory_limit: int
    precision: str = "fp32"
    measured: Mapping[str, Tolerance] = field(default_factory=dict)

    def tolerances(self, run: str) -> Mapping[str, Tolerance]:
        """Returns the tolerance of each output of a run, by name."""
        if in_precision(run):
            return {**self.interface.engine_tolerances(self.precision), **self.measured}
        return self.interface.tolerances()

    @property
    def untold(self) -> bool:
        """True if no tolerance is stated or measured for an engine of this precision."""
        stated = self.precision in self.interface.engine_tolerance
        return self.precision != "fp32" and not stated and not self.measured

    def symbols(self, point: Point) -> dict[str, int]:
        """Returns the sizes of all names in the ONNX file: the dims, and the padded dims."""
        padding = self.interface.padding
        multiples = padding.multiples if padding is not None else {}
        padded = {padded_name(n): -(-point.sizes[n] // m) * m for n, m in multiples.items()}
        return {**point.sizes, **padded}

    def shapes(self, point: Point) -> dict[str, tuple[int, ...]]:
        shapes = self.interface.input_shapes
        return {name: shape_at(shape, point.sizes) for name, shape in shapes.items()}


def job_of(manifest: Manifest, options: CompareOptions, stored: Sequence[Feed] = ()) -> Job:
    """Returns the task: the sizes of the profiles, the given and stored sizes, and those of the
    user's values."""
    manifest.tolerances()  # raises an error for outputs without a tolerance
    declared = manifest.interface
    merged = manifest.merged
    extra: list[Mapping[str, int]] = [
        parse_sizes(text, declared.dims, merged) for text in options.shapes
    ]
    for feed in stored:
        extra.append(declared.sizes_of({name: array.shape for name, array in feed.items()}))
    if own := declared.sizes_of_values():
        extra.append(own)
    where = points(declared.dims, declared.profiles, extra, declared.rules, few=options.quick)
    return Job(declared, where, options.memory_limit or default_limit(), manifest.precision)


@dataclass
class ComparisonPlan:
    """The points that run, and why the others do not. The plan is made before any run."""

    run: list[Point] = field(default_factory=list)
    infos: list[PointInfo] = field(default_factory=list)
    shapes: list[dict[str, tuple[int, ...]]] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)

    def add(self, more: ComparisonPlan) -> None:
        """Adds the points of another plan."""
        self.run += more.run
        self.infos += more.infos
        self.shapes += more.shapes
        self.notes += more.notes


def plan_points(job: Job, model: Path) -> ComparisonPlan:
    """Separates the points that fit into memory from the others.

    At every point, also at those too large to run, the output shapes of ONNX's shape inference are
    compared with the declared shapes.
    """
    estimator = Estimator(model)
    plan = ComparisonPlan()
    for point in job.points:
        plan.shapes.append(job.shapes(point))
        estimate = estimator.at(plan.shapes[-1], job.symbols(point))
        at: Facts = {"label": point.label, "sizes": dict(point.sizes)}
        if estimate.failure:
            facts = {**at, "reason": estimate.failure}
            plan.notes.append(Note("sizes-not-inferred", facts))
        if estimate.unknown:
            plan.notes.append(Note("memory-not-counted", {**at, "count": estimate.unknown}))
        wrong = []
        for name, shape in job.interface.output_shapes.items():
            want, got = shape_at(shape, point.sizes), estimate.output_shapes.get(name, ("?",))
            sizes = tuple(size for size in got if isinstance(size, int))
            if want != got and len(sizes) == len(got):
                wrong.append(other_shape((TORCH, "shape inference"), name, sizes, want))
        need, limit = estimate.peak_bytes, job.memory_limit
        left_out = None
        if need <= limit:
            plan.run.append(point)
        else:
            left_out = note("too-large", need_bytes=need, limit_bytes=limit)
        plan.infos.append(PointInfo(point.label, dict(point.sizes), need, tuple(wrong), left_out))
    return plan
