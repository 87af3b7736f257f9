"""The folder of a conversion's results, and its checks.

    engine.plan      the bare engine, for any TensorRT runtime and trtexec
    model.onnx       the rewritten model (large weights are in model.onnx.data)
    exported.onnx    the model as it was exported
    half.onnx        only in fp16 and bf16: model.onnx in half precision, as it was built
    comparison/      compared inputs and outputs, in Polygraphy's JSON
    reproduce.sh     repeats the comparison with Polygraphy's commands
    inputs.npz       the user's values of inputs, if there are any
    timing.cache     the builder's timings, for the next build (TensorRT-RTX has none)
    engines/         other engines of the same model, see `pipeline.artifact.engines`
    tuning.json      the engines that `tune` tried, and their times (tuning.svg: a plot)
    manifest.json    dims, versions, results, and the hash of every other file

Each stage can run alone, so any file except the manifest may be missing. The manifest states which
stages are done. `pipeline.machine.swap_folder.replacing` moves the folder into its place.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import TypeVar

from pipeline.artifact.manifest import Manifest
from pipeline.errors import ArtifactError
from pipeline.machine.files import FileInfo, fresh, hash_file, open_plain
from pipeline.spec.file_names import (
    COMPARISON,
    ENGINES,
    EXPORTED,
    FAILURE,
    HALF,
    MANIFEST,
    MODEL,
    PLAN,
    RECIPE,
    REPRODUCE,
    TIMING,
    TUNING,
    TUNING_PLOT,
)

_AGAIN = "; convert again"
_HINT = "pass the folder that a conversion wrote"
_BUILT = (PLAN, TIMING, REPRODUCE, RECIPE, TUNING, TUNING_PLOT)
_ATTEMPTS = 10
T = TypeVar("T")


@dataclass(frozen=True)
class Artifact:
    """An opened artifact.

    A conversion may replace the folder at any time, and the paths then lead to other files. `read`
    checks that a file's bytes belong to this manifest.

    Args:
        path: The folder.
        manifest: The manifest of the folder.
        extra: Files that the manifest does not list, relative to `path`. They are not an error.
    """

    path: Path
    manifest: Manifest
    extra: tuple[str, ...] = ()

    @staticmethod
    def open(path: str | Path, *, check: bool = True, built: bool = True) -> Artifact:
        """Reads an artifact's manifest.

        Args:
            path: The folder.
            check: True to check all files against the hashes in the manifest.
            built: False to leave out the files of the build stage and of later stages.

        Raises:
            ArtifactError: There is no artifact, or its manifest is cut short, edited or not valid.
                Or a file is missing, cut short or changed, or the folder has a link, a pipe or a
                device.
        """
        place = Path(path)
        return read_again(place, lambda: _open(place, check, built))

    @property
    def plan(self) -> Path:
        """The engine's plan. Raises `ArtifactError` if there is none."""
        return self._file(PLAN, "build")

    @property
    def model(self) -> Path:
        """The rewritten model. Raises `ArtifactError` if there is none."""
        return self._file(MODEL, "rewrite")

    @property
    def exported(self) -> Path:
        """The exported model. Raises `ArtifactError` if there is none."""
        return self._file(EXPORTED, "export")

    @property
    def comparison(self) -> Path:
        """The folder of stored inputs and outputs. It does not exist before a comparison."""
        return self.path / COMPARISON

    def read(self, name: str) -> bytes:
        """The bytes of a file that the manifest lists.

        Raises:
            ArtifactError: The manifest does not list the file, or the file differs from it.
        """
        if name not in self.manifest.files:
            raise ArtifactError(f"{self.path}: the manifest does not list {name}")
        path = self.path / name
        try:
            content = _read(path)
        except OSError as error:
            advice = _advice(self.path, name)
            raise ArtifactError(f"{path}: can't be read: {error.strerror}{advice}") from error
        found = FileInfo(hashlib.sha256(content).hexdigest(), len(content))
        _compare(path, found, self.manifest.files[name], _advice(self.path, name))
        return content

    def _file(self, name: str, stage: str) -> Path:
        if name not in self.manifest.files:
            raise ArtifactError(f"{self.path}: has no {name} yet; run the {stage} stage first")
        return self.path / name


def finish(staging: Path, manifest: Manifest) -> Manifest:
    """Writes the manifest of a complete folder, and returns it as it was written.

    Every other file in the folder is hashed and listed. The old ``manifest.files`` is ignored.

    Raises:
        ArtifactError: The folder has something other than plain files and folders, or a value in
            the manifest has another type than its field.
    """
    files: dict[str, FileInfo] = {}
    for name in _names(staging):
        path = staging / name
        if not stat.S_ISREG(path.lstat().st_mode):
            raise ArtifactError(f"{name}: an artifact has plain files only; remove it")
        files[name] = hash_file(path)
    files.pop(MANIFEST, None)
    text = replace(manifest, files=files).to_json()
    fresh(staging / MANIFEST).write_text(text, encoding="ascii")
    return Manifest.from_json(text)


