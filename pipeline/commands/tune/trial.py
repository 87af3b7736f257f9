"""Builds one candidate in a folder of its own, checks it as `verify` does, and times it."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.artifact.artifact import Artifact
from pipeline.artifact.manifest import Manifest
from pipeline.build.settings import BuildOptions
from pipeline.commands.bench.bench import bench
from pipeline.commands.bench.measure import Method
from pipeline.commands.tune.candidates import AS_IT_IS, Candidate
from pipeline.compare.engine_runs import why_not_run
from pipeline.compare.memory import Memory
from pipeline.compare.plan import CompareOptions
from pipeline.compare.runners import failures
from pipeline.convert.driver import build_artifact, compare_again, run_rewrite
from pipeline.errors import EngineError, PipelineError, first_line
from pipeline.machine.progress import Announce
from pipeline.machine.swap_folder import LINK_FROM_BYTES
from pipeline.machine.target import Target
from pipeline.spec.effort import Effort
from pipeline.spec.file_names import ENGINES
from pipeline.spec.profiles import Point


@dataclass(frozen=True)
class Time:
    """The time of one call at one set of sizes.

    Args:
        sizes: The size of each dim.
        ms: The median of single calls in milliseconds, on the GPU.
        graph: Whether the calls replay a CUDA graph.
        calls_per_second: With many calls at a time.
    """

    sizes: Mapping[str, int]
    ms: float
    graph: bool
    calls_per_second: float


@dataclass(frozen=True)
class Trial:
    """What came of one candidate.

    Args:
        name, text: See `Candidate`.
        key: The hash of everything that the result depends on.
        why: Why it can't be kept; empty if its results are right.
        build_s: Seconds of the build; None if there was none.
        seconds: Seconds of everything.
        times: The times, in the order of the sizes; empty if it can't be kept.
    """

    name: str
    text: str
    key: str = ""
    why: str = ""
    build_s: float | None = None
    seconds: float = 0.0
    times: tuple[Time, ...] = ()


@dataclass(frozen=True)
class Bench:
    """Builds, checks and times candidates of one artifact.

    Args:
        artifact: The artifact, which stays as it is.
        target: The TensorRT that builds.
        points: The sizes to time.
        method: How often calls are repeated.
        plugins: Files and names of plugins that the engine needs.
        announce: Called with each step that begins.
        memory: What the models gave, which is the same for all candidates of a file.
    """

    artifact: Artifact
    target: Target
    points: Sequence[Point]
    method: Method
    plugins: tuple[str, ...]
    announce: Announce
    memory: Memory = field(default_factory=dict)

    def attempt(self, candidate: Candidate, folder: Path, time_limit: float) -> Trial:
        """Makes the candidate's artifact in `folder`. An error becomes the trial's `why`.

        Args:
            candidate: What to build.
            folder: A folder that does not exist or has an earlier attempt.
            time_limit: The longest time of the build in seconds.
        """
        start = time.monotonic()
        build_s, why = None, ""
        times: tuple[Time, ...] = ()
        try:
            manifest = self._built(candidate, folder, time_limit)
            build_s = manifest.build.seconds if manifest.build is not None else None
            why = why_wrong(manifest)
            times = () if why else self.times(folder)
        except PipelineError as error:
            why = first_line(error)
        return Trial(
            candidate.name, candidate.text, "", why, build_s, time.monotonic() - start, times
        )

    def times(self, folder: Path) -> tuple[Time, ...]:
        """Times the engine in a folder.

        Raises:
            EngineError: A size can't be measured.
        """
        shapes = [",".join(f"{n}={s}" for n, s in p.sizes.items()) for p in self.points]
        report = bench(
            folder, shapes=[text for text in shapes if text], method=self.method,
            plugins=self.plugins,
        )  # fmt: skip
        found = []
        for point in report.points:
            timing = point.graph or point.plain
            if timing is None:
                raise EngineError(point.why)
            graph = point.graph is not None
            found.append(Time(point.sizes, timing.median_ms, graph, timing.calls_per_second))
        return tuple(found)

    def _built(self, candidate: Candidate, folder: Path, time_limit: float) -> Manifest:
        """The manifest of the built and verified candidate."""
        shutil.rmtree(folder, ignore_errors=True)
        others = shutil.ignore_patterns(ENGINES)
        shutil.copytree(self.artifact.path, folder, copy_function=_copy, ignore=others)
        mine = f"{candidate.name}: "

        def announce(text: str) -> None:
            self.announce(mine + text)

        if candidate.skip:
            run_rewrite(folder, announce=announce, skip=candidate.skip, plugins=self.plugins)
        own = self.artifact
        if candidate.name != AS_IT_IS or why_not_run(own.path, self.target, own.manifest):
            options = BuildOptions(
                self.target, candidate.precision, Effort(candidate.level), self.plugins,
                candidate.recipe, libraries=candidate.libraries, plain=candidate.plain,
                time_limit=time_limit, gpus=own.manifest.target.gpus,
                flags=own.manifest.flags,
            )  # fmt: skip
            opened = Artifact.open(folder, built=False)
            build_artifact(opened, options, candidate.profiles, announce)
        built = Artifact.open(folder)
        how = CompareOptions(plugins=self.plugins, memory=self.memory)
        return compare_again(built, built.manifest, None, how, announce)


def why_wrong(manifest: Manifest) -> str:
    """Why an engine can't be kept after its comparison; empty if all results are right."""
    comparison = manifest.comparison
    if comparison is None:
        return "it was not compared"
    if not comparison.passed:
        return failures(comparison)[0]
    if not manifest.engine_compared:
        return f"the engine was not compared: {manifest.engine_compared_why}"
    return ""


def _copy(source: str, to: str) -> None:
    """Links large files, as `pipeline.machine.swap_folder` does: they are never written in
    place."""
    path = Path(source)
    if path.stat().st_size >= LINK_FROM_BYTES:
        Path(to).hardlink_to(path)
    else:
        shutil.copy2(source, to)
