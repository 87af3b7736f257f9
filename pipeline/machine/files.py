"""Writes whole files, and hashes files."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

_CHUNK = 1 << 20


def open_plain(path: Path, *, links: bool = True) -> BinaryIO:
    """Opens a file for reading, and nothing else: a pipe could block, and a device never ends.

    Args:
        path: The file.
        links: False to refuse a link to a file.

    Raises:
        OSError: The file can't be opened, or is not a plain file.
    """
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
    flags |= 0 if links else getattr(os, "O_NOFOLLOW", 0)
    file = os.fdopen(os.open(path, flags), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "not a plain file", str(path))
    return file


def hash_file(path: Path) -> FileInfo:
    """Returns a file's sha256 (lower-case hex) and size in bytes; reads it in pieces of 1 MiB."""
    digest = hashlib.sha256()
    size = 0
    with open_plain(path) as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            size += len(chunk)
    return FileInfo(digest.hexdigest(), size)


@dataclass(frozen=True)
class FileInfo:
    """A file's hash and size."""

    sha256: str
    bytes: int


def fresh(path: Path) -> Path:
    """Returns `path`, ready for a new file: makes its folder and unlinks an existing file.

    Files in a folder from `replacing` may be hard links to the old folder's files. To write them in
    place would change the old folder.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    return path


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file completely or not at all; other hard links to an old file keep its content."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_bytes(data)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
