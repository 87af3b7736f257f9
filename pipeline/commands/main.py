"""The command line: reads the arguments, calls the command, and reports errors."""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import sys
import traceback
from collections.abc import Callable, Sequence

from pipeline.commands.output import show
from pipeline.commands.parser import HelpPrinted, read_arguments
from pipeline.commands.progress import Progress
from pipeline.errors import PipelineError, ended_run
from pipeline.machine import interrupts
from pipeline.machine.program import StdoutError

_NO_MEMORY = (
    "out of memory. Free memory, or skip large sizes with a lower --memory-limit (convert, check "
    "and verify)"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command. Returns the exit code: 0, 1 failed, 2 bad input, 130 interrupted."""
    words = list(sys.argv[1:] if argv is None else argv)
    interrupts.settle(interrupts.UNCHANGED)
    code = _outcome(words)
    try:
        sys.stdout.flush()
    except OSError as error:  # caught here, not at exit
        return _stdout_failed(error, code)
    return code


def _outcome(words: Sequence[str]) -> int:
    try:
        return int(_run(read_arguments(words)))
    except Exception as error:
        return _failed(error, "--debug" in words)
    except KeyboardInterrupt:
        return _fail(f"interrupted; {interrupts.outcome()}", interrupts.INTERRUPTED)
    except HelpPrinted:
        return 0
    except BaseException as error:  # sys.exit() in a model
        return _fail(_one_line(ended_run(error)), 1)


def _failed(error: Exception, debug: bool) -> int:
    if isinstance(error, StdoutError):
        return _stdout_failed(error, 0)
    kept = getattr(error, "kept", "")
    last = f"\nkept: {_one_line(kept)}" if kept else ""
    if isinstance(error, MemoryError):
        left = _sentence(interrupts.outcome())
        return _fail(f"{_NO_MEMORY}. {left}{last}", 1)
    if not isinstance(error, (PipelineError, OSError)):
        raise error
    if debug:
        show("".join(traceback.format_exception(error)), sys.stderr)
    if isinstance(error, OSError):
        place = f"{error.filename}: " if error.filename else ""
        code = 2 if error.errno == errno.ENAMETOOLONG else 1
        return _fail(f"{place}{_reason(error)}. {_sentence(interrupts.outcome())}", code)
    if debug and error.detail:
        show(error.detail, sys.stderr)
    hint = "(--debug shows the full text)" if error.detail and not debug else ""
    text = f"{error.more}\n{hint}" if error.more else f"{_one_line(error.message)} {hint}"
    return _fail(f"{text.rstrip()}{last}", error.exit_code)


def _stdout_failed(error: OSError, code: int) -> int:
    """Reports that the result could not be printed, unless nobody wants to read it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if code or error.errno == errno.EPIPE:  # `pipeline models | head -1`
        return code or 1
    return _fail(
        f"cannot print the result to stdout: {_reason(error)}. {_sentence(interrupts.outcome())}", 1
    )


def _reason(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return "no space left. Free disk space, then run again"
    if error.errno == errno.ENAMETOOLONG:
        return "the name is too long. Pass a shorter name"
    return error.strerror or str(error)


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]


def _fail(text: str, code: int) -> int:
    with contextlib.suppress(OSError):  # a full disk behind stderr
        show(f"error: {text}", sys.stderr)
    return code


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _run(arguments: argparse.Namespace) -> int:
    command: Callable[[argparse.Namespace, Progress], int] = arguments.command
    progress = Progress(as_json=getattr(arguments, "json", False))
    with progress.heartbeat(loads=hasattr(arguments, "model")):
        return command(arguments, progress)
