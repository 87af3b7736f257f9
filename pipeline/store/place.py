"""The folder of a store: a local folder, or one in an object store, through fsspec.

A reader never sees half of a file:

- In a local folder, a file is written to ``tmp/`` and renamed, which is atomic. fsspec's own local
  writes are not: they copy into the final name, or move from another file system.
- S3 "never adds partial objects", and a multipart upload shows its object when it is completed:
  https://docs.aws.amazon.com/AmazonS3/latest/API/API_PutObject.html. s3fs's `put_file` and
  `pipe_file` use these two calls (``s3fs/core.py``, `_put_file` and `_pipe_file`).
- Google Cloud Storage states atomic uploads: https://cloud.google.com/storage/docs/consistency.
- ``memory://`` is one dict of this process, and `pipe_file` sets one value.

Both object stores show a written object to every later read and list.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO

from pipeline.errors import InputError, PipelineError, StoreError, first_line
from pipeline.machine import interrupts
from pipeline.machine.files import FileInfo, fresh, hash_file, open_plain

TMP, USED = "tmp", "used"
FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
_CHUNK = 1 << 20
# scheme -> the package that fsspec needs for it; all of them write files as the docstring says
_SCHEMES: Mapping[str, str] = {
    "file": "", "local": "", "memory": "", "s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs",
    "gcs": "gcsfs",
}  # fmt: skip
_LOCAL = ("file", "local")
# the type of a library's error -> what to do
_LOGIN = "run gcloud auth application-default login, or set GOOGLE_APPLICATION_CREDENTIALS"
_ADVICE: Mapping[str, str] = {
    "NoCredentialsError": "set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "PartialCredentialsError": "set both AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "DefaultCredentialsError": _LOGIN,
}
_TIMES = ("mtime", "LastModified", "created")  # of gcsfs and local, s3fs, memory


@dataclass(frozen=True)
class Stored:
    """A file of a store.

    Args:
        bytes: Its size.
        time: When it was written or last used, in seconds since 1970 by the store's clock.
    """

    bytes: int
    time: float


@dataclass(frozen=True)
class Place:
    """An open folder of a store. Names are relative to it, with ``/``.

    Args:
        url: The folder as the user wrote it.
        files: fsspec's file system (`fsspec.spec.AbstractFileSystem`).
        root: The folder's path in that file system.
        local: Whether it is a local folder.
    """

    url: str
    files: Any
    root: str
    local: bool

    @staticmethod
    def open(url: str) -> Place:
        """Opens a folder. It need not exist yet.

        Raises:
            InputError: The scheme is unknown, or fsspec or the scheme's package is not installed.
        """
        written, colon, _ = url.partition(":")
        remote = colon and written in _SCHEMES and written not in _LOCAL
        if remote and not url.startswith(f"{written}://"):  # it would be a local folder
            raise InputError(f"store {url!r}: write {written}:// before the bucket or the name")
        scheme, found, _ = url.partition("://")
        scheme = scheme if found else "file"
        if scheme not in _SCHEMES or not url:
            known = "a folder, s3://BUCKET/PATH, gs://BUCKET/PATH or memory://NAME"
            raise InputError(f"store {url!r}: is not a store. Pass {known}")
        needed = _SCHEMES[scheme]
        try:
            from fsspec.core import url_to_fs

            # a list from before another process's write would be wrong
            more = {"use_listings_cache": False} if needed else {}
            with _explained(url):
                files, root = url_to_fs(url, **more)
        except ImportError as error:
            names = f"'trt-pipeline[store]'{f' {needed}' if needed else ''}"
            raise InputError(f"store {url}: pip install {names}") from error
        if scheme not in _LOCAL and not root.strip("/"):
            raise InputError(f"store {url}: names no bucket or folder. Write it behind ://")
        return Place(url, files, root.rstrip("/"), scheme in _LOCAL)

    def check_bucket(self) -> None:
        """Raises `InputError` if an object store has no such bucket.

        An account may be allowed to use a bucket and not to ask for it. That is no error here.
        """
        if self.local or "memory" in self.files.protocol:
            return
        bucket = self.root.partition("/")[0]
        try:
            with _explained(self.url):
                self.files.info(bucket)
        except FileNotFoundError as error:
            first = error.__context__
            if isinstance(first, OSError) and not isinstance(first, FileNotFoundError):
                return  # gcsfs was forbidden to ask, and then listed an empty bucket
            raise InputError(
                f"store {self.url}: there is no bucket {bucket}. Create it, or correct the address"
            ) from error
        except StoreError:
            return

    def check_exists(self) -> None:
        """Raises `InputError` if there is no such local folder, or no such bucket.

        Only a reader needs this: the first push makes a local folder.
        """
        if self.local and not Path(self.root).exists():
            raise InputError(f"store {self.url}: does not exist. Correct the path, or push first")
        self.check_bucket()

    def read(self, name: str) -> bytes:
        """Returns a file's bytes. Raises `FileNotFoundError` if there is none."""
        with _explained(self.url):
            content: bytes = self.files.cat_file(self._at(name))
            return content

    def copy_out(self, name: str, target: Path) -> FileInfo:
        """Copies a file to `target`.

        Returns:
            The size and the hash of the copy.

        Raises:
            FileNotFoundError: There is no such file.
            StoreError: The store cannot be read, or `target` cannot be written.
            OSError: No space is left for `target`.
        """
        with _explained(self.url, passed=FULL):
            self.files.get_file(self._at(name), str(fresh(target)))
            return hash_file(target)

    def put(self, path: Path, name: str, stated: FileInfo) -> None:
        """Writes a copy of a local file, whole or not at all.

        Raises:
            StoreError: The store cannot be written, or the file does not have the stated content.
        """
        with self._beside() as beside:
            try:
                with open_plain(path) as source, beside.open("wb") as out:
                    found = _copy(source, out)
            except FileNotFoundError:
                found = None
            if found != stated:
                raise StoreError(f"{path}: was changed while it was read. Convert again")
            self._move(beside, name)

    def put_bytes(self, content: bytes, name: str) -> None:
        """Writes a small file, whole or not at all. Raises `StoreError` if that is impossible."""
        with self._beside() as beside:
            beside.write_bytes(content)
            self._move(beside, name)

    def find(self, under: str) -> dict[str, Stored]:
        """Returns all files below a folder by name; none if it does not exist.

        A file's time is that of its last `touch`, if there was one.

        Raises:
            InputError: There is no such bucket.
            StoreError: The store cannot be read.
        """
        found = self._list(under)
        if self.local:
            return found
        used = {
            name.removeprefix(f"{USED}/"): file.time
            for name, file in self._list(f"{USED}/{under}").items()
        }
        return {
            name: Stored(file.bytes, max(file.time, used.get(name, 0.0)))
            for name, file in found.items()
        }

    def bytes_of(self, name: str) -> int | None:
        """Returns the size of a file; None if there is none."""
        with _explained(self.url), contextlib.suppress(FileNotFoundError):
            return int(self.files.info(self._at(name))["size"])
        return None

    def touch(self, name: str) -> None:
        """Sets a file's time to now: its mtime in a local folder, else the object ``used/NAME``.

        A store that can only be read stays as it is. So does a file that this user may not write,
        in a folder of several users: `pipeline.store.collect` then takes it for less recently used
        than it is, and does not see that a push relies on it.
        """
        with contextlib.suppress(OSError, StoreError):
            if self.local:
                os.utime(self._at(name))
            else:
                with _explained(self.url):
                    self.files.pipe_file(self._at(f"{USED}/{name}"), b"")

    def time_of(self, name: str) -> float:
        """Returns a file's time as `find` does; 0.0 if there is no such file."""
        names = [name] if self.local else [name, f"{USED}/{name}"]
        times = [0.0]
        for each in names:
            with _explained(self.url), contextlib.suppress(FileNotFoundError):
                times.append(_time(self.files.info(self._at(each))))
        return max(times)

    def remove(self, name: str) -> bool:
        """Removes a file. Returns False if there is none.

        Raises:
            StoreError: The store cannot be written.
        """
        with contextlib.suppress(FileNotFoundError), _explained(self.url):
            self.files.rm_file(self._at(name))
            return True
        return False

    def _at(self, name: str) -> str:
        return f"{self.root}/{name}"

    def _list(self, under: str) -> dict[str, Stored]:
        with _explained(self.url), contextlib.suppress(FileNotFoundError):
            if self.local:
                return dict(_walk(Path(self.root), under))
            listed = self.files.find(self._at(under), detail=True)
            start = len(self.root) + 1
            found = {
                path[start:]: Stored(int(info["size"]), _time(info))
                for path, info in listed.items()
                if info["type"] == "file"
            }
            if found:
                return found
        self.check_bucket()  # s3fs lists a missing bucket as an empty one
        return {}

    @contextlib.contextmanager
    def _beside(self) -> Iterator[Path]:
        """Gives a name for a file that will be moved to its place, and removes what is left."""
        with _explained(self.url), contextlib.ExitStack() as stack:
            if self.local:
                folder = Path(self.root) / TMP
                folder.mkdir(parents=True, exist_ok=True)
            else:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            beside = folder / f"{os.getpid()}-{secrets.token_hex(8)}"
            stack.enter_context(interrupts.cleaned(lambda: beside.unlink(missing_ok=True)))
            yield beside

    def _move(self, beside: Path, name: str) -> None:
        try:
            if self.local:
                place = Path(self._at(name))
                place.parent.mkdir(parents=True, exist_ok=True)
                beside.replace(place)
            elif self.files.protocol == "memory":
                self.files.pipe_file(self._at(name), beside.read_bytes())
            else:
                self.files.put_file(str(beside), self._at(name))
        except FileNotFoundError as error:  # not a missing file, which would be a miss
            raise StoreError(
                f"store {self.url}: cannot be written: no such bucket or folder"
            ) from error


