"""A store of artifacts that many machines share: it pushes, finds and pulls them.

    blobs/ab/abcd...             the content of a file, named by its sha256
    entries/MODEL/E-R-B-KEY.json one artifact, see `pipeline.store.entry`
    used/...                     in an object store: when a file was last used
    tmp/...                      in a local folder: files that are being written

Many processes may write at once. A file is written whole or not at all (`pipeline.store.place`),
and the same name of a blob means the same content. An entry is written after its blobs. So a reader
finds the blobs of every entry, unless `pipeline.store.collect` removed them in the meantime: then
the entry is not used, and the next conversion writes it again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.artifact.artifact import Artifact
from pipeline.artifact.engines import keep_engines
from pipeline.artifact.manifest import Manifest
from pipeline.errors import ArtifactError, InputError, StoreError
from pipeline.machine.files import FileInfo, fresh
from pipeline.machine.progress import Announce, silent
from pipeline.machine.swap_folder import replacing
from pipeline.spec.file_names import MANIFEST
from pipeline.store.entry import (
    ENTRIES,
    STAGES,
    Entry,
    Parts,
    blob_name,
    folder_of,
    key_of,
    shared,
)
from pipeline.store.place import Place, Stored

_LEAST_DIGITS, _SHOWN = 4, 12  # digits of a key that a user must pass, and that a text shows
_ATTEMPTS = 2  # of reading a blob, before it counts as damaged


@dataclass(frozen=True)
class Listed:
    """An entry in a listing.

    Args:
        name: The name of its file.
        used: When it was written or last used, in seconds since 1970.
    """

    name: str
    used: float

    @property
    def key(self) -> str:
        """The entry's key."""
        return key_of(self.name)


