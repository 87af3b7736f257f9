"""The engines of an artifact: its own, and others beside it, one folder each.

    ARTIFACT/engine.plan
    ARTIFACT/engines/rtx-1.7-sm86/engine.plan
    ARTIFACT/engines/tensorrt-8.6-sm90-fp16/engine.plan

Each folder in ``engines`` is an artifact by itself, made from the same exported.onnx. Its manifest
says where its engine was compared, and `verify`, `bench` and `inspect` take its path. Its model
files are hard links where the file system allows it. The outer manifest does not list them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pipeline.artifact.artifact import Artifact
from pipeline.artifact.manifest import Manifest
from pipeline.errors import ArtifactError
from pipeline.machine.files import FileInfo
from pipeline.machine.gpu import Capability, sm_text
from pipeline.machine.progress import Announce
from pipeline.machine.swap_folder import carry_folder
from pipeline.machine.target import Target
from pipeline.spec.file_names import ENGINES, EXPORTED, MANIFEST, MODEL
from pipeline.spec.plan_flags import NO_FLAGS, PlanFlags


def engine_folder(
    target: Target,
    gpus: Sequence[Capability],
    precision: str,
    recipe: bool = False,
    flags: PlanFlags = NO_FLAGS,
) -> str:
    """The name of an engine's folder: ``rtx-1.7-sm86``, ``tensorrt-8.6-sm90-fp16-recipe``.

    The names of its flags come last: ``tensorrt-8.6-sm90-hardware-compatible``.
    """
    kinds = map(sm_text, gpus)
    half = [] if precision == "fp32" else [precision]
    return "-".join([target.name, *kinds, *half, *(["recipe"] if recipe else []), *flags.names])


def engine_places(place: Path) -> list[Path]:
    """The folders of an artifact's other engines, sorted by name."""
    folder = place / ENGINES
    found = folder.iterdir() if folder.is_dir() else ()
    # a name with a dot is the work folder of a run
    named = (path for path in found if not path.name.startswith("."))
    return sorted(path for path in named if (path / MANIFEST).is_file())


def outer_artifact(place: Path) -> Path | None:
    """The artifact that has `place` among its engines; None if there is none."""
    outer = place.resolve().parent.parent
    within = place.resolve().parent.name == ENGINES and (outer / MANIFEST).is_file()
    return outer if within else None


def keep_engines(place: Path, folder: Path, manifest: Manifest, announce: Announce) -> list[str]:
    """Carries an artifact's engines over to its new folder, except those of another model.

    An engine whose manifest can't be read is carried over too: `load` says what is wrong with it.

    Args:
        place: The artifact that is replaced; it may not exist.
        folder: The new folder.
        manifest: The new manifest.
        announce: Called with each engine that is left out.

    Returns:
        Each engine that is left out, and why.
    """
    removed = []
    for engine in engine_places(place):
        try:
            why = why_not_of(Artifact.open(engine, check=False).manifest, manifest)
        except ArtifactError:
            why = ""
        if why:
            removed.append(f"{engine}: {why}")
            announce(f"removed {removed[-1]}")
        else:
            carry_folder(engine, folder / ENGINES / engine.name)
    return removed


def why_not_of(engine: Manifest, own: Manifest) -> str:
    """Why an engine is not one of an artifact's model; empty if it is.

    Args:
        engine: The engine's manifest.
        own: The artifact's manifest.
    """
    if not _files(own, EXPORTED) or _files(engine, EXPORTED) != _files(own, EXPORTED):
        return "it was built from another exported.onnx"
    # a stage that ran alone left no keys: then the files and the passes have to tell
    if len({m.keys["export"] for m in (engine, own) if "export" in m.keys}) > 1:
        return "the model was exported again, in another way or by another version"
    if engine.target.name == own.target.name:
        if _files(engine, MODEL) != _files(own, MODEL):
            return "it was built from another model.onnx"
    elif _passes(engine) != _passes(own):
        return "the model was rewritten again with other passes"
    return ""


def _files(manifest: Manifest, name: str) -> dict[str, FileInfo]:
    """An ONNX file and the files of its weights."""
    return {file: info for file, info in manifest.files.items() if file.startswith(name)}


def _passes(manifest: Manifest) -> set[tuple[str, bool]]:
    """All passes, with the user's own, and whether the user left them out."""
    passes = manifest.rewrite.passes if manifest.rewrite is not None else ()
    return {(one.name, one.skipped) for one in passes}
