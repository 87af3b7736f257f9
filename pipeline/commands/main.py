"""The command line: a thin parser on top of `pipeline.convert.driver`."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import errno
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from pipeline.artifact.artifact import Artifact
from pipeline.commands import locate as cli_locate
from pipeline.commands import options as cli_options
from pipeline.commands import passes as cli_passes
from pipeline.commands import source_options as cli_source
from pipeline.commands.bench import command as cli_bench
from pipeline.commands.check import command as cli_check
from pipeline.commands.output import show
from pipeline.commands.tune import command as cli_tune
from pipeline.errors import ConstraintError, InputError, PipelineError, ended_run
from pipeline.machine import interrupts
from pipeline.machine.libraries import versions
from pipeline.machine.program import StdoutError
from pipeline.machine.target import DEFAULT_TARGET, TARGETS
from pipeline.models import MODELS
from pipeline.source.zoo import find_spec
from pipeline.spec.config import Config

_NO_MEMORY = (
    "out of memory. Free memory, or skip large sizes with a lower --memory-limit (convert, check "
    "and verify)"
)
_HEARTBEAT = 15.0  # seconds without output before a long stage prints that it still runs


class _HelpPrinted(SystemExit):
    """argparse has printed the help."""


class _Parser(argparse.ArgumentParser):
    """Reports a wrong argument in one line, with exit code 2."""

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        del message
        raise _HelpPrinted(status)

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}. Run `{self.prog} --help` to list the options")


class _Version(argparse.Action):
    """Prints the versions, and ends. They are looked up only then."""

    def __call__(self, *_: object) -> None:
        found = versions(("trt-pipeline", "tensorrt-rtx", "tensorrt", "torch", "onnx"))
        show("\n".join(f"{name} {version}" for name, version in found.items()))
        raise _HelpPrinted(0)


class Progress:
    """Prints each step to stderr when it begins, and while a long step runs."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._last = self._start
        self._text = ""
        self._stream = sys.stderr  # a model's own prints are hidden with sys.stderr
        self._done = threading.Event()

    def __call__(self, text: str) -> None:
        self._text, self._last = text, time.monotonic()
        self._print(text)

    def _print(self, text: str) -> None:
        with contextlib.suppress(OSError):  # a full disk behind stderr
            show(f"[{time.monotonic() - self._start:6.1f} s] {text}", self._stream)

    @contextlib.contextmanager
    def heartbeat(self) -> Iterator[None]:
        """Prints a line after every 15 s without output inside the block."""

        def beat() -> None:
            while not self._done.wait(1.0):
                if self._text and time.monotonic() - self._last >= _HEARTBEAT:
                    self._last = time.monotonic()
                    self._print(f"{self._text} ... still running")

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._done.set()
            thread.join()


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
        return int(_run(_arguments(words)))
    except Exception as error:
        return _failed(error, "--debug" in words)
    except KeyboardInterrupt:
        return _fail(f"interrupted; {interrupts.outcome()}", interrupts.INTERRUPTED)
    except _HelpPrinted:
        return 0
    except BaseException as error:  # sys.exit() in a model
        return _fail(_one_line(ended_run(error)), 1)


def _failed(error: Exception, debug: bool) -> int:
    if isinstance(error, StdoutError):
        return _stdout_failed(error, 0)
    if isinstance(error, MemoryError):
        left = _sentence(interrupts.outcome())
        return _fail(f"{_NO_MEMORY}. {left}", 1)
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
    hint = " (--debug shows the full text)" if error.detail and not debug else ""
    code = _fail(f"{_one_line(str(error))}{hint}", error.exit_code)
    if error.more:
        show(error.more, sys.stderr)
    return code


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


def _arguments(words: Sequence[str]) -> argparse.Namespace:
    """Reads the command line.

    Raises:
        InputError: An argument is unknown, missing or wrong.
    """
    parser = command_parser()
    if not words:
        parser.print_help()
        raise _HelpPrinted(0)
    _check_command(parser, words)
    arguments, unknown = parser.parse_known_args(words)
    if unknown:
        command: _Parser = arguments.parser
        options = [flag for action in command._actions for flag in action.option_strings]
        name = unknown[0].partition("=")[0]
        close = difflib.get_close_matches(name, options, 1) if name.startswith("-") else []
        hint = f" (did you mean {close[0]}?)" if close else ""
        command.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    return arguments


