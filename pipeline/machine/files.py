"""Writes whole files, and hashes files."""

from __future__ import annotations

import errno
import glob
import hashlib
import os
import shutil
import stat
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from pipeline.machine import interrupts

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
    if not links:
        flags |= getattr(os, "O_NOFOLLOW", 0)
        if not hasattr(os, "O_NOFOLLOW") and path.is_symlink():  # Windows
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
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


def link_or_copy(path: Path, place: Path) -> None:
    """Makes a symbolic link to a file, or a copy where links are not allowed (Windows)."""
    try:
        place.symlink_to(path)
    except OSError:
        shutil.copyfile(path, place)


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file completely or not at all; other hard links to an old file keep its content.

    The unfinished file of a killed process is removed, except on Windows.
    """
    for left in path.parent.glob(f".{glob.escape(path.name)}.*"):
        number = left.suffix[1:]
        if number.isdecimal() and not _is_running(int(number)):
            left.unlink(missing_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    with interrupts.cleaned(lambda: beside.unlink(missing_ok=True)):
        beside.write_bytes(data)
        beside.replace(path)


def _is_running(process: int) -> bool:
    if sys.platform == "win32":  # there, signal 0 is Ctrl-C
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass
    return True
