"""``pipeline.toml``: the options of models that one would repeat on the command line.

    [my_model]
    source = "my_model.py:factory"
    input = "x:{b}x3x{h}x{w}"
    dim = ["b=1:8", "h=64:512", "w=64:512"]
    precision = "fp16"

``pipeline convert my_model`` then means ``pipeline convert my_model.py:factory --input ...``.
"""

from __future__ import annotations

import argparse
import difflib
import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.errors import InputError
from pipeline.models import MODELS

FILE = "pipeline.toml"
COMMANDS = ("convert", "export", "check")


def with_settings(
    words: Sequence[str], commands: Mapping[str, argparse.ArgumentParser]
) -> list[str]:
    """The words of a command line, with the options of ``pipeline.toml`` for its model.

    Args:
        words: the command, its model, and options, which win over those of the file.
        commands: the parser of each command.

    Raises:
        InputError: the file cannot be read, or names an option that there is none of.
    """
    file = Path(FILE)
    if len(words) < 2 or words[0] not in COMMANDS or not file.is_file():
        return list(words)
    command, model, *rest = words
    tables = _read(file)
    table = tables.get(model)
    if table is None:
        if model.isidentifier() and model not in MODELS:
            close = difflib.get_close_matches(model, [*tables, *MODELS], 1)
            hint = f" (did you mean {close[0]}?)" if close else ""
            raise InputError(
                f"unknown model {model!r}{hint}; known: {', '.join([*tables, *MODELS])}"
            )
        return list(words)
    where = f"{FILE}: [{model}]"
    if not isinstance(table, dict):
        raise InputError(f"{where} is no table. Write the model's options below [{model}]")
    source = table.pop("source", model)
    if not isinstance(source, str):
        raise InputError(f"{where} source: expected a text")
    own, every = _options(commands[command]), _options(commands["convert"])
    added: list[str] = []
    for key, value in table.items():
        if f"--{key}" not in every:
            close = difflib.get_close_matches(f"--{key}", every, 1)
            hint = f" (did you mean {close[0][2:]}?)" if close else ""
            raise InputError(f"{where} {key}: pipeline convert has no option --{key}{hint}")
        if f"--{key}" in own:
            action = commands[command]._option_string_actions[f"--{key}"]
            if action.nargs == 0 and not isinstance(value, bool):
                raise InputError(f"{where} {key}: expected true or false, not {value!r}")
            words = list(_words(f"--{key}", value, f"{where} {key}"))
            for word in words if action.nargs != 0 else ():
                _check_choice(action, word.partition("=")[2], f"{where} {key}")
            added += words
    return [command, source, *_without(added, rest), *rest]


def _check_choice(action: argparse.Action, value: str, where: str) -> None:
    """Raises `InputError`, which names the file, for a value that the option does not take."""
    if action.choices is not None and value not in map(str, action.choices):
        choices = ", ".join(map(str, action.choices))
        raise InputError(f"{where}: {value!r} is none of these: {choices}")
    if callable(action.type):
        try:
            action.type(value)
        except (argparse.ArgumentTypeError, TypeError, ValueError, InputError) as error:
            raise InputError(f"{where}: {error}") from error


# options that are repeated for many names, and what stands behind a name
_NAMED = {
    "--dim": "=", "--range": "=", "--option": "=", "--input": ":", "--tolerance": "=",
    "--output-name": "",
}  # fmt: skip


def _name(flag: str, value: str) -> str:
    sign = _NAMED[flag]  # --output-name has none: those of the command line are all names
    name, found, _ = value.partition(sign) if sign else ("", "", "")
    return name if found else ""


def _without(added: Sequence[str], rest: Sequence[str]) -> list[str]:
    """The words of the file, without names that the command line gives to the same option."""
    pairs = [word.split("=", 1) for word in rest if word.startswith("--") and "=" in word]
    pairs += [list(pair) for pair in itertools.pairwise(rest)]
    given = {(flag, _name(flag, value)) for flag, value in pairs if flag in _NAMED}
    kept = []
    for word in added:
        flag, _, value = word.partition("=")
        if flag not in _NAMED or (flag, _name(flag, value)) not in given:
            kept.append(word)
    return kept


def _read(file: Path) -> Mapping[str, Any]:
    if sys.version_info < (3, 11):
        raise InputError(f"{FILE} needs Python 3.11. Pass the options on the command line")
    import tomllib

    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{FILE}: cannot be read: {error}") from error


def _options(command: argparse.ArgumentParser) -> list[str]:
    return [flag for action in command._actions for flag in action.option_strings]


def _words(flag: str, value: object, where: str) -> Iterator[str]:
    """An option as words of the command line."""
    if value is True:
        yield flag
    elif isinstance(value, (str, int, float)) and not isinstance(value, bool):
        yield f"{flag}={value}"
    elif isinstance(value, list):
        for one in value:
            if isinstance(one, (bool, list)):
                raise InputError(f"{where}: expected texts or numbers")
            yield from _words(flag, one, where)
    elif value is not False:
        raise InputError(f"{where}: expected a text, a number, true, or a list of texts")
