"""The folder in which a conversion works, and the manifest of what was done in it so far."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Concatenate, Generic, ParamSpec, Protocol, TypeVar

from pipeline.artifact.artifact import Artifact, finish
from pipeline.artifact.manifest import Manifest, StageInfo
from pipeline.convert.keys import STAGES
from pipeline.convert.reuse import check_not_replaced, forget
from pipeline.machine.progress import Announce
from pipeline.machine.resources import Stopwatch, peak_memory, reset_peak_memory
from pipeline.machine.swap_folder import replacing


class Result(Protocol):
    """What every stage returns."""

    @property
    def library_seconds(self) -> Mapping[str, float]:
        """Seconds inside libraries, by the name of what was called."""
        ...


P = ParamSpec("P")
R = TypeVar("R", bound=Result)


@dataclass(frozen=True)
class Stage(Generic[P, R]):
    """One stage of a conversion.

    Args:
        name: one of `pipeline.convert.keys.STAGES`.
        run: does the work in a folder and returns what came of it.
        record: writes that into a manifest.
    """

    name: str
    run: Callable[Concatenate[Path, P], R]
    record: Callable[[Manifest, R], Manifest]


class Workspace:
    """A copy of the artifact's folder, which takes the artifact's place when all is well.

    Args:
        folder: where the stages work.
        place: where the artifact is going to be.
        manifest: what is known before the first stage.
        announce: is called with the name of each stage when it begins.
        todo: the stages to run; the results of the others are there already.
    """

    def __init__(
        self,
        folder: Path,
        place: Path,
        manifest: Manifest,
        announce: Announce,
        todo: tuple[str, ...] = STAGES,
    ) -> None:
        self.folder, self.place, self.manifest = folder, place, manifest
        self._announce, self._todo = announce, todo

    def do(self, stage: Stage[P, R], *args: P.args, **kwargs: P.kwargs) -> R | None:
        """Runs a stage, measures it, and writes what came of it into the manifest.

        Returns:
            The stage's result; None if the artifact has it already.
        """
        if stage.name not in self._todo:
            return None
        reset_peak_memory()
        self._announce(stage.name)
        watch = Stopwatch()
        with watch(stage.name):
            result = stage.run(self.folder, *args, **kwargs)
            before = forget(self.folder, self.manifest, after=stage.name)
            manifest = stage.record(before, result)
        # TensorRT builds in a process of its own
        peak = getattr(result, "peak_memory", None) or peak_memory()
        took = StageInfo(stage.name, watch.seconds[stage.name], dict(result.library_seconds), peak)
        others = tuple(info for info in manifest.stages if info.name != stage.name)
        self.manifest = replace(manifest, stages=(*others, took))
        return result

    def finish(self, **changes: object) -> Manifest:
        """Writes the manifest, with these fields changed."""
        self.manifest = finish(self.folder, replace(self.manifest, **changes))  # type: ignore[arg-type]
        return self.manifest


@contextmanager
def new_artifact(place: Path, manifest: Manifest, announce: Announce) -> Iterator[Workspace]:
    """An empty workspace; the artifact takes its place at the end, or stays away on an error."""
    with replacing(place, keep=False) as folder:
        yield Workspace(folder, place, manifest, announce)


@contextmanager
def opened_artifact(
    artifact: Artifact,
    announce: Announce,
    manifest: Manifest | None = None,
    todo: tuple[str, ...] = STAGES,
) -> Iterator[Workspace]:
    """A workspace that holds what an artifact holds.

    Args:
        artifact: as it was read.
        announce: is called with the name of each stage when it begins.
        manifest: what to begin with, if not with the artifact's own.
        todo: the stages to run.

    Raises:
        InputError: another conversion replaced the artifact since it was read.
    """
    place = artifact.path
    with replacing(place, keep=True) as folder:
        check_not_replaced(folder, artifact.manifest, place)
        yield Workspace(folder, place, manifest or artifact.manifest, announce, todo)
