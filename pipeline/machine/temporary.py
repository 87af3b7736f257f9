"""The program's own folder for temporary files.

All temporary files go there, also those of libraries (ONNX Runtime, torch) and of child processes.
So they can all be removed when a signal ends the program, and the next program can find those of a
killed one.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import secrets
import shutil
import stat
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.machine import interrupts
from pipeline.machine.lock import Taken, free, take

if TYPE_CHECKING:
    from filelock import BaseFileLock

# versions that locked the folder itself made names with 8 digits, and would remove these folders
_FORM = re.compile(r"pipeline-\d+-[0-9a-f]{12}")
_LOCK = "lock"


def use_own_folder() -> None:
    """Makes ``pipeline-PID-RANDOM`` in TMPDIR, and makes it the folder for temporary files.

    Folders of killed programs are removed. A living program holds a lock in its folder: a process
    id may be used again, and another container can share TMPDIR.
    """
    parent = Path(tempfile.gettempdir())
    _clear(parent)
    own = parent / f"pipeline-{os.getpid()}-{secrets.token_hex(6)}"
    process = os.getpid()
    locks: list[BaseFileLock] = []

    def remove() -> None:
        if os.getpid() == process:  # not a fork of it
            for lock in locks:
                free(lock)
            shutil.rmtree(own, ignore_errors=True)

    import filelock  # noqa: F401  # it takes time, and `own` must be locked at once

    # a full disk, or taken for a killed program's before it was locked: then without the folder
    with contextlib.suppress(OSError, Taken), interrupts.held():
        own.mkdir(mode=0o700)
        interrupts.register(remove)
        atexit.register(remove)
        locks.append(take(own / _LOCK))  # held until the process ends
        own.chmod(0o700)  # if another program removed it, `take` made it again
        tempfile.tempdir = os.environ["TMPDIR"] = str(own)


def _clear(parent: Path) -> None:
    """Removes the folders of killed programs of this user."""
    with contextlib.suppress(OSError):
        for entry in parent.iterdir():
            if _FORM.fullmatch(entry.name):
                with contextlib.suppress(OSError, Taken):
                    _remove_abandoned(entry)


def _remove_abandoned(folder: Path) -> None:
    status = folder.lstat()
    if stat.S_ISDIR(status.st_mode) and status.st_uid == _user():
        lock = take(folder / _LOCK)
        try:
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            lock.release()  # not by name: its program may have made the folder again
        folder.rmdir()  # Windows removes no folder with a locked file


def _user() -> int:
    if sys.platform == "win32":
        return 0  # as `lstat` says of every file
    return os.geteuid()
