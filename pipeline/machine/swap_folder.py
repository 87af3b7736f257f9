"""Replaces a folder in one step, so that a killed run leaves the old one or the new one.

A folder that is not empty and has no `marker` file is not ours, and is never replaced. Otherwise
this module does not look at the content.

It guarantees:

- Linux: one exchange of two names (``renameat2`` with ``RENAME_EXCHANGE``). A reader always finds
  the complete old folder or the complete new one.
- Other POSIX systems, and file systems that can't exchange: two renames. If a run is killed between
  them, the old folder is left under another name beside its place. The next run moves it back.
  Nothing is ever lost, but a reader may find no folder for a moment.
- Windows: the same two renames. Windows renames no folder with an open file: then the old folder
  stays, and the error says so.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import secrets
import shutil
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pipeline.errors import InputError, PipelineError
from pipeline.machine import interrupts
from pipeline.machine.lock import Taken, free, take

# Smaller files are copied, not linked, when a folder is carried over: a copy is cheap, and it can
# be written in place safely.
LINK_FROM_BYTES = 1 << 20

_WEIGHTS = ".data"
_OF_A_RUN = re.compile(r"\..+\.(tmp-\d+-[0-9a-f]{8}|lock)")

_FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
_NO_EXCHANGE = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2

Exchange = Callable[[Path, Path], None]


@contextmanager
def replacing(path: Path, *, keep: bool, marker: str = "manifest.json") -> Iterator[Path]:
    """Yields an empty folder to fill, and moves it to `path` when the block succeeds.

    If the block fails in any way (Ctrl-C included), `path` stays as it was. The folder to fill is
    beside `path`, as ``.NAME.tmp-PID-RANDOM``; such folders of killed runs are removed. If `path`
    is a symlink, the folder that it points to is replaced, not the link.

    With `keep`, the new folder starts with the old folder's files. Files of `LINK_FROM_BYTES` or
    more are hard links: write them through `fresh`, never in place.

    Args:
        path: the folder to make or to replace; missing parents are made.
        keep: start from the old folder's files.
        marker: the file that marks a folder as replaceable. The block has to write it.

    Raises:
        InputError: another process is writing to `path`. Or `path` is not a folder, is not ours, is
            a mount point or holds the current folder; or its parent can't be written.
        PipelineError: no space is left (disk, quota or file size limit).
        RuntimeError: the block wrote a linked file in place, or wrote no `marker`.
    """
    swapped = False
    try:
        with _explained(path):
            place = Path(os.path.realpath(path))  # resolve() raises RuntimeError on a loop
            _check_place(path, place)
            place.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path, place, marker):
            with _explained(path):
                _recover(place, marker)
                _refuse_foreign(path, place, marker)
                staging = _hidden(place, "tmp")
                staging.mkdir()
                linked = _carry(place, staging) if keep and place.exists() else {}
            yield staging
            _check_block(staging, linked, marker)
            with _explained(path):
                _sync(staging)
                _refuse_foreign(path, place, marker)
                with interrupts.held():
                    _swap(staging, place)
                    swapped = True
                    interrupts.settle(f"the new artifact in {path} is complete")
                _sync_one(place.parent)
    except OSError as error:
        if error.errno not in _FULL:
            raise
        left = "the previous artifact is untouched" if path.exists() else "nothing is left behind"
        left = interrupts.outcome() if swapped else left
        raise PipelineError(
            f"{path}: no space left ({error.strerror}); {left}; free some space and run again"
        ) from error


@contextmanager
def held(path: Path, marker: str = "manifest.json") -> Iterator[None]:
    """Lets nobody replace a folder meanwhile, for who replaces a folder inside it.

    Raises:
        InputError: another process is writing to `path`.
    """
    with _locked(path, Path(os.path.realpath(path)), marker):
        yield


def carry(source: Path, target: Path) -> None:
    """Links or copies a file, as `replacing` carries over the old folder's files."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if not (_may_link(source) and _link(source, target)):
        shutil.copy2(source, target)


def carry_folder(source: Path, target: Path) -> None:
    """Links or copies all files of a folder into `target`, which does not exist yet."""
    target.mkdir(parents=True)
    _carry(source, target)


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turns the system's errors into InputError, except for a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise
        what = f" ({error.filename})" if error.filename else ""
        reason = error.strerror or str(error)
        raise InputError(f"{path}: can't be written: {reason}{what}; give another place") from error


def _check_place(path: Path, place: Path) -> None:
    if os.path.ismount(place):
        raise InputError(f"{path}: is a mount point and can't be replaced; give a folder inside it")
    here = Path.cwd()
    if place == here or place in here.parents:
        raise InputError(f"{path}: is or holds the current folder; run from outside of it")


def _refuse_foreign(path: Path, place: Path, marker: str) -> None:
    if not os.path.lexists(place) or _is_empty(place):
        return
    if not place.is_dir():
        raise InputError(f"{path}: is not a folder; give another place")
    if not (place / marker).is_file():
        raise InputError(
            f"{path}: has files but no {marker}, so it is not an artifact and stays as it is; "
            "give another place"
        )


def _is_empty(place: Path) -> bool:
    return place.is_dir() and next(place.iterdir(), None) is None


def _hidden(place: Path, kind: str) -> Path:
    """A new name beside the place; `_recover` recognises the form."""
    return place.with_name(f".{place.name}.{kind}-{os.getpid()}-{secrets.token_hex(4)}")


