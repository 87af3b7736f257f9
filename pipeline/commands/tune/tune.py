"""`pipeline tune`: finds the fastest engine for this machine's GPU whose results are right.

Each candidate is built in a folder beside the artifact (``ARTIFACT.tune``), verified like the
artifact, and timed like `pipeline bench` does. An interrupted run continues: what was tried stays
in that folder. At the end the best candidate replaces the artifact, and the folder is removed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.artifact.artifact import Artifact
from pipeline.artifact.manifest import now
from pipeline.artifact.records import decode, encode
from pipeline.artifact.stored import has_stored
from pipeline.commands.bench.measure import Method
from pipeline.commands.tune.candidates import Candidate, as_it_is, changes, naive
from pipeline.commands.tune.plot import write_plot
from pipeline.commands.tune.search import search
from pipeline.commands.tune.trial import Bench, Trial
from pipeline.compare import run_names
from pipeline.compare.engine_runs import why_no_runtime
from pipeline.convert.keys import content_of, pipeline_hash
from pipeline.convert.recipe import precision_and_recipe
from pipeline.convert.workspace import opened_artifact
from pipeline.errors import ArtifactError, InputError, PipelineError, TargetMissing, first_line
from pipeline.graph.external_data import check_models
from pipeline.machine.files import write_whole
from pipeline.machine.gpu import find_gpu, why_not
from pipeline.machine.lock import Taken, free, take
from pipeline.machine.progress import Announce, silent
from pipeline.machine.target import find_target, installed_version, require
from pipeline.runtime.trust import check_given
from pipeline.spec.file_names import ENGINES, MANIFEST, TUNING, TUNING_PLOT
from pipeline.spec.profiles import sizes_to_time

OUT_OF_TIME = "not tried: the time was over"
_RESULTS = "trials.json"


@dataclass(frozen=True)
class Tuning:
    """The engines that were tried for an artifact, and which one was kept.

    Args:
        name, target, version, precision: Those of the artifact.
        gpu: The GPU on which they were timed.
        date: When the search ended.
        kept: The name of the trial whose engine the artifact has now; empty if none was right.
        trials: All candidates, in the order in which they were tried.
    """

    name: str
    target: str
    version: str | None
    precision: str
    gpu: str
    date: str
    kept: str
    trials: tuple[Trial, ...]

    @property
    def ok(self) -> bool:
        """True if the artifact has a right engine."""
        return bool(self.kept)

    @property
    def complete(self) -> bool:
        """True if the time was enough to try every candidate."""
        return all(trial.why != OUT_OF_TIME for trial in self.trials)

    def to_json(self) -> str:
        """The text of ``tuning.json``."""
        return json.dumps(encode(self), indent=1, allow_nan=False) + "\n"


def tune(
    place: Path,
    *,
    shapes: Sequence[str] = (),
    minutes: float = 30.0,
    method: Method = Method(),  # noqa: B008  # frozen
    plugins: Sequence[str] = (),
    announce: Announce = silent,
) -> Tuning:
    """Tries other builds of an artifact's engine, and keeps the fastest one that is right.

    Args:
        place: The artifact's folder.
        shapes: The sizes to be fast at, as text (``h=440,w=1024``). By default min, opt and max of
            every profile. Each counts the same.
        minutes: No build begins after this time, and none goes on. The best engine so far is kept.
        method: How often calls are repeated.
        plugins: Plugins that the engine needs; see `pipeline.plugins.loading`.
        announce: Called with each step that begins.

    Raises:
        ArtifactError, InputError: There is no artifact, it stores no outputs to compare with, a
            size is not legal, or another ``tune`` of this artifact is running.
        TargetMissing: No GPU here can run the target's engines, or a library for that is missing.
    """
    artifact = Artifact.open(place)
    manifest, declared = artifact.manifest, artifact.manifest.interface
    check_given(manifest, tuple(plugins), str(place))
    check_models(place, manifest.files, declared)
    base = manifest.reference
    if base != run_names.EXPORTED and not has_stored(place, base):
        raise ArtifactError(
            f"{place}: no outputs of {base} are stored, and tune compares each engine with them. "
            f"Run `pipeline verify {place} --torch` first, here or where {base} runs"
        )
    target = find_target(manifest.target.name)
    require(target)
    why, gpu = why_not(target) or why_no_runtime(), find_gpu()
    if why or isinstance(gpu, str):
        raise TargetMissing(f"{place}: tune needs a GPU that runs the engine: {why or gpu}")
    profiles = tuple(profile.resolve(declared.dims) for profile in declared.profiles)
    points = sizes_to_time(declared.dims, profiles, declared.rules, shapes)
    start = as_it_is(manifest, profiles, precision_and_recipe(artifact, None, None)[1])
    bench = Bench(artifact, target, points, method, tuple(plugins), announce)
    key = content_of(
        [
            hashlib.sha256((place / MANIFEST).read_bytes()).hexdigest(), pipeline_hash(),
            installed_version(target), gpu.name, method, [point.sizes for point in points],
            list(plugins),
        ]
    )  # fmt: skip
    with _work_folder(place) as folder:
        tries = _Tries(bench, folder, key, time.monotonic() + 60 * minutes)
        plain = naive(start, target)
        found = search(
            start,
            () if plain is None else (plain,),
            changes(manifest, target, start, points),
            tries.attempt,
            tries.again,
        )
        done = Tuning(
            manifest.name, target.name, installed_version(target), manifest.precision, gpu.name,
            now(), "" if found.kept is None else found.kept.name,
            tuple(trial for _, trial in found.trials),
        )  # fmt: skip
        if found.kept is not None:
            _keep(artifact, tries.folder(found.kept), done, announce)
        shutil.rmtree(folder, ignore_errors=True)
    return done


class _Tries:
    """Makes trials, or finds them among those of an interrupted run.

    Args:
        bench: Builds, checks and times.
        work: The folder for all candidates.
        base: What every result depends on, as JSON types.
        end: When the time is over, by `time.monotonic`.
    """

    def __init__(self, bench: Bench, work: Path, base: object, end: float) -> None:
        self._bench, self._work, self._base, self._end = bench, work, base, end
        self._known = _read(work / _RESULTS)

    def folder(self, candidate: Candidate) -> Path:
        """The folder of a candidate's artifact."""
        return self._work / re.sub(r"\W+", "-", candidate.name)

    def attempt(self, candidate: Candidate) -> Trial:
        """See `Bench.attempt`. Nothing is built after the end of the time."""
        text = json.dumps([self._base, content_of(candidate)], sort_keys=True)
        key = hashlib.sha256(text.encode()).hexdigest()
        known = self._known.get(candidate.name)
        if known is not None and known.key == key and self.folder(candidate).is_dir():
            self._bench.announce(f"{candidate.name}: tried before")
            return known
        left = self._end - time.monotonic()
        if left > 0:
            self._bench.announce(f"{candidate.name}: {candidate.text}")
            trial = self._bench.attempt(candidate, self.folder(candidate), left)
            if not trial.why or time.monotonic() < self._end:
                self._store(replace(trial, key=key))
                return self._known[candidate.name]
        return Trial(candidate.name, candidate.text, key, OUT_OF_TIME)

    def again(self, candidate: Candidate) -> Trial:
        """Times a candidate's engine once more."""
        self._bench.announce(f"{candidate.name}: time once more")
        trial = self._known[candidate.name]
        try:
            return replace(trial, times=self._bench.times(self.folder(candidate)))
        except PipelineError as error:
            return replace(trial, why=first_line(error), times=())

    def _store(self, trial: Trial) -> None:
        self._known[trial.name] = trial
        content = [encode(one) for one in self._known.values()]
        write_whole(self._work / _RESULTS, json.dumps(content, indent=1).encode())