@dataclass(frozen=True)
class Store:
    """An open store."""

    place: Place

    @staticmethod
    def open(url: str) -> Store:
        """Opens a store: a folder, or an address such as ``s3://bucket/path``.

        Raises:
            InputError: The address is not valid, or a package that it needs is not installed.
        """
        return Store(Place.open(url))

    def push(self, artifact: Artifact, parts: Parts | None = None) -> Entry:
        """Writes an artifact into the store. Blobs that are there already stay.

        An entry whose engine was compared stays too, if all its blobs are there, the engine of
        `artifact` was not compared, and both were made of the same code. Of two pushes at the same
        time, the last one wins.

        Args:
            artifact: The artifact, opened with its files checked.
            parts: What its keys were made of; None keeps what the store knows of it.

        Returns:
            The entry in the store. It has another manifest than `artifact` if it stayed.

        Raises:
            InputError: The artifact is not one of a whole conversion that passed.
            StoreError: The store cannot be written, or a file was changed in the meantime.
        """
        manifest, place = artifact.manifest, self.place
        check_pushable(artifact)
        entry = Entry(manifest, parts)
        there = self._read(entry.name)
        if there is not None:
            better = _knows_more(there.manifest, manifest) and _same_code(there.manifest, manifest)
            if better and self._is_whole(there):
                place.touch(there.name)
                return there
            entry = replace(entry, parts=there.parts if parts is None else parts)
        for name, info in manifest.files.items():
            self._put(artifact.path / name, info)
        place.put_bytes(entry.to_json(), entry.name)
        for name, info in manifest.files.items():  # `collect` may have removed one: see there
            if place.bytes_of(blob_name(info.sha256)) != info.bytes:
                self._put(artifact.path / name, info)
        return entry

    def has(self, manifest: Manifest) -> bool:
        """Returns True if the store has an entry of these keys, and marks it as used.

        An entry that knows less does not count: its engine was not compared, and that of `manifest`
        was. Nor does one whose model was made of other code.
        """
        entry = self._read(Entry(manifest).name)
        if entry is None or _knows_more(manifest, entry.manifest):
            return False
        if not _same_code(manifest, entry.manifest):
            return False
        self.place.touch(entry.name)
        return True

    def of_model(self, model: str, keys: Mapping[str, str]) -> list[Listed]:
        """Lists the entries of a model: those that share most stages first, then the last used."""
        found = [Listed(name, file.time) for name, file in self._entries(folder_of(model))]
        return sorted(found, key=lambda entry: (-shared(entry.name, keys), -entry.used))

    def entries(self) -> list[Listed]:
        """Lists all entries, the last used one first."""
        found = [Listed(name, file.time) for name, file in self._entries(ENTRIES)]
        return sorted(found, key=lambda entry: -entry.used)

    def named(self, text: str) -> Listed:
        """Returns the last used entry of a model's name, or the entry of a key.

        Args:
            text: The name, or at least the first 4 digits of the key.

        Raises:
            InputError: There is none, several keys begin so, the beginning is too short, or the
                store does not exist.
        """
        self.place.check_exists()
        found = self.entries()
        own = folder_of(text)
        for entry in found:
            if entry.name.startswith(f"{own}/"):
                return entry
        keys = [entry for entry in found if text and entry.key.startswith(text)]
        if keys and len(text) < _LEAST_DIGITS:
            raise InputError(
                f"store {self.place.url}: {text} is too short for a key. Pass at least "
                f"{_LEAST_DIGITS} digits, such as {keys[0].key[:_SHOWN]}"
            )
        if not keys:
            models = ", ".join(dict.fromkeys(entry.name.split("/")[1] for entry in found))
            raise InputError(
                f"store {self.place.url}: has no entry {text}. Its models: {models or 'none'}"
            )
        if len(keys) > 1:
            some = ", ".join(entry.key[:_SHOWN] for entry in keys[:3])
            more = ", ..." if len(keys) > 3 else ""
            raise InputError(
                f"store {self.place.url}: {len(keys)} keys begin with {text}: {some}{more}. Pass "
                "more digits"
            )
        return keys[0]

    def read(self, listed: Listed) -> Entry:
        """Reads an entry.

        Raises:
            ArtifactError: It is gone or damaged, or another version of pipeline wrote it.
        """
        try:
            return Entry.from_json(self.place.read(listed.name), listed.name)
        except FileNotFoundError as error:
            raise ArtifactError(f"{listed.name}: is not in the store any more") from error

    def pull(
        self, entry: Entry, out: Path, source: str | None = None, announce: Announce = silent
    ) -> None:
        """Writes the artifact of an entry to the folder `out`, whole or not at all.

        Each file is checked by its hash. A damaged blob is removed, so that the next push writes
        it again.

        Args:
            entry: The entry.
            out: The folder. An artifact there is replaced; its `engines` stay if they are of the
                same model.
            source: The model's source in the new manifest; by default that of the entry.
            announce: Called with each file.

        Raises:
            ArtifactError: A blob is missing or damaged. `out` stays as it was.
            InputError: `out` is not an artifact's folder, or another process writes to it.
            StoreError: The store cannot be read.
        """
        with replacing(out, keep=False) as folder:
            manifest = self.copy_out(entry, folder, source, announce)
            keep_engines(out, folder, manifest, announce)

    def copy_out(
        self, entry: Entry, folder: Path, source: str | None = None, announce: Announce = silent
    ) -> Manifest:
        """Writes the files of an entry into an empty folder, and marks the entry as used.

        See `pull` for the arguments and the errors. After an error, the folder has some of the
        files.

        Returns:
            The manifest that was written.
        """
        manifest = entry.manifest
        for name, info in manifest.files.items():
            announce(f"store: pull {name}")
            self._get(folder / name, name, info)
        if source is not None:
            manifest = replace(manifest, model=replace(manifest.model, source=source))
        fresh(folder / MANIFEST).write_text(manifest.to_json(), encoding="ascii")
        self.place.touch(entry.name)
        return manifest

    def _entries(self, under: str) -> Iterator[tuple[str, Stored]]:
        return ((n, f) for n, f in self.place.find(under).items() if n.endswith(".json"))

    def _read(self, name: str) -> Entry | None:
        try:
            return Entry.from_json(self.place.read(name), name)
        except (FileNotFoundError, ArtifactError):
            return None

    def _is_whole(self, entry: Entry) -> bool:
        """True if all blobs of an entry are there. Their content is not read."""
        sizes = entry.blobs.items()
        return all(self.place.bytes_of(blob_name(sha256)) == size for sha256, size in sizes)

    def _put(self, path: Path, info: FileInfo) -> None:
        """Writes a blob, unless it is there. Then its time is set, so that `collect` keeps it."""
        blob = blob_name(info.sha256)
        if self.place.bytes_of(blob) == info.bytes:
            self.place.touch(blob)
        else:
            self.place.put(path, blob, info)

    def _get(self, target: Path, name: str, info: FileInfo) -> None:
        blob = blob_name(info.sha256)
        for attempt in range(_ATTEMPTS):
            try:
                if self.place.copy_out(blob, target) == info:
                    return
            except FileNotFoundError as error:
                raise ArtifactError(f"blob {blob} of {name} is missing") from error
            except StoreError:
                if attempt == _ATTEMPTS - 1:
                    raise
        removed = ""
        with suppress(StoreError):  # a store that can only be read
            removed = ", and was removed" if self.place.remove(blob) else ""
        raise ArtifactError(f"blob {blob} of {name} is damaged{removed}")


def _knows_more(one: Manifest, other: Manifest) -> bool:
    """True if the engine of `one` was compared, and that of `other` was not."""
    return one.engine_compared and not other.engine_compared


def _same_code(one: Manifest, other: Manifest) -> bool:
    """True if the two models were made of the same code; their keys are the same.

    What only one lists is of the program around it.
    """
    files, others = one.model.modules, other.model.modules
    same = all(files[name].sha256 == others[name].sha256 for name in files.keys() & others)
    mine, theirs = one.model.packages, other.model.packages
    return same and all(mine[name] == theirs[name] for name in mine.keys() & theirs)


def check_pushable(artifact: Artifact) -> None:
    """Raises `InputError` unless the artifact is one of a whole conversion that passed."""
    manifest, where = artifact.manifest, artifact.path
    if manifest.comparison is not None and not manifest.comparison.passed:
        raise InputError(f"{where}: its comparison failed. A store has artifacts that passed only")
    missing = [stage for stage in STAGES if stage not in manifest.keys]
    if missing:
        raise InputError(
            f"{where}: its manifest has no key of {', '.join(missing)}, because a stage ran alone. "
            "Run pipeline convert"
        )