@contextmanager
def _locked(path: Path, place: Path, marker: str) -> Iterator[None]:
    """Holds the place's lock, and repairs the place at the end."""
    name = place.with_name(f".{place.name}.lock")

    def clean() -> None:
        _recover(place, marker)
        with suppress(OSError):
            name.unlink()

    with interrupts.held(), _explained(path):
        try:
            lock = take(name)
        except Taken as error:
            raise InputError(
                f"{path}: another conversion is writing to it (pid {_writer(place)}); "
                "wait for it or stop it"
            ) from error
        interrupts.register(clean)
    try:
        yield
    finally:
        try:
            _recover(place, marker)
        finally:
            with interrupts.held():
                free(lock)
                interrupts.unregister(clean)


def _writer(place: Path) -> str:
    """The process that holds the place's lock, by the name of the folder that it fills."""
    found = re.compile(rf"\.{re.escape(place.name)}\.tmp-(\d+)-[0-9a-f]{{8}}")
    names = [found.fullmatch(entry.name) for entry in place.parent.iterdir()]
    return next((name[1] for name in names if name), "unknown")


def _recover(place: Path, marker: str) -> None:
    """Repairs the place after an interrupted run; the lock must be held.

    If the old folder was moved aside and not yet replaced, it moves back. Everything else that runs
    left beside the place is removed.
    """
    form = re.compile(rf"\.{re.escape(place.name)}\.(tmp|old)-\d+-[0-9a-f]{{8}}")
    beside = [entry for entry in place.parent.iterdir() if form.fullmatch(entry.name)]
    for entry in beside:
        if f".{place.name}.old-" not in entry.name:
            continue
        if not os.path.lexists(place) or _is_empty(place):
            _move(entry, place)
        elif (place / marker).is_file():
            shutil.rmtree(entry, ignore_errors=True)
    for entry in beside:
        if f".{place.name}.tmp-" in entry.name:
            shutil.rmtree(entry, ignore_errors=True)


_State = tuple[int, int, int]


def _state(path: Path) -> _State:
    """The file's inode, size and time of change, which show whether it was written since."""
    status = path.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns


def _carry(source: Path, target: Path) -> dict[Path, _State]:
    """Links or copies the content of `source` into `target`; returns the linked files.

    The work folders and locks of other runs, inside of it, are left out.
    """
    linked: dict[Path, _State] = {}
    for old in source.iterdir():
        new = target / old.name
        if _OF_A_RUN.fullmatch(old.name):
            continue
        if old.is_symlink():
            new.symlink_to(old.readlink())
        elif old.is_dir():
            new.mkdir()
            linked |= _carry(old, new)
        elif _may_link(old) and _link(old, new):
            linked[new] = _state(new)
        else:
            shutil.copy2(old, new)
    return linked


def _may_link(file: Path) -> bool:
    """False for small files, and for the weights beside an ONNX file: onnx refuses to read those
    that have several names."""
    return file.suffix != _WEIGHTS and file.stat().st_size >= LINK_FROM_BYTES


def _link(old: Path, new: Path) -> bool:
    """Makes a hard link; False if none is possible (vfat, some mounts, too many links)."""
    try:
        new.hardlink_to(old)
    except OSError as error:
        if error.errno in _FULL:
            raise
        return False
    return True


def _check_block(staging: Path, linked: dict[Path, _State], marker: str) -> None:
    if not (staging / marker).is_file():
        raise RuntimeError(f"the new folder holds no {marker}")
    for path, before in linked.items():
        if path.exists() and path.stat().st_ino == before[0] and _state(path) != before:
            raise RuntimeError(f"{path.relative_to(staging)} was written in place; use fresh()")


def _sync(folder: Path) -> None:
    """Makes the system write all files and folders to the disk."""
    for entry in folder.iterdir():
        if entry.is_symlink():
            continue
        if entry.is_dir():
            _sync(entry)
        elif entry.is_file():
            _sync_one(entry)
    _sync_one(folder)


def _sync_one(path: Path) -> None:
    if sys.platform == "win32":  # it opens no folder, and flushes a file only to write to it
        if path.is_dir():
            return
        descriptor = os.open(path, os.O_RDWR)
    else:
        descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _swap(staging: Path, place: Path) -> None:
    """Moves `staging` to `place`. `_recover` removes the old folder later."""
    if not place.exists() or _is_empty(place):
        _move(staging, place)
    else:
        with suppress(PermissionError):
            staging.chmod(stat.S_IMODE(place.stat().st_mode))
        if not _exchange(staging, place):
            place.rename(_hidden(place, "old"))
            _move(staging, place)


def _move(folder: Path, place: Path) -> None:
    """Renames a folder. An empty folder in the place is replaced."""
    if sys.platform == "win32" and place.exists():
        place.rmdir()  # its rename replaces nothing
    folder.rename(place)


def _exchange(one: Path, other: Path) -> bool:
    """Exchanges the two; False if this system or file system can't."""
    exchange = _find_exchange()
    if exchange is None:
        return False
    try:
        exchange(one, other)
    except OSError as error:
        if error.errno in _NO_EXCHANGE:
            return False
        raise
    return True


def _find_exchange() -> Exchange | None:
    """``renameat2`` with RENAME_EXCHANGE (Linux 3.15, glibc 2.28), or None if it is missing."""
    if sys.platform == "win32":
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        return None

    def exchange(one: Path, other: Path) -> None:
        names = os.fsencode(one), os.fsencode(other)
        if libc.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), str(other))

    return exchange