def _check_command(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Raises `InputError` for an unknown command, with the most similar one."""
    (commands,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    name = next((word for word in words if not word.startswith("-")), None)
    if name is None or name in commands.choices:
        return
    close = difflib.get_close_matches(name, commands.choices, 1)
    hint = f"Did you mean {close[0]}?" if close else f"Known: {', '.join(commands.choices)}"
    raise InputError(f"unknown command {name!r}. {hint}")


def _fail(text: str, code: int) -> int:
    with contextlib.suppress(OSError):  # a full disk behind stderr
        show(f"error: {text}", sys.stderr)
    return code


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _run(arguments: argparse.Namespace) -> int:
    command: Callable[[argparse.Namespace, Progress], int] = arguments.command
    progress = Progress()
    with progress.heartbeat():
        return command(arguments, progress)


def command_parser() -> argparse.ArgumentParser:
    """Returns the parser. In its result, `command` is the function to call."""

    parser = _Parser(
        prog="pipeline",
        description="Convert PyTorch models to TensorRT engines, and check every result.",
    )
    parser.add_argument(
        "--debug", action="store_true", help="Show a traceback if the command fails"
    )
    parser.add_argument(
        "--version", action=_Version, nargs=0, help="Print the versions of pipeline and TensorRT"
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=_Parser)

    def add(name: str, command: Callable[[argparse.Namespace, Progress], int], text: str) -> Any:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(command=command, parser=sub)
        sub.add_argument("--debug", action="store_true", help=argparse.SUPPRESS)
        sub.add_argument("--json", action="store_true", help="Print the report as JSON")
        return sub

    def model(sub: Any) -> None:
        cli_source.add_options(sub)
        sub.add_argument(
            "--target", default=DEFAULT_TARGET, metavar="TARGET",
            help=f"Set the TensorRT version: {', '.join(TARGETS)} (default: {DEFAULT_TARGET})",
        )  # fmt: skip
        cli_options.profiles(sub, artifact=False, builds=sub is convert)
        cli_passes.choice(sub, only=False)
        cli_options.plugins(sub)
        sub.add_argument(
            "--seed", type=int, default=0, help="Set the seed of the random inputs (default: 0)"
        )

    convert = add(
        "convert",
        _convert,
        "Convert a model to a TensorRT engine: export, rewrite, build, compare.",
    )
    cli_options.whole_zoo(convert)
    export = add("export", _export, "Export a model to ONNX, as a new artifact.")
    check = add("check", _check, "List what would stop a conversion, without writing an artifact.")
    for sub in (convert, export, check):
        model(sub)
    for sub in (convert, export):
        sub.add_argument(
            "--out", type=Path, metavar="DIR",
            help="Write the artifact to this folder (default: artifacts/NAME)",
        )  # fmt: skip
        sub.add_argument(
            "--force", action="store_true",
            help="Run even if nothing changed, and replace an artifact of another source",
        )  # fmt: skip
    for sub in (convert, check):
        cli_options.sizes(sub)
    convert.add_argument(
        "--quick", action="store_true",
        help="Compare at few sizes only: min, opt, max and one odd set of sizes of each profile. "
        "Look less far for branches that other branches hide",
    )  # fmt: skip
    cli_options.effort(convert)
    rewrite = add(
        "rewrite", _rewrite, "Rewrite an ONNX file, or an artifact's ONNX file, for a target."
    )
    build = add("build", _build, "Build the engine of an artifact from its rewritten ONNX file.")
    verify = add(
        "verify", _verify, "Compare the models and the engine of an artifact on this machine."
    )
    inspect = add(
        "inspect", _inspect,
        "Print an artifact's manifest and check its files. The exit code is 1 if its comparison "
        "failed.",
    )  # fmt: skip
    for sub in (build, verify, inspect):
        sub.add_argument("artifact", type=Path, metavar="ARTIFACT", help="Folder of the artifact")
    cli_passes.rewrite_options(rewrite)
    cli_options.profiles(build, artifact=True, builds=True)
    cli_options.effort(build)
    for sub in (rewrite, build, verify):
        cli_options.plugins(sub)
    cli_passes.add_commands(add)
    cli_bench.add_command(add)
    cli_tune.add_command(add)
    cli_locate.add_command(add)
    cli_options.sizes(verify)
    cli_check.verify_options(verify)
    add("models", _models, "List the models that come with pipeline.")
    return parser


def _convert(arguments: argparse.Namespace, progress: Progress) -> int:
    if arguments.whole_zoo:
        from pipeline.commands import convert_all

        return convert_all.command(arguments, _config, progress)
    from pipeline.convert.driver import run

    if arguments.time_limit:
        raise InputError("--time-limit works only with --all. Remove --time-limit, or add --all")
    config = _config(arguments)
    try:
        report = run(config, progress)
    except ConstraintError as error:  # it hides what comes after it
        cli_check.add_everything(error, config, progress)
        raise
    return _show(report, arguments)


def _export(arguments: argparse.Namespace, progress: Progress) -> int:
    from pipeline.convert.driver import run_export

    return _show(run_export(_config(arguments), progress), arguments)


def _check(arguments: argparse.Namespace, progress: Progress) -> int:
    return cli_check.check(_config(arguments), arguments, progress)


def _rewrite(arguments: argparse.Namespace, progress: Progress) -> int:
    from pipeline.convert.driver import run_rewrite

    if arguments.source.suffix == ".onnx" or arguments.source.is_file():
        return cli_passes.rewrite_file(arguments, progress)
    if arguments.diff or arguments.out:
        raise InputError(
            f"{arguments.source} is a folder: --diff and --out need an ONNX file. Pass the file"
        )
    report = run_rewrite(
        arguments.source,
        arguments.target,
        progress,
        own=arguments.own,
        only=arguments.only,
        skip=arguments.skip,
        plugins=arguments.plugin,
    )
    return _show(report, arguments)


def _build(arguments: argparse.Namespace, progress: Progress) -> int:
    from pipeline.convert.driver import run_build

    report = run_build(
        arguments.artifact, arguments.profile, arguments.precision, progress, arguments.plugin,
        cli_options.chosen_effort(arguments), arguments.recipe,
    )  # fmt: skip
    return _show(report, arguments)


def _verify(arguments: argparse.Namespace, progress: Progress) -> int:
    from pipeline.convert.driver import run_verify
    from pipeline.convert.options import Verify

    report = run_verify(
        arguments.artifact,
        Verify(
            against=arguments.against,
            torch_model=arguments.torch,
            weights=arguments.weights,
            trust=arguments.trust,
            shapes=arguments.shape,
            memory_limit=arguments.memory_limit,
            engine_tolerance=arguments.engine_tolerance,
            plugins=arguments.plugin,
        ),
        announce=progress,
    )
    return _show(report, arguments)


def _inspect(arguments: argparse.Namespace, progress: Progress) -> int:
    from pipeline.convert.driver import Report

    del progress
    artifact = Artifact.open(arguments.artifact)
    return _show(Report(artifact.path, artifact.manifest), arguments)


def _models(arguments: argparse.Namespace, progress: Progress) -> int:
    from pipeline.commands import report as summary

    del progress
    specs = {name: find_spec(name, {}) for name in MODELS}
    if arguments.json:
        show(json.dumps({name: summary.spec_facts(spec) for name, spec in specs.items()}, indent=2))
    else:
        show(summary.models_table(specs))
    return 0


def _show(report: Any, arguments: argparse.Namespace) -> int:
    from pipeline.commands import report as summary

    if arguments.json:
        show(summary.report_json(report))
    else:
        show(summary.report_text(report))
    return 0 if report.ok else 1


def _config(arguments: argparse.Namespace) -> Any:
    return Config(
        **cli_source.config_fields(arguments),
        out=getattr(arguments, "out", None),
        target=arguments.target,
        profiles=tuple(arguments.profile),
        precision=arguments.precision or "fp32",
        recipe=getattr(arguments, "recipe", None),
        effort=cli_options.chosen_effort(arguments),
        shapes=tuple(getattr(arguments, "shape", ())),
        memory_limit=getattr(arguments, "memory_limit", None),
        seed=arguments.seed,
        quick=getattr(arguments, "quick", False),
        passes=tuple(arguments.own),
        skip=tuple(arguments.skip),
        plugins=tuple(arguments.plugin),
        force=getattr(arguments, "force", False),
    )