def read_again(path: Path, read: Callable[[], T]) -> T:
    """Reads from an artifact, and tries again if it was replaced during a failed read.

    Two attempts are too few: beside 30 conversions a second, up to 50 of 1000 reads failed twice.

    Raises:
        ArtifactError: The error of `read`. Or the artifact was replaced at every attempt.
    """
    for _ in range(_ATTEMPTS):
        before = _manifest_of(path)
        try:
            return read()
        except ArtifactError:
            if _manifest_of(path) == before:
                raise
    raise ArtifactError(f"{path}: conversions keep replacing it; wait until they are done")


def _manifest_of(path: Path) -> bytes | None:
    try:
        return _read(path / MANIFEST)
    except OSError:
        return None


def _open(path: Path, check: bool, built: bool = True) -> Artifact:
    name = path / MANIFEST
    try:
        text = _read(name)
    except FileNotFoundError as error:
        if not path.is_dir():
            raise ArtifactError(f"{path}: no such folder; {_HINT}") from error
        if (path / FAILURE).is_file():
            raise ArtifactError(
                f"{path}: is what is left of a failed conversion, not an artifact. {FAILURE} has "
                "the error. Pass one of its .onnx files, or convert again"
            ) from error
        raise ArtifactError(f"{path}: not an artifact: it has no {MANIFEST}; {_HINT}") from error
    except NotADirectoryError as error:
        raise ArtifactError(f"{path}: is not a folder; {_HINT}") from error
    except OSError as error:
        raise ArtifactError(f"{name}: can't be read: {error.strerror}") from error
    try:
        manifest = Manifest.from_json(text, str(name))
    except ArtifactError as error:
        raise ArtifactError(f"{error}{_AGAIN}") from error
    names = _names(path)
    for found in names:
        _check_plain(path, found)
    for listed, stated in manifest.files.items():
        if check and (built or not is_built(listed)):
            check_file(path / listed, stated, _advice(path, listed))
    extra = set(names) - manifest.files.keys() - {MANIFEST}
    return Artifact(path, manifest, tuple(sorted(extra)))


def _names(folder: Path) -> list[str]:
    """The sorted names of all files and links in the folder, with ``/``.

    Those in ``engines`` are left out: each engine there is an artifact by itself.
    """
    found = []
    for here, folders, files in os.walk(folder):
        if Path(here) == folder and not (folder / ENGINES).is_symlink():
            folders[:] = [name for name in folders if name != ENGINES]
        links = [name for name in folders if (Path(here) / name).is_symlink()]
        found += [(Path(here) / name).relative_to(folder).as_posix() for name in files + links]
    return sorted(found)


def _read(path: Path) -> bytes:
    """The bytes of a plain file. Raises `OSError` for a link, a pipe or a device."""
    with open_plain(path, links=False) as file:
        return file.read()


def _check_plain(folder: Path, name: str) -> None:
    """Raises `ArtifactError` for a link, which could lead out of the artifact, a pipe or a device.

    A file that is missing was removed by another run.
    """
    with contextlib.suppress(FileNotFoundError):
        mode = (folder / name).lstat().st_mode
        if not stat.S_ISREG(mode):
            what = "a link" if stat.S_ISLNK(mode) else "not a plain file"
            raise ArtifactError(
                f"{folder / name}: is {what}; an artifact has plain files only. Remove it"
                f"{_advice(folder, name)}"
            )


def is_built(name: str) -> bool:
    """True if the build stage or a later stage makes the file."""
    return name in _BUILT or name.startswith(HALF) or name.startswith(f"{COMPARISON}/")


def _advice(folder: Path, name: str) -> str:
    """What to do about a file that differs from the manifest."""
    return (
        f"; copy it again, or `pipeline build {quote(str(folder))}`" if is_built(name) else _AGAIN
    )


def check_file(path: Path, stated: FileInfo, advice: str) -> None:
    """Raises `ArtifactError`, with the advice, if a file differs from the stated size and hash."""
    try:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode):
            raise ArtifactError(f"{path}: is not a plain file{advice}")
        whole = status.st_size == stated.bytes
        found = hash_file(path) if whole else FileInfo("", status.st_size)
    except FileNotFoundError as error:
        raise ArtifactError(f"{path}: is missing{advice}") from error
    except OSError as error:
        raise ArtifactError(f"{path}: can't be read: {error.strerror}") from error
    _compare(path, found, stated, advice)


def _compare(path: Path, found: FileInfo, stated: FileInfo, advice: str) -> None:
    if found.bytes < stated.bytes:
        raise ArtifactError(
            f"{path}: is cut short: it has {found.bytes} of {stated.bytes} bytes{advice}"
        )
    if found != stated:
        raise ArtifactError(f"{path}: its content was changed after it was written{advice}")
