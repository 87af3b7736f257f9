"""Running an artifact's engine for the comparison: through the runtime that users load it with."""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from pipeline.artifact.manifest import Manifest
from pipeline.compare import run_names
from pipeline.compare.engine_checks import Checked, Fitting, Subject, check_engine
from pipeline.compare.plan import Job
from pipeline.compare.rows import ROWS, Batch, Part, RowSizes, check_rows
from pipeline.compare.runners import Ground, Runs
from pipeline.errors import OutOfMemory
from pipeline.machine.gpu import find_gpu, why_not
from pipeline.machine.target import Target, installed_version
from pipeline.runtime.engine import open_plan
from pipeline.spec.dims import sizes_text
from pipeline.spec.file_names import PLAN
from pipeline.spec.findings import Facts, Note
from pipeline.spec.profiles import Point, Profile
from pipeline.spec.runner import Runner, run_once
from pipeline.spec.tensors import Feed, Precision
from pipeline.spec.verdicts import Check


def why_not_run(folder: Path, target: Target, manifest: Manifest) -> str:
    """Why the engine can't be run here; an empty text where it can."""
    if not (folder / PLAN).is_file():
        return "no engine was built"
    return why_not(target) or _other_software(target, manifest) or _other_gpu(manifest)


def _other_software(target: Target, manifest: Manifest) -> str:
    built, here = manifest.target.version, installed_version(target)
    if here is None:
        return f"{target.flavour} is not installed here; {target.get}"
    if built != here:
        return f"built with {target.flavour} {built}, here is {here}"
    if not all(_found(name) for name in ("cuda.bindings", "cuda.core")):
        return "cuda-python is not installed here; pip install 'trt-pipeline[runtime]'"
    return ""


def _other_gpu(manifest: Manifest) -> str:
    gpu, wanted = find_gpu(), manifest.target.compute_capability
    if isinstance(gpu, str) or wanted is None:
        return gpu if isinstance(gpu, str) else ""
    here = ".".join(map(str, gpu.capability))
    return "" if wanted == here else f"built for compute capability {wanted}, {gpu.name} has {here}"


def _found(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # not even the package that it is in
        return False


def engine_name(profiles: Sequence[Profile], number: int) -> str:
    """What an engine's run in one of its profiles is called."""
    one = len(profiles) == 1
    return run_names.ENGINE if one else f"{run_names.ENGINE}-{profiles[number].name}"


@dataclass(frozen=True)
class OpenedEngine:
    """An engine that was opened for the comparison.

    Args:
        loaded: see `pipeline.runtime.engine`.
        profiles: in the plan's order.
        precision: the precision that it was built in.
    """

    loaded: Any
    profiles: Sequence[Profile]
    precision: Precision = "fp32"

    def name(self, number: int) -> str:
        """What its run in a profile is called."""
        return engine_name(self.profiles, number)

    def runner(self, number: int, *, poison: bool = False) -> EngineRunner:
        """Runs the engine in one profile, while it is open."""
        return EngineRunner(self.loaded, number, self.name(number), self.precision, poison)

    def subject(self, number: int) -> Subject:
        """The engine in one profile, as its checks need it."""
        return Subject(self.runner(number), self.runner(number, poison=True))


@dataclass(frozen=True)
class EngineRunner:
    """Runs an open engine in one profile; see `pipeline.spec.runner.Runner`.

    Args:
        loaded: see `pipeline.runtime.engine`.
        number: the profile's number.
        poison: True fills the outputs with 0xFF before each run.
    """

    loaded: Any
    number: int
    name: str
    precision: Precision = "fp32"
    poison: bool = False

    def run(self, feeds: Iterable[Feed]) -> Iterator[dict[str, np.ndarray]]:
        """The outputs by name, feed by feed."""
        for feed in feeds:
            self.loaded.profile, self.loaded.poison = self.number, self.poison
            yield {name: np.asarray(value) for name, value in self.loaded(dict(feed)).items()}


@dataclass(frozen=True)
class WithinMemory:
    """A runner that gives no outputs where the GPU's memory does not suffice.

    Args:
        runner: what runs.
        points: the sizes of the feeds, in their order.
        notes: gets a note for each point without outputs.
        called: what the run is called; by default as the runner is.
    """

    runner: Runner
    points: Sequence[Point]
    notes: list[Note]
    called: str = ""

    @property
    def name(self) -> str:
        return self.called or self.runner.name

    @property
    def precision(self) -> Precision:
        return self.runner.precision

    def run(self, feeds: Iterable[Feed]) -> Iterator[Feed]:
        """The outputs by name, feed by feed; {} where they don't fit into memory."""
        for feed, point in zip(feeds, self.points, strict=True):
            try:
                outputs = run_once(self.runner, feed)
            except OutOfMemory as error:
                facts: Facts = {"run": self.name, "label": point.label, "sizes": dict(point.sizes)}
                self.notes.append(Note("engine-out-of-memory", {**facts, "reason": str(error)}))
                outputs = {}
            yield outputs


@contextmanager
def opened(folder: Path, manifest: Manifest, plugins: Sequence[str] = ()) -> Iterator[OpenedEngine]:
    """The engine of a folder whose manifest may not be written yet; freed afterwards.

    Args:
        plugins: files that it may load; see `pipeline.load`.

    Raises:
        PipelineError: it does not load; see `pipeline.runtime.engine`.
    """

    plan = (folder / PLAN).read_bytes()
    with open_plan(plan, manifest, where=PLAN, plugins=plugins) as loaded:
        precision = cast(Precision, manifest.precision)
        yield OpenedEngine(loaded, manifest.interface.profiles, precision)


@dataclass
class EngineRuns:
    """What came of an engine.

    Args:
        runs: its outputs in each profile, {} where the profile forbids the point.
        checks: beside the numbers.
        idle: profiles in which no point was run.
        notes: points, and sizes of checks, that did not fit into the GPU's memory; checks that
            were not done.
    """

    runs: Runs = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)
    idle: list[str] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)

    def add(self, found: Checked) -> None:
        """Takes over what came of checks."""
        self.checks += found.checks
        self.notes += found.notes

    @property
    def missing(self) -> str:
        """What was not compared, in words; empty where every profile was."""
        return f"no size of profile {', '.join(self.idle)} was compared" if self.idle else ""


