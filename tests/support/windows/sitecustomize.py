"""Takes away from pipeline's modules what Python lacks on Windows, in a process on Linux.

Python imports this file at its start if its folder is in PYTHONPATH, also in child processes.

- To the modules of pipeline, `os`, `signal`, `sys`, `ctypes` and `multiprocessing.connection` look
  as on Windows. Other modules cannot be imported there. The standard library and other packages
  keep everything, because they are Linux's own.
- For everybody, a file that is open cannot be removed or renamed, and a rename replaces nothing.
- In pipeline's modules, a text file that is opened without an encoding is an error.
- There is no /proc. A named pipe is played by a socket.

Not imitated: the rules of paths and file names, the console, DLLs, TensorRT.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import errno
import fcntl
import os
import signal
import stat
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

MODULES = {
    "crypt", "fcntl", "grp", "nis", "pty", "pwd", "readline", "resource", "spwd",
    "syslog", "termios", "tty",
}  # fmt: skip
# the names that the documentation of `os` marks "Unix" or "not Windows"
OS = {
    "O_ASYNC", "O_CLOEXEC", "O_DIRECT", "O_DIRECTORY", "O_DSYNC", "O_NDELAY", "O_NOATIME",
    "O_NOCTTY", "O_NOFOLLOW", "O_NONBLOCK", "O_PATH", "O_RSYNC", "O_SYNC", "O_TMPFILE",
    "chown", "chroot", "confstr", "copy_file_range", "ctermid", "fchdir", "fchmod", "fchown",
    "fdatasync", "fork", "forkpty", "fpathconf", "fstatvfs", "get_blocking", "getegid", "geteuid",
    "getgid", "getgroups", "getloadavg", "getpgid", "getpgrp", "getpriority", "getresuid", "getsid",
    "getuid", "getxattr", "initgroups", "killpg", "lchown", "lockf", "major", "makedev",
    "memfd_create", "minor", "mkfifo", "mknod", "nice", "openpty", "pathconf", "posix_fadvise",
    "posix_fallocate", "posix_spawn", "posix_spawnp", "pread", "preadv", "pwrite", "pwritev",
    "readv", "register_at_fork", "sched_getaffinity", "sched_setaffinity", "sched_yield",
    "sendfile", "set_blocking", "setegid", "seteuid", "setgid", "setgroups", "setpgid",
    "setpriority", "setsid", "setuid", "setxattr", "splice", "statvfs", "sync", "sysconf",
    "tcgetpgrp", "tcsetpgrp", "ttyname", "uname", "wait", "wait3", "wait4", "waitid", "writev",
    "WEXITSTATUS", "WIFEXITED", "WIFSIGNALED", "WNOHANG", "WTERMSIG",
}  # fmt: skip
SIGNALS = {"SIGABRT", "SIGFPE", "SIGILL", "SIGINT", "SIGSEGV", "SIGTERM"}
SIGNAL = {
    *({name for name in dir(signal) if name[:3] == "SIG" and name[3] != "_"} - SIGNALS),
    "SIG_BLOCK", "SIG_SETMASK", "SIG_UNBLOCK", "ITIMER_PROF", "ITIMER_REAL", "ITIMER_VIRTUAL",
    "alarm", "getitimer", "pause", "pthread_kill", "pthread_sigmask", "setitimer", "siginterrupt",
    "sigpending", "sigtimedwait", "sigwait", "sigwaitinfo",
}  # fmt: skip


class Windows:
    """A module without some names, and with others replaced."""

    def __init__(self, real: ModuleType, missing: set[str], **replaced: Any) -> None:
        vars(self).update(_real=real, _missing=missing, **replaced)

    def __getattr__(self, name: str) -> Any:
        if name in self._missing:
            raise AttributeError(f"{self._real.__name__}.{name} is not there on Windows", name=name)
        return getattr(self._real, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._real, name, value)


real_open, real_fsync, real_kill = os.open, os.fsync, os.kill


def open_(path: Any, flags: int, mode: int = 0o777) -> int:
    if Path(path).is_dir():
        raise PermissionError(errno.EACCES, "Permission denied (a folder)", str(path))
    return real_open(path, flags, mode)


def fsync(file: int) -> None:
    if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
        raise OSError(errno.EBADF, "Bad file descriptor (open for reading only)")
    real_fsync(file)


def kill(process: int, number: int) -> None:
    if number == 0:
        raise AssertionError("signal 0 is Ctrl-C on Windows")
    real_kill(process, number)


def CDLL(name: str | None, *more: Any, **named: Any) -> Any:
    if name is None:
        raise TypeError("LoadLibrary() argument 1 must be str, not None")
    return ctypes.CDLL(name, *more, **named)


def _locks() -> Windows:
    import filelock

    class FileLock(filelock.FileLock):
        """Removes the file after the release, as filelock does on Windows."""

        def _release(self) -> None:
            super()._release()
            with contextlib.suppress(OSError):
                os.unlink(self.lock_file)

    return Windows(filelock, set(), FileLock=FileLock)


def _pipes() -> Windows:
    from multiprocessing import connection

    def with_socket(function: Callable[..., Any]) -> Callable[..., Any]:
        def made(address: str, **named: Any) -> Any:
            assert address.startswith("\\\\.\\pipe\\")
            return function("\0" + address, **named)

        return made

    return Windows(
        connection,
        set(),
        Client=with_socket(connection.Client),
        Listener=with_socket(connection.Listener),
    )


STANDARD = {
    "os": Windows(os, OS, name="nt", open=open_, fsync=fsync, kill=kill),
    "signal": Windows(signal, SIGNAL),
    "sys": Windows(sys, set(), platform="win32"),
    "ctypes": Windows(ctypes, set(), CDLL=CDLL),
}
MADE = {"filelock": _locks, "multiprocessing.connection": _pipes}  # not before they are used
real_import = builtins.__import__


def import_(
    name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0
) -> Any:
    inside = str((globals or {}).get("__name__", "")).partition(".")[0] == "pipeline"
    if inside and level == 0:
        if name.partition(".")[0] in MODULES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        if name in STANDARD:
            return STANDARD[name]
        if name in MADE and fromlist:
            return MADE[name]()
    return real_import(name, globals, locals, fromlist, level)


builtins.__import__ = import_
if sys.flags.warn_default_encoding:
    warnings.filterwarnings("error", category=EncodingWarning, module=r"pipeline(\.|$)")


def _full(path: Any, folder: int | None) -> str:
    name = os.fsdecode(path)
    parent = "" if folder is None else os.readlink(f"/proc/self/fd/{folder}")
    head, tail = os.path.split(os.path.join(parent, name))
    return os.path.join(os.path.realpath(head), tail)


def _refuse_open(name: str) -> None:
    """Raises if this process has the file, or a file in the folder, open or in its memory."""
    held = []
    for number in os.listdir("/proc/self/fd"):
        try:
            file = os.readlink(f"/proc/self/fd/{number}")
            if stat.S_ISREG(os.stat(f"/proc/self/fd/{number}").st_mode):
                held.append(file)
        except OSError:
            continue
    with open("/proc/self/maps", encoding="utf-8") as maps:
        held += [line.rstrip("\n").split(maxsplit=5)[5] for line in maps if "/" in line]
    if any(file == name or file.startswith(name + os.sep) for file in held):
        raise PermissionError(errno.EACCES, "used by another process (imitated)", name)


def _careful(function: Callable[..., None], *, renames: bool, replaces: bool = False) -> Any:
    def checked(
        path: Any, other: Any = None, *, dir_fd: Any = None, src_dir_fd: Any = None, **more: Any
    ) -> None:
        _refuse_open(_full(path, dir_fd if src_dir_fd is None else src_dir_fd))
        if not renames:
            function(path, dir_fd=dir_fd)
            return
        if os.path.lexists(other):
            if not replaces or os.path.isdir(other):
                raise FileExistsError(errno.EEXIST, "File exists (imitated)", os.fsdecode(other))
            _refuse_open(_full(other, None))
        function(path, other, src_dir_fd=src_dir_fd, **more)

    return checked


real_read_text = Path.read_text


def read_text(path: Path, *more: Any, **named: Any) -> str:
    if path.parts[:2] == ("/", "proc"):
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))
    return real_read_text(path, *more, **named)


Path.read_text = read_text
os.unlink = os.remove = _careful(os.unlink, renames=False)
os.rename = _careful(os.rename, renames=True)
os.replace = _careful(os.replace, renames=True, replaces=True)
