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
import tempfile
from pathlib import Path

from pipeline.machine import interrupts

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_FORM = re.compile(r"pipeline-\d+-[0-9a-f]{8}")


def use_own_folder() -> None:
    """Makes ``pipeline-PID-RANDOM`` in TMPDIR, and makes it the folder for temporary files.

    Folders of killed programs are removed. A living program holds a lock on its folder: a process
    id may be used again, and another container can share TMPDIR.
    """
    if fcntl is None:
        return
    parent = Path(tempfile.gettempdir())
    _clear(parent)
    own = parent / f"pipeline-{os.getpid()}-{secrets.token_hex(4)}"

    process = os.getpid()

    def remove() -> None:
        if os.getpid() == process:  # not a fork of it
            shutil.rmtree(own, ignore_errors=True)

    with contextlib.suppress(OSError), interrupts.held():  # a full disk: then without the folder
        own.mkdir(mode=0o700)
        interrupts.register(remove)
        atexit.register(remove)
        fcntl.flock(_opened(own), fcntl.LOCK_EX)  # held until the process ends
        if own.exists():  # not taken for a killed program's before it was locked
            tempfile.tempdir = os.environ["TMPDIR"] = str(own)


def _opened(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def _clear(parent: Path) -> None:
    """Removes the folders of killed programs of this user."""
    with contextlib.suppress(OSError):
        for entry in parent.iterdir():
            if _FORM.fullmatch(entry.name):
                with contextlib.suppress(OSError):
                    _remove_abandoned(entry)


def _remove_abandoned(folder: Path) -> None:
    opened = _opened(folder)
    try:
        if os.fstat(opened).st_uid == os.geteuid():
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(opened)
