"""The working folder of a conversion, and its manifest so far."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Concatenate, Generic, ParamSpec, Protocol, TypeVar

from pipeline.artifact.artifact import Artifact, finish
from pipeline.artifact.engines import keep_engines, outer_artifact
from pipeline.artifact.manifest import Manifest, StageInfo
from pipeline.convert.findings import list_findings
from pipeline.convert.reuse import check_not_replaced, forget, last_seconds
from pipeline.errors import PipelineError, ended_run
from pipeline.machine.progress import Announce, StageText
from pipeline.machine.resources import Stopwatch, peak_memory, reset_peak_memory
from pipeline.machine.swap_folder import held, replacing
from pipeline.store.entry import STAGES


class StageResult(Protocol):
    """The result of a stage."""

    @property
    def library_seconds(self) -> Mapping[str, float]:
        """Seconds in libraries, by the name of the call."""
        ...


P = ParamSpec("P")
R = TypeVar("R", bound=StageResult)


@dataclass(frozen=True)
class Stage(Generic[P, R]):
    """One stage of a conversion.

    Args:
        name: One of `pipeline.convert.keys.STAGES`.
        run: Does the work in a folder and returns the result.
        record: Adds the result to a manifest.
    """

    name: str
    run: Callable[Concatenate[Path, P], R]
    record: Callable[[Manifest, R], Manifest]


class Workspace:
    """A working copy of the artifact's folder. It replaces the artifact if no error is raised.

    Args:
        folder: The folder in which the stages work.
        place: The final folder of the artifact.
        manifest: The manifest before the first stage.
        announce: Called with the name of each stage when the stage begins. The seconds of the
            stage in the artifact at `place` follow, if it took 1 s or more there.
        todo: The stages to run. The results of the other stages exist already.
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
        self.removed: list[str] = []  # what the new artifact lacks of the old one
        self._last = last_seconds(place, manifest)

    def resume(self, manifest: Manifest, todo: tuple[str, ...]) -> None:
        """Goes on from results that were put into the folder.

        Args:
            manifest: The manifest of these results.
            todo: The stages that are left.
        """
        self.manifest, self._todo = manifest, todo

    def do(self, stage: Stage[P, R], *args: P.args, **kwargs: P.kwargs) -> R | None:
        """Runs and measures a stage, and adds its result to the manifest.

        Returns:
            The stage's result; None if the stage is not in `todo`.

        Raises:
            PipelineError: The stage failed, or the model's code tried to end the program. Several
                findings of an export are listed, one a line.
        """
        if stage.name not in self._todo:
            return None
        reset_peak_memory()
        self._announce(StageText(stage.name, self._last.get(stage.name)))
        watch = Stopwatch()
        with watch(stage.name):
            result = self._result(stage, *args, **kwargs)
            before = forget(self.folder, self.manifest, after=stage.name)
            manifest = stage.record(before, result)
        # TensorRT builds in a child process
        peak = getattr(result, "peak_memory", None) or peak_memory()
        took = StageInfo(stage.name, watch.seconds[stage.name], dict(result.library_seconds), peak)
        others = tuple(info for info in manifest.stages if info.name != stage.name)
        self.manifest = replace(manifest, stages=(*others, took))
        return result

    def _result(self, stage: Stage[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return stage.run(self.folder, *args, **kwargs)
        except PipelineError as error:
            list_findings(error)
            raise
        except (Exception, KeyboardInterrupt):
            raise
        except BaseException as error:  # sys.exit() in a model would end the program with code 0
            raise PipelineError(f"model {self.manifest.name}: {ended_run(error)}") from error

    def finish(self, **changes: object) -> Manifest:
        """Writes the manifest with these fields changed."""
        self.manifest = finish(self.folder, replace(self.manifest, **changes))  # type: ignore[arg-type]
        return self.manifest


@contextmanager
def new_artifact(place: Path, manifest: Manifest, announce: Announce) -> Iterator[Workspace]:
    """Gives an empty workspace. It becomes the artifact at the end, unless an error is raised.

    Engines of the old artifact that were made from the same exported.onnx are kept.
    """
    with _outer_held(place), replacing(place, keep=False) as folder:
        work = Workspace(folder, place, manifest, announce)
        yield work
        work.removed += keep_engines(place, folder, work.manifest, announce)


@contextmanager
def opened_artifact(
    artifact: Artifact,
    announce: Announce,
    manifest: Manifest | None = None,
    todo: tuple[str, ...] = STAGES,
) -> Iterator[Workspace]:
    """Gives a workspace with a copy of an artifact.

    Args:
        artifact: The artifact as it was read.
        announce: Called with the name of each stage when the stage begins.
        manifest: The manifest to begin with; the artifact's own by default.
        todo: The stages to run.

    Raises:
        InputError: Another run replaced the artifact after it was read.
    """
    place = artifact.path
    with _outer_held(place), replacing(place, keep=True) as folder:
        check_not_replaced(folder, artifact.manifest, place)
        yield Workspace(folder, place, manifest or artifact.manifest, announce, todo)


@contextmanager
def _outer_held(place: Path) -> Iterator[None]:
    """Keeps the artifact around an engine's folder in its place, if there is one."""
    outer = outer_artifact(place)
    with held(outer) if outer is not None else nullcontext():
        yield
