"""The folder that a conversion leaves, and how it is checked when it is used.

    engine.plan      the engine, as any TensorRT runtime and trtexec load it
    model.onnx       the rewritten model (with model.onnx.data beside it beyond 2 GB)
    exported.onnx    the model as it was exported
    half.onnx        in fp16: model.onnx with half precision written into it, as it was built
    comparison/      inputs and outputs that were compared, in Polygraphy's JSON
    reproduce.sh     repeats the comparison with Polygraphy alone
    timing.cache     the builder's timings, for the next build (TensorRT-RTX has none)
    manifest.json    what was done, with which versions, and the hash of every other file

Each stage can be run alone, so any file but the manifest may still be missing; the manifest
says which stages are done. How the folder gets into its place:
`pipeline.machine.swap_folder.replacing`.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TypeVar

from pipeline.artifact.manifest import Manifest
from pipeline.errors import ArtifactError
from pipeline.machine.files import FileInfo, fresh, hash_file
from pipeline.spec.file_names import (
    COMPARISON,
    EXPORTED,
    HALF,
    MANIFEST,
    MODEL,
    PLAN,
    REPRODUCE,
    TIMING,
)

_AGAIN = "; convert again"
_HINT = "give the folder that a conversion left"
_BUILT = (PLAN, TIMING, REPRODUCE)
_ATTEMPTS = 10
T = TypeVar("T")


@dataclass(frozen=True)
class Artifact:
    """An opened artifact.

    The paths are only as good as the moment: a conversion may replace the folder at any time.
    `read` gives a file's bytes that surely are those of this manifest.

    Args:
        path: the folder.
        manifest: what it says of itself.
        extra: files that the manifest does not list, relative to `path`. They are no error.
    """

    path: Path
    manifest: Manifest
    extra: tuple[str, ...] = ()

    @staticmethod
    def open(path: Path, *, check: bool = True, built: bool = True) -> Artifact:
        """Reads an artifact's manifest and, with `check`, all of its files.

        Manifest and files belong together: the manifest holds their hashes.

        Args:
            built: check also what the build stage and those after it made.

        Raises:
            ArtifactError: there is no artifact, its manifest is cut or edited, or a file is
                missing, cut, changed, or outside of the folder.
        """
        return read_again(path, lambda: _open(path, check, built))

    @property
    def plan(self) -> Path:
        """The engine's plan. Raises `ArtifactError` if the artifact holds none."""
        return self._file(PLAN, "build")

    @property
    def model(self) -> Path:
        """The rewritten model. Raises `ArtifactError` if the artifact holds none."""
        return self._file(MODEL, "rewrite")

    @property
    def exported(self) -> Path:
        """The model as exported. Raises `ArtifactError` if the artifact holds none."""
        return self._file(EXPORTED, "export")

    @property
    def comparison(self) -> Path:
        """The folder of stored inputs and outputs; it is not there before a comparison."""
        return self.path / COMPARISON

    def read(self, name: str) -> bytes:
        """The bytes of a file that the manifest lists.

        Raises:
            ArtifactError: it lists no such file, or what is there is not what it lists.
        """
        if name not in self.manifest.files:
            raise ArtifactError(f"{self.path}: its manifest lists no {name}")
        path = _inside(self.path, name)
        try:
            content = path.read_bytes()
        except OSError as error:
            advice = _advice(self.path, name)
            raise ArtifactError(f"{path}: can't be read: {error.strerror}{advice}") from error
        found = FileInfo(hashlib.sha256(content).hexdigest(), len(content))
        _compare(path, found, self.manifest.files[name], _advice(self.path, name))
        return content

    def _file(self, name: str, stage: str) -> Path:
        if name not in self.manifest.files:
            raise ArtifactError(f"{self.path}: holds no {name} yet; run the {stage} stage first")
        return self.path / name


