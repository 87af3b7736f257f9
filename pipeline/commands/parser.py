"""The parser of the command line."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from pipeline.commands import actions
from pipeline.commands import locate as cli_locate
from pipeline.commands import options as cli_options
from pipeline.commands import passes as cli_passes
from pipeline.commands import refit as cli_refit
from pipeline.commands import source_options as cli_source
from pipeline.commands import store as cli_store
from pipeline.commands import view as cli_view
from pipeline.commands.bench import command as cli_bench
from pipeline.commands.check import command as cli_check
from pipeline.commands.farm import kubernetes as cli_kubernetes
from pipeline.commands.output import show
from pipeline.commands.page import command as cli_page
from pipeline.commands.progress import Progress
from pipeline.commands.settings import with_settings
from pipeline.commands.triton import command as cli_triton
from pipeline.commands.tune import command as cli_tune
from pipeline.errors import InputError
from pipeline.machine.libraries import versions
from pipeline.machine.target import DEFAULT_TARGET, TARGETS

# the groups of options in the help, by the name of each option's value
GROUPS: Mapping[str, tuple[str, ...]] = {
    "the model": (
        "weights", "option", "input", "inputs", "range", "dtype", "output_name", "state", "trust",
        "whole_zoo", "time_limit", "ray",
    ),
    "its sizes": ("dim", "rule", "exact_dims", "allow_narrow", "search_seconds", "profile"),
    "the engine": (
        "target", "precision", "recipe", "gpu", "skip", "only", "own", "plugin",
        "version_compatible", "hardware_compatible", "refit", "host_code", "optimization_level",
        "timing_cache", "minutes", "backend", "container",
    ),
    "the comparison": (
        "shape", "quick", "tolerance", "engine_tolerance", "reference", "memory_limit", "seed",
        "against", "torch",
    ),
    "the output": (
        "out", "force", "store", "max_size", "grace", "diff", "details", "bench", "exported",
        "no_browser", "name", "kubernetes", "json",
    ),
}  # fmt: skip
# the end of the help of `pipeline` itself
FIRST = """examples:
  pipeline convert net.py:net --input 'x:{b}x3x{h}x{w}' \\
      --dim b=1:8 --dim h=64:512 --dim w=64:512
  pipeline report artifacts/net
  pipeline convert --help"""
# commands to copy, the simplest one first
EXAMPLES: Mapping[str, tuple[str, ...]] = {
    "convert": (
        "pipeline convert raft_small",
        "pipeline convert my_model.py:net --input 'x:{b}x3x{h}x{w}' --dim b=1:8 --dim h=64:512 "
        "--dim w=64:512",
        "pipeline convert model.onnx --dim batch=1:8:32 --precision fp16",
    ),
    "export": ("pipeline export raft_small --out artifacts/raft_small",),
    "check": (
        "pipeline check my_model.py:net --input 'x:{b}x3x{h}x{w}' --dim b=1:8 --dim h=64:512 "
        "--dim w=64:512",
        "pipeline check model.onnx --dim batch=1:8:32 --target tensorrt-10",
    ),
    "rewrite": (
        "pipeline rewrite artifacts/raft_small --target tensorrt-8.6",
        "pipeline rewrite model.onnx --target tensorrt-10 --diff",
    ),
    "build": (
        "pipeline build artifacts/raft_small --precision fp16",
        "pipeline build artifacts/raft_small --gpu sm86",
    ),
    "verify": (
        "pipeline verify artifacts/raft_small",
        "pipeline verify artifacts/raft_small --against artifacts/raft_small_old",
    ),
    "inspect": ("pipeline inspect artifacts/raft_small",),
    "report": (
        "pipeline report artifacts/raft_small",
        "pipeline report artifacts/raft_small --bench bench.json --out raft.html",
    ),
    "view": (
        "pipeline view artifacts/raft_small",
        "pipeline view artifacts/raft_small --exported",
    ),
    "passes": ("pipeline passes --target rtx-1.7",),
    "lint": ("pipeline lint model.onnx --target tensorrt-10",),
    "bench": ("pipeline bench artifacts/raft_small --shape h=440,w=1024",),
    "tune": ("pipeline tune artifacts/raft_small --shape h=440,w=1024 --minutes 20",),
    "locate": ("pipeline locate artifacts/raft_small",),
    "matrix": (
        "pipeline matrix --gpu sm86 --gpu sm89",
        "pipeline matrix --kubernetes IMAGE --store s3://BUCKET/PATH",
    ),
    "refit": ("pipeline refit artifacts/raft_small --weights new.safetensors",),
    "store": ("pipeline store push artifacts/raft_small store", "pipeline store ls store"),
    "store push": ("pipeline store push artifacts/raft_small store",),
    "store ls": ("pipeline store ls store",),
    "store pull": ("pipeline store pull store raft_small pulled",),
    "store gc": ("pipeline store gc store --max-size 50GiB",),
    "triton": ("pipeline triton artifacts/raft_small models",),
    "triton-replay": (
        "pipeline triton-replay artifacts/raft_small",
        "pipeline triton-replay artifacts/raft_small --protocol http --url localhost:8000",
    ),
    "models": ("pipeline models",),
}


class HelpPrinted(SystemExit):
    """argparse has printed the help."""


class _Parser(argparse.ArgumentParser):
    """Reports a wrong argument in one line, with exit code 2."""

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        del message
        raise HelpPrinted(status)

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}. Run `{self.prog} --help` to list the options")


class _Version(argparse.Action):
    """Prints the versions, and ends. They are looked up only then."""

    def __call__(self, *_: object) -> None:
        found = versions(("trt-pipeline", "tensorrt-rtx", "tensorrt", "torch", "onnx"))
        show("\n".join(f"{name} {version}" for name, version in found.items()))
        raise HelpPrinted(0)


class _Completion(argparse.Action):
    """Prints a script that completes commands, options and files in a shell, and ends."""

    def __call__(self, parser: argparse.ArgumentParser, *values: Any) -> None:
        try:
            import shtab
        except ImportError as error:
            raise InputError("--completion needs shtab: pip install shtab") from error
        for sub in all_commands(parser).values():
            for action in sub._actions:
                if isinstance(action.type, type) and issubclass(action.type, Path):
                    action.complete = shtab.FILE  # type: ignore[attr-defined]
        show(shtab.complete(parser, values[1]))
        raise HelpPrinted(0)


def read_arguments(words: Sequence[str]) -> argparse.Namespace:
    """Reads the command line.

    Raises:
        InputError: An argument is unknown, missing or wrong.
    """
    parser = command_parser()
    if not words:
        parser.print_help()
        raise HelpPrinted(0)
    _check_command(parser, words)
    words = with_settings(words, _commands(parser))
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
    if words[0] == "--completion":
        return
    commands = _commands(parser)
    name = next((word for word in words if not word.startswith("-")), None)
    if name is None or name in commands:
        return
    close = difflib.get_close_matches(name, commands, 1)
    hint = f"Did you mean {close[0]}?" if close else f"Known: {', '.join(commands)}"
    raise InputError(f"unknown command {name!r}. {hint}")


def _commands(parser: argparse.ArgumentParser) -> Mapping[str, argparse.ArgumentParser]:
    """The parser of each command."""
    (found,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return found.choices


def all_commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Returns the parser of each command by name, and of each command below it: ``store ls``."""
    found: dict[str, argparse.ArgumentParser] = {}
    for name, sub in _commands(parser).items():
        found[name] = sub
        if any(isinstance(action, argparse._SubParsersAction) for action in sub._actions):
            found |= {f"{name} {word}": below for word, below in all_commands(sub).items()}
    return found


