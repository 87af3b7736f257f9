"""Keeps what a failed conversion made, in ``NAME.failed`` beside the artifact's place."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pipeline.artifact.artifact import is_built
from pipeline.convert.keys import EXPORT, REWRITE
from pipeline.convert.workspace import Workspace
from pipeline.errors import InputError, PipelineError
from pipeline.spec.file_names import EXPORTED, FAILURE, MANIFEST, MODEL

# what the first stage that runs makes; without these two stages, the artifact has both files
_MADE = {EXPORT: EXPORTED, REWRITE: MODEL}


def failed_place(place: Path) -> Path:
    """Returns where the files of a failed conversion to `place` are kept."""
    return place.parent / f"{place.name}.failed"


@contextmanager
def kept_if_failed(work: Workspace, first: str) -> Iterator[None]:
    """If the conversion in the block fails, keeps its ONNX files and names them in the error.

    After bad input (`InputError`) nothing is kept, and nothing is kept after an interrupt.

    Args:
        work: The workspace. The lock of its place is held.
        first: The first stage that runs.
    """
    try:
        yield
    except InputError:
        raise
    except (PipelineError, MemoryError) as error:
        with suppress(OSError):  # such as a full disk; the failure itself matters more
            if first in _MADE and (work.folder / _MADE[first]).is_file():
                names = ", ".join(_keep(work.folder, failed_place(work.place), error))
                vars(error)["kept"] = f"{failed_place(work.place)}: {names}"
        raise


def _keep(folder: Path, place: Path, error: PipelineError | MemoryError) -> list[str]:
    """Moves the files before the build from `folder` to `place`. Returns the ONNX files."""
    kept = folder / place.name
    kept.mkdir()
    for path in [*folder.iterdir()]:
        if path.is_file() and path.name != MANIFEST and not is_built(path.name):
            # a second link belongs to the artifact
            move = shutil.copy2 if path.stat().st_nlink > 1 else shutil.move
            move(path, kept / path.name)
    text = f"{error}\n{getattr(error, 'detail', '')}".strip()
    (kept / FAILURE).write_text(f"{text}\n", encoding="utf-8", errors="backslashreplace")
    forget_failed(place)
    kept.rename(place)  # fails if a folder with other files is there
    return sorted(path.name for path in place.glob("*.onnx"))


def forget_failed(place: Path) -> None:
    """Removes the folder that `kept_if_failed` made. Another folder stays."""
    if (place / FAILURE).is_file() and all(path.is_file() for path in place.iterdir()):
        for path in sorted(place.iterdir(), key=lambda path: path.name == FAILURE):
            path.unlink()
        place.rmdir()
