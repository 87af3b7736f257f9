"""Finds the parts of an existing artifact that can be used again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from pipeline.artifact.artifact import Artifact, check_file, is_built
from pipeline.artifact.manifest import Manifest
from pipeline.errors import ArtifactError, InputError
from pipeline.machine.files import write_whole
from pipeline.source.imports import changed_imports, given_place
from pipeline.spec.file_names import (
    COMPARISON,
    HALF,
    MANIFEST,
    MODEL,
    PLAN,
    REPRODUCE,
    TIMING,
    TUNING,
    TUNING_PLOT,
)
from pipeline.store.differences import Difference, value_text
from pipeline.store.entry import STAGES


def refuse_other(place: Path, manifest: Manifest) -> None:
    """Raises `InputError` if the artifact at `place` was made from another source.

    Objects of one name (``spec:NAME``) are other sources if their inputs have other names. A folder
    whose manifest does not name a source is not an artifact.
    """
    source = manifest.model.source
    try:
        content = json.loads((place / MANIFEST).read_bytes())
        there = content["model"]["source"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return
    own = inputs = [each.name for each in manifest.interface.inputs]
    if source == there and source.startswith("spec:"):
        with suppress(KeyError, TypeError):  # older manifests lack them
            inputs = [str(each["name"]) for each in content["interface"]["inputs"]]
    if set(inputs) != set(own):
        raise InputError(
            f"{place} has an artifact of another {source}: its inputs are {', '.join(inputs)}, not "
            f"{', '.join(own)}. Pass another name or folder, or replace it with force=True"
        )
    if isinstance(there, str) and not same_source(there, source):
        raise InputError(
            f"{place} has an artifact of {there}, not of {source}. Pass another folder with "
            "--out DIR, or replace the artifact with --force"
        )


def last_seconds(place: Path, manifest: Manifest) -> dict[str, float]:
    """Returns the seconds of each stage of the artifact at `place`, by the stage's name.

    They are empty if it has another source or target than `manifest`.
    """
    try:
        there = Manifest.from_json((place / MANIFEST).read_bytes())
    except (OSError, ArtifactError):
        return {}
    same = same_source(there.model.source, manifest.model.source)
    same = same and there.target.name == manifest.target.name
    return {stage.name: stage.seconds for stage in there.stages} if same else {}


def same_source(one: str, other: str) -> bool:
    """Returns True if two texts name the same source. Paths start at the current folder.

    A spec object (``spec:NAME``) is compared by its name only.
    """
    return _plain(one) == _plain(other)


def _plain(source: str) -> tuple[Path | str, str]:
    if source.endswith((".onnx", ".pt2")):
        return Path(source).resolve(), ""
    where, _, name = source.rpartition(":")
    return (Path(where).resolve() if where.endswith(".py") else where), name


def check_not_replaced(folder: Path, manifest: Manifest, place: Path) -> None:
    """Raises `InputError` unless `folder` has a copy of the artifact of `manifest`.

    The manifest was read before the artifact was locked, so another run may have replaced it.
    """
    if Manifest.from_json((folder / MANIFEST).read_bytes()) != manifest:
        raise InputError(
            f"another run replaced the artifact {place} in the meantime. Run the command again"
        )


def drop_damaged(folder: Path, manifest: Manifest) -> list[str]:
    """Removes files of the build and the comparison that differ from the manifest.

    So a later manifest does not list damaged files. If stored inputs or the reference's outputs are
    damaged, their whole folder is removed.

    Args:
        folder: A copy of the artifact.
        manifest: The manifest of the artifact.

    Returns:
        The removed or missing files and folders, without the plan.
    """
    found: dict[str, None] = {}
    for name, stated in manifest.files.items():
        path = folder / name
        if not is_built(name):
            continue
        try:
            check_file(path, stated, "")
        except ArtifactError:
            needed = path.stem in ("inputs", manifest.reference)
            path = path.parent if needed and name.startswith(f"{COMPARISON}/") else path
            found[path.relative_to(folder).as_posix()] = None
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
    return [name for name in found if name != PLAN]


def sizes_compared(manifest: Manifest) -> set[tuple[tuple[str, int], ...]]:
    """Returns the compared sets of sizes of a manifest."""
    found = manifest.comparison.points if manifest.comparison is not None else ()
    return {tuple(sorted(point.sizes.items())) for point in found if point.compared}


def previous(place: Path) -> Artifact | None:
    """Returns the existing artifact, or None if there is none or it is damaged."""
    if not (place / MANIFEST).is_file():
        return None
    try:
        return Artifact.open(place)
    except ArtifactError:
        return None


def first_changed(old: Artifact | None, keys: Mapping[str, str]) -> int:
    """Returns the index of the first stage that must run again."""
    if old is None:
        return 0
    stated = old.manifest.keys
    changed = (index for index, stage in enumerate(STAGES) if stated.get(stage) != keys[stage])
    first = next(changed, len(STAGES))
    # the code is read only if the keys alone would let the model be used again
    return 0 if first and code_changed(old.manifest) else first


def code_changed(manifest: Manifest) -> tuple[Difference, ...]:
    """Returns what is not as it was, of the code that an artifact's model was made of.

    The factory's own file is left out: the keys have it.
    """
    model = manifest.model
    given = given_place(model.source)
    own = given.name if given is not None else ""
    modules = {name: one for name, one in model.modules.items() if name != own}
    return tuple(
        Difference(
            STAGES[0],
            f"module {name}" if name in modules else name,
            *map(value_text, values),
        )
        for name, values in changed_imports(modules, model.packages).items()
    )


def forget(folder: Path, manifest: Manifest, *, after: str) -> Manifest:
    """Removes the files and the manifest entries of all stages after the stage `after`."""
    stale = STAGES[STAGES.index(after) + 1 :]
    if "rewrite" in stale:
        for path in folder.glob(f"{MODEL}*"):
            if path.name != MODEL or manifest.rewrite is not None:
                path.unlink()
        manifest = replace(manifest, rewrite=None)
    if "build" in stale:
        (folder / PLAN).unlink(missing_ok=True)
        remove_built(folder)
        unbuilt = replace(manifest.target, compute_capabilities=())
        manifest = replace(manifest, build=None, target=unbuilt)
    if "compare" in stale:
        (folder / REPRODUCE).unlink(missing_ok=True)
        for path in folder.glob(f"{COMPARISON}/*/*.json"):
            # a later verify can use the reference's stored outputs, unless the export is new
            if "rewrite" in stale or path.stem not in ("inputs", manifest.reference):
                path.unlink()
        manifest = replace(
            manifest,
            comparison=None,
            engine_compared=False,
            engine_compared_why="not compared yet",
            engine_gpu="",
        )
    return replace(
        manifest, stages=tuple(stage for stage in manifest.stages if stage.name not in stale)
    )


def remove_built(folder: Path) -> None:
    """Removes what belongs to an earlier plan: half.onnx with its data, and the table of `tune`."""
    for path in (*folder.glob(f"{HALF}*"), folder / TUNING, folder / TUNING_PLOT):
        path.unlink(missing_ok=True)


def keep_timings(place: Path, folder: Path) -> None:
    """Copies the timing cache of the artifact at `place` to `folder`, if there is one."""
    if (place / TIMING).is_file():
        write_whole(folder / TIMING, (place / TIMING).read_bytes())