def _copy(source: BinaryIO, out: BinaryIO) -> FileInfo:
    digest, size = hashlib.sha256(), 0
    while chunk := source.read(_CHUNK):
        digest.update(chunk)
        size += len(chunk)
        out.write(chunk)
    return FileInfo(digest.hexdigest(), size)


def _walk(root: Path, under: str) -> Iterator[tuple[str, Stored]]:
    """The files below a local folder. One that vanishes meanwhile is left out.

    fsspec's `find` leaves out the whole folder of such a file, and of one that it may not read:
    `gc` would then remove blobs that are needed.
    """

    def failed(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            raise error

    for here, _, names in os.walk(root / under, onerror=failed):
        for name in names:
            path = Path(here) / name
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                yield path.relative_to(root).as_posix(), Stored(status.st_size, status.st_mtime)


def _time(info: Mapping[str, Any]) -> float:
    found = next(info[key] for key in _TIMES if info.get(key) is not None)
    return found.timestamp() if isinstance(found, datetime) else float(found)


@contextlib.contextmanager
def _explained(url: str, passed: tuple[int, ...] = ()) -> Iterator[None]:
    """Turns all errors of a file system's library into `StoreError`, but for a missing file.

    Each library has its own: botocore's, for example, are not `OSError`.

    Args:
        url: The store.
        passed: Numbers of errors that stay as they are.
    """
    try:
        yield
    except (PipelineError, FileNotFoundError, ImportError):
        raise
    except OSError as error:
        if error.errno in passed:
            raise
        place = f" ({error.filename})" if error.filename else ""
        raise StoreError(f"store {url}: {error.strerror or first_line(error)}{place}") from error
    except Exception as error:
        kind = type(error).__name__
        advice = f". To log in, {_ADVICE[kind]}" if kind in _ADVICE else ""
        raise StoreError(f"store {url}: {kind}: {first_line(error)}{advice}") from error
