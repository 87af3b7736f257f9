"""Runs an artifact's engine for the comparison, with the runtime that users use."""

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
from pipeline.machine.gpu import why_not
from pipeline.machine.target import Target, installed_version
from pipeline.runtime.engine import open_plan, settled
from pipeline.spec.dims import sizes_text
from pipeline.spec.file_names import PLAN
from pipeline.spec.findings import Facts, Note
from pipeline.spec.profiles import Point, Profile
from pipeline.spec.runner import Runner, run_once
from pipeline.spec.tensors import Feed, Precision
from pipeline.spec.verdicts import Check


def why_not_run(folder: Path, target: Target, manifest: Manifest) -> str:
    """Returns why the engine cannot run here; empty if it can."""
    if not (folder / PLAN).is_file():
        return "no engine was built"
    gpu = why_not(
        target,
        built_for=manifest.target.compute_capabilities,
        compatible=manifest.flags.hardware_compatible,
    )
    return gpu or _other_software(target, manifest)


def _other_software(target: Target, manifest: Manifest) -> str:
    built, here = manifest.target.version, installed_version(target)
    if here is None:
        return f"{target.flavour} is not installed here; {target.get}"
    if not manifest.loads_in(here):
        return f"the engine was built with {target.flavour} {built}, but {here} is installed"
    return why_no_runtime()


def why_no_runtime() -> str:
    """Returns why no engine can run on this machine's GPU; empty if the libraries are there."""
    if not all(_found(name) for name in ("cuda.bindings", "cuda.core")):
        return "cuda-python is not installed here; pip install 'trt-pipeline[runtime]'"
    return ""


def _found(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent package is missing too
        return False


def engine_name(profiles: Sequence[Profile], number: int) -> str:
    """Returns the name of an engine's run in a profile."""
    one = len(profiles) == 1
    return run_names.ENGINE if one else f"{run_names.ENGINE}-{profiles[number].name}"


@dataclass(frozen=True)
class OpenedEngine:
    """An engine that is open for the comparison.

    Args:
        loaded: The loaded engine; see `pipeline.runtime.engine`.
        profiles: The profiles in the plan's order.
        precision: The precision of the build.
    """

    loaded: Any
    profiles: Sequence[Profile]
    precision: Precision = "fp32"

    def name(self, number: int) -> str:
        """Returns the name of the run in a profile."""
        return engine_name(self.profiles, number)

    def runner(self, number: int, *, poison: bool = False) -> EngineRunner:
        """Returns a runner for one profile. It works while the engine is open."""
        return EngineRunner(self.loaded, number, self.name(number), self.precision, poison)

    def subject(self, number: int) -> Subject:
        """Returns the engine in one profile, for its checks."""
        return Subject(self.runner(number), self.runner(number, poison=True))


@dataclass(frozen=True)
class EngineRunner:
    """Runs an open engine in one profile; see `pipeline.spec.runner.Runner`.

    Args:
        loaded: The loaded engine; see `pipeline.runtime.engine`.
        number: The profile's number.
        name: The name of the run.
        precision: The precision of the build.
        poison: Whether to fill the outputs with 0xFF before each run.
    """

    loaded: Any
    number: int
    name: str
    precision: Precision = "fp32"
    poison: bool = False

    def run(self, feeds: Iterable[Feed]) -> Iterator[dict[str, np.ndarray]]:
        """Yields the outputs by name for each feed."""
        for feed in feeds:
            self.loaded.profile, self.loaded.poison = self.number, self.poison
            yield {name: np.asarray(value) for name, value in self.loaded(dict(feed)).items()}


@dataclass(frozen=True)
class WithinMemory:
    """A runner that gives no outputs if the GPU has too little memory.

    Args:
        runner: The runner to call.
        points: The sizes of the feeds, in order.
        notes: Gets a note for each point without outputs.
        called: The name of the run; the runner's name by default.
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
        """Yields the outputs by name for each feed; {} if they do not fit into memory."""
        for feed, point in zip(feeds, self.points, strict=True):
            try:
                outputs = run_once(self.runner, feed)
            except OutOfMemory as error:
                facts: Facts = {"run": self.name, "label": point.label, "sizes": dict(point.sizes)}
                self.notes.append(Note("engine-out-of-memory", {**facts, "reason": str(error)}))
                outputs = {}
            yield outputs


@contextmanager
def opened(
    folder: Path, manifest: Manifest, plugins: Sequence[str] = (), host_code: bool = False
) -> Iterator[OpenedEngine]:
    """Opens the engine of a folder whose manifest may not be written yet, and frees it afterwards.

    Args:
        folder: The artifact's folder.
        manifest: The artifact's manifest.
        plugins, host_code: The code that the engine may run; see `pipeline.load`.

    Raises:
        PipelineError: The engine does not load; see `pipeline.runtime.engine`.
    """

    plan = (folder / PLAN).read_bytes()
    how = settled(manifest, host_code)
    with open_plan(plan, manifest, where=PLAN, plugins=plugins, how=how) as loaded:
        precision = cast(Precision, manifest.precision)
        yield OpenedEngine(loaded, manifest.interface.profiles, precision)


@dataclass
class EngineRuns:
    """The results of an engine.

    Args:
        runs: The outputs in each profile; {} for a point that the profile does not allow.
        checks: The checks beyond the numbers.
        idle: The profiles in which no point ran.
        notes: Points and sizes of checks that did not fit into the GPU's memory, and checks that
            were not done.
    """

    runs: Runs = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)
    idle: list[str] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)

    def add(self, found: Checked) -> None:
        """Adds the results of checks."""
        self.checks += found.checks
        self.notes += found.notes

    @property
    def missing(self) -> str:
        """What was not compared, as text; empty if every profile was compared."""
        return f"no size of profile {', '.join(self.idle)} was compared" if self.idle else ""


def run_engine(
    engine: OpenedEngine,
    ground: Ground,
    job: Job,
    batch: Batch | None,
    forgiven: Collection[Part],
) -> EngineRuns:
    """Runs the engine in every profile at every allowed point, and checks the engine.

    Args:
        engine: The engine; see `opened`.
        ground: The sizes and the inputs.
        job: The tolerances.
        batch: The batch whose rows are checked, if there is one.
        forgiven: How rows depend on each other in the model; see `pipeline.compare.rows`.

    Raises:
        RunFailed: The engine fails at a point.
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
        ground.announce(f"{subject.name}: check determinism, order and rows")
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
    """Checks the rows of a batch near the profile's opt, or at the first sizes with two rows that
    fit into the GPU's memory. Adds a note if there are no such sizes."""
    name = batch.dim.name
    low, opt, high = profile.ranges[name]
    opts = [point for point in points if point.sizes == profile.sizes(1)]
    tries = [(point.sizes, max(opt, point.sizes[name])) for point in [*opts, *points]]
    tries += [(point.sizes, low) for point in points]  # the fewest rows
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