def _read(file: Path) -> dict[str, Trial]:
    """The trials of an interrupted run; none if the file is damaged."""
    try:
        content = json.loads(file.read_bytes())
        trials = decode(content, tuple[Trial, ...], str(file), "")
    except (OSError, ValueError, ArtifactError):
        return {}
    return {trial.name: trial for trial in trials}


@contextlib.contextmanager
def _work_folder(place: Path) -> Iterator[Path]:
    """The folder beside the artifact in which candidates are built, for this process alone.

    Raises:
        InputError: Another process has it.
    """
    folder = place.resolve().with_name(f"{place.resolve().name}.tune")
    folder.mkdir(exist_ok=True)
    try:
        # beside the folder, which is removed at the end while the lock is held
        lock = take(folder.with_name(f".{folder.name}.lock"))
    except Taken as error:
        raise InputError(f"{place}: another tune of it is running. Wait until it ends") from error
    try:
        yield folder
    finally:
        free(lock)
        with contextlib.suppress(OSError):
            folder.rmdir()  # if it is empty


def _keep(artifact: Artifact, winner: Path, done: Tuning, announce: Announce) -> None:
    """Replaces the artifact by the winner, with the table and the plot."""
    announce(f"keep: {done.kept}")
    best = Artifact.open(winner)
    with opened_artifact(artifact, announce) as work:
        for path in {*work.folder.iterdir()} - {work.folder / ENGINES}:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        shutil.copytree(winner, work.folder, dirs_exist_ok=True)
        write_whole(work.folder / TUNING, done.to_json().encode())
        write_plot(done, work.folder / TUNING_PLOT)
        work.manifest = best.manifest
        work.finish()
