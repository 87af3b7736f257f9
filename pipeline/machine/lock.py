"""Locks between processes, by files that the library filelock locks."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from filelock import BaseFileLock


class Taken(Exception):
    """Another process, or another part of this one, holds the lock."""


def take(file: Path) -> BaseFileLock:
    """Locks a file. Makes the file and its folder if they are missing.

    The system frees the lock when the process dies in any way. A forked child does not keep it.
    Keep the result: the lock is free when nothing refers to it.

    Raises:
        Taken: The lock is held.
        OSError: The file can't be made or locked.
    """
    from filelock import FileLock, Timeout  # not every import of this package locks a file

    # a soft lock, where the file system has no locks, would outlive its process
    lock = FileLock(file, timeout=0, thread_local=False, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout as error:
        if not file.exists():
            file.touch()  # filelock hides why a file can't be made, and this raises it
        raise Taken from error
    return lock


def free(lock: BaseFileLock) -> None:
    """Removes the file, and frees the lock. It may be free already.

    The file is removed while the lock is held: filelock takes no lock of a file that has no name.
    Windows removes no open file, so there filelock removes it afterwards.
    """
    if lock.is_locked:
        with contextlib.suppress(OSError):
            Path(lock.lock_file).unlink()
        lock.release()