def finish(staging: Path, manifest: Manifest) -> Manifest:
    """Writes the manifest of a folder that is otherwise complete; returns it as it was written.

    Every other file in the folder is hashed and listed, whatever wrote it; what
    ``manifest.files`` held before does not matter.

    Raises:
        ArtifactError: the folder holds something other than files and folders, or a value in
            the manifest is not of its field's type.
    """
    files: dict[str, FileInfo] = {}
    for name in _names(staging):
        path = staging / name
        if not stat.S_ISREG(path.lstat().st_mode):
            raise ArtifactError(f"{name}: an artifact can only hold plain files; remove it")
        files[name] = hash_file(path)
    files.pop(MANIFEST, None)
    text = replace(manifest, files=files).to_json()
    fresh(staging / MANIFEST).write_text(text, encoding="ascii")
    return Manifest.from_json(text)


def read_again(path: Path, read: Callable[[], T]) -> T:
    """Reads from an artifact, and again if it was replaced while that failed.

    Once more is not enough: of 1000 readings beside 30 conversions a second, up to 50 failed twice.

    Raises:
        ArtifactError: as `read` raised it; or the artifact was replaced at every attempt.
    """
    for _ in range(_ATTEMPTS):
        before = _manifest_of(path)
        try:
            return read()
        except ArtifactError:
            if _manifest_of(path) == before:
                raise
    raise ArtifactError(f"{path}: is replaced again and again; wait for the conversions to end")


def _manifest_of(path: Path) -> bytes | None:
    try:
        return (path / MANIFEST).read_bytes()
    except OSError:
        return None


def _open(path: Path, check: bool, built: bool = True) -> Artifact:
    name = path / MANIFEST
    try:
        text = name.read_bytes()
    except FileNotFoundError as error:
        if not path.is_dir():
            raise ArtifactError(f"{path}: there is no such folder; {_HINT}") from error
        raise ArtifactError(f"{path}: holds no {MANIFEST}, so it is no artifact") from error
    except NotADirectoryError as error:
        raise ArtifactError(f"{path}: is not a folder; {_HINT}") from error
    except OSError as error:
        raise ArtifactError(f"{name}: can't be read: {error.strerror}") from error
    try:
        manifest = Manifest.from_json(text, str(name))
    except ArtifactError as error:
        raise ArtifactError(f"{error}{_AGAIN}") from error
    for listed, stated in manifest.files.items():
        file = _inside(path, listed)
        if check and (built or not is_built(listed)):
            check_file(file, stated, _advice(path, listed))
    extra = set(_names(path)) - manifest.files.keys() - {MANIFEST}
    return Artifact(path, manifest, tuple(sorted(extra)))


def _names(folder: Path) -> list[str]:
    """All that the folder holds but folders, with ``/``, sorted."""
    found = []
    for here, folders, files in os.walk(folder):
        links = [name for name in folders if (Path(here) / name).is_symlink()]
        found += [(Path(here) / name).relative_to(folder).as_posix() for name in files + links]
    return sorted(found)


def _inside(folder: Path, name: str) -> Path:
    """The path of a file that a manifest lists, if it is inside of the folder."""
    parts = PurePosixPath(name).parts
    if "/".join(parts) != name or ".." in parts or name.startswith("/") or not parts:
        raise ArtifactError(f"{folder / MANIFEST}: files: {name!r} is no plain relative name")
    if "\\" in name or ":" in name or "\0" in name:
        raise ArtifactError(f"{folder / MANIFEST}: files: {name!r} holds a \\, : or NUL")
    path = folder / name
    if not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder)):
        raise ArtifactError(f"{path}: is a link to outside of the artifact{_AGAIN}")
    return path


def is_built(name: str) -> bool:
    """Whether a file is made by the build stage or by one after it."""
    return name in _BUILT or name.startswith(HALF) or name.startswith(f"{COMPARISON}/")


def _advice(folder: Path, name: str) -> str:
    """What to do about a file that is not as it was written."""
    return f"; copy it again, or `pipeline build {folder}`" if is_built(name) else _AGAIN


def check_file(path: Path, stated: FileInfo, advice: str) -> None:
    """Raises `ArtifactError`, which ends with the advice, unless a file is what is stated."""
    try:
        status = path.stat()
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
            f"{path}: is cut short: {found.bytes} of {stated.bytes} bytes are there{advice}"
        )
    if found != stated:
        raise ArtifactError(f"{path}: its content was changed after it was written{advice}")
