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
from pipeline.machine.gpu import Capability
from pipeline.machine.progress import Announce
from pipeline.machine.swap_folder import carry_folder
from pipeline.machine.target import Target
from pipeline.spec.file_names import ENGINES, EXPORTED, MANIFEST


def engine_folder(target: Target, gpus: Sequence[Capability], precision: str) -> str:
    """The name of an engine's folder: ``rtx-1.7-sm86``, ``tensorrt-8.6-sm90-fp16``."""
    kinds = [f"sm{major}{minor}" for major, minor in gpus]
    return "-".join([target.name, *kinds, *([] if precision == "fp32" else [precision])])


def engine_places(place: Path) -> list[Path]:
    """The folders of an artifact's other engines, sorted by name."""
    folder = place / ENGINES
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted(path for path in found if (path / MANIFEST).is_file())


def outer_artifact(place: Path) -> Path | None:
    """The artifact that has `place` among its engines; None if there is none."""
    outer = place.resolve().parent.parent
    within = place.resolve().parent.name == ENGINES and (outer / MANIFEST).is_file()
    return outer if within else None


def keep_engines(place: Path, folder: Path, manifest: Manifest, announce: Announce) -> None:
    """Carries an artifact's engines over to its new folder, except those of another model.

    Args:
        place: The artifact that is replaced; it may not exist.
        folder: The new folder.
        manifest: The new manifest.
        announce: Called with each engine that is left out.
    """
    for engine in engine_places(place):
        if is_of(engine, manifest):
            carry_folder(engine, folder / ENGINES / engine.name)
        else:
            announce(f"removed {engine}: it is an engine of the model before")


def is_of(place: Path, manifest: Manifest) -> bool:
    """True if the engine in `place` was made from the exported model of an artifact.

    Args:
        place: The engine's folder.
        manifest: The artifact's manifest.
    """
    try:
        own = Artifact.open(place, check=False).manifest
    except ArtifactError:
        return False
    return bool(_exported(own)) and _exported(own) == _exported(manifest)


def _exported(manifest: Manifest) -> dict[str, FileInfo]:
    """exported.onnx and the files of its weights."""
    return {name: info for name, info in manifest.files.items() if name.startswith(EXPORTED)}
