"""What the command line does as a program of its own, before and after its work."""

from __future__ import annotations

import io
import os
import sys

from pipeline.machine.interrupts import end_on_signals
from pipeline.machine.temporary import use_own_folder


class StdoutError(OSError):
    """Nothing can be written to stdout: its disk is full, or its reader has ended."""


def begin() -> None:
    """Prepares the process: standard files, signals, and the folder for temporary files."""
    _open_standard_files()
    end_on_signals()
    use_own_folder()
    out = sys.stdout
    sys.stdout = _Stdout(
        out.buffer, encoding=out.encoding, errors=out.errors, line_buffering=out.isatty()
    )


class _Stdout(io.TextIOWrapper):
    """stdout that says so if it fails."""

    def write(self, text: str, /) -> int:
        try:
            return super().write(text)
        except OSError as error:
            raise StdoutError(error.errno, error.strerror) from error

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            raise StdoutError(error.errno, error.strerror) from error


def _open_standard_files() -> None:
    """Opens /dev/null for a standard file that is closed (`>&-`).

    Otherwise the next file that is opened gets its number, and gets what libraries print.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDONLY if number == 0 else os.O_WRONLY)  # gets the number
            file = os.fdopen(number, "r" if number == 0 else "w", closefd=False)
            setattr(sys, name, file)
            setattr(sys, f"__{name}__", file)