def run_engine(
    engine: OpenedEngine,
    ground: Ground,
    job: Job,
    batch: Batch | None,
    forgiven: Collection[Part],
) -> EngineRuns:
    """Runs the engine in every profile at every point that the profile allows, and checks it.

    Args:
        engine: see `opened`.
        ground: the sizes and the inputs.
        job: the tolerances.
        batch: the batch whose rows are checked, if there is one.
        forgiven: how rows depend on each other in the model; see `pipeline.compare.rows`.

    Raises:
        RunFailed: it fails at a point.
    """
    done = EngineRuns()
    points, feeds = ground.points, ground.feeds
    for number, profile in enumerate(engine.profiles):
        subject = engine.subject(number)
        allowed = [n for n, point in enumerate(points) if profile.allows(point.sizes)]
        some = [points[n] for n in allowed]
        here = replace(ground, points=some, feeds=[feeds[n] for n in allowed])
        found = here.collect(WithinMemory(subject.plain, some, done.notes))
        outputs: list[Feed] = [{} for _ in points]
        for n, output in zip(allowed, found, strict=True):
            outputs[n] = output
        done.runs[subject.name] = outputs
        mine = [n for n in allowed if outputs[n]]
        done.idle += [] if mine else [profile.name]
        ground.announce(f"{subject.name}: again, in another order, row by row")
        with ground.watch("engine checks"):
            ran = [points[n] for n in mine]
            inputs, first = [feeds[n] for n in mine], [outputs[n] for n in mine]
            held_to = job.tolerances(subject.name)
            done.add(check_engine(subject, ran, inputs, first, held_to))
            if batch is not None and ran:
                done.add(_rows(subject, batch, profile, ran, job, forgiven))
    return done


def _rows(
    subject: Subject,
    batch: Batch,
    profile: Profile,
    points: Sequence[Point],
    job: Job,
    forgiven: Collection[Part],
) -> Checked:
    """The rows of a batch near the profile's opt, else at the first sizes with two rows that fit
    into the GPU's memory; a note in its place where there are none."""
    name = batch.dim.name
    low, opt, high = profile.ranges[name]
    opts = [point for point in points if point.sizes == profile.sizes(1)]
    tries = [(point.sizes, max(opt, point.sizes[name])) for point in [*opts, *points]]
    tries += [(point.sizes, low) for point in points]  # as few rows as there can be
    fits = Fitting(ROWS, subject.name)
    done = Checked()
    tried: list[RowSizes] = []
    for at, near in tries:
        found = batch.at(at, low, near, high)
        if found is None or found in tried:
            continue
        tried.append(found)
        with fits.at(sizes_text(found.sizes)):
            check = check_rows(
                subject.plain, batch, found, job.tolerances(subject.name), forgiven=forgiven
            )  # fmt: skip
            done.checks.append(check.info)
        if done.checks:
            break
    if not tried:
        facts: Facts = {"run": subject.name, "profile": profile.name}
        done.notes.append(Note("profile-without-two-rows", facts))
    done.notes += fits.notes()
    return done