def command_parser() -> argparse.ArgumentParser:
    """Returns the parser. In its result, `command` is the function to call."""

    parser = _Parser(
        prog="pipeline",
        description="Convert PyTorch models to TensorRT engines, and check every result.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=FIRST,
    )
    parser.add_argument(
        "--debug", action="store_true", help="Show a traceback if the command fails"
    )
    parser.add_argument(
        "--version", action=_Version, nargs=0, help="Print the versions of pipeline and TensorRT"
    )
    parser.add_argument(
        "--completion", action=_Completion, choices=("bash", "zsh", "tcsh"),
        help="Print a script that completes commands and options in this shell",
    )  # fmt: skip
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=_Parser)

    def add(
        name: str,
        command: Callable[[argparse.Namespace, Progress], int],
        text: str,
        group: Any = commands,
    ) -> Any:
        sub = group.add_parser(name, help=text, description=text)
        sub.set_defaults(command=command, parser=sub)
        sub.add_argument("--debug", action="store_true", help=argparse.SUPPRESS)
        sub.add_argument("--json", action="store_true", help="Print the report as JSON")
        return sub

    def model(sub: Any) -> None:
        cli_source.add_options(sub)
        sub.add_argument(
            "--target", default=DEFAULT_TARGET, metavar="TARGET", action=cli_options.Each,
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
        actions.convert,
        "Convert a model to a TensorRT engine: export, rewrite, build, compare.",
    )
    cli_options.whole_zoo(convert)
    export = add("export", actions.export, "Export a model to ONNX, as a new artifact.")
    check = add(
        "check", actions.check, "List what would stop a conversion, without writing an artifact."
    )
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
    convert.add_argument(
        "--details", action="store_true",
        help="Print all that is known of the conversion after the verdict, as inspect does",
    )  # fmt: skip
    cli_store.option(convert)
    cli_options.effort(convert)
    rewrite = add(
        "rewrite",
        actions.rewrite,
        "Rewrite an ONNX file, or an artifact's ONNX file, for a target.",
    )
    build = add(
        "build", actions.build, "Build the engine of an artifact from its rewritten ONNX file."
    )
    verify = add(
        "verify",
        actions.verify,
        "Compare the models and the engine of an artifact on this machine.",
    )
    inspect = add(
        "inspect", actions.inspect,
        "Print an artifact's manifest and check its files. The exit code is 1 if its comparison "
        "failed.",
    )  # fmt: skip
    for sub in (build, verify, inspect):
        sub.add_argument("artifact", type=Path, metavar="ARTIFACT", help="Folder of the artifact")
    for command in (cli_page, cli_view):
        command.add_command(add)
    cli_passes.rewrite_options(rewrite)
    cli_options.profiles(build, artifact=True, builds=True)
    cli_options.effort(build)
    for sub in (rewrite, build, verify):
        cli_options.plugins(sub)
    cli_passes.add_commands(add)
    for module in (cli_bench, cli_tune, cli_locate, cli_refit):
        module.add_command(add)
    cli_triton.add_commands(add)
    cli_options.sizes(verify)
    cli_options.host_code(verify)
    cli_check.verify_options(verify)
    cli_store.add_commands(commands, add)
    cli_kubernetes.add_command(add)
    add("models", actions.models, "List the models that come with pipeline.")
    for name, sub in all_commands(parser).items():
        _arrange(name, sub)
    return parser


def _arrange(name: str, sub: argparse.ArgumentParser) -> None:
    """Gives a command's help a short usage, groups of options, and examples at its end."""
    places = [a.metavar or a.dest for a in sub._actions if not a.option_strings]
    sub.usage = " ".join([f"pipeline {name} [OPTIONS]", *map(str, places)])
    sub.formatter_class = argparse.RawDescriptionHelpFormatter
    sub.epilog = "\n".join(["examples:", *(f"  {text}" for text in EXAMPLES[name])])
    rest = sub._optionals._group_actions
    for title, names in GROUPS.items():
        group = sub.add_argument_group(title)
        group._group_actions += [action for action in rest if action.dest in names]
        rest[:] = [action for action in rest if action.dest not in names]
    sub._optionals.title = "other options"
    sub._action_groups.append(sub._action_groups.pop(sub._action_groups.index(sub._optionals)))
