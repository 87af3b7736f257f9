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
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.errors import InputError

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
    table = _read(file).get(model)
    if table is None:
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
            added += _words(f"--{key}", value, f"{where} {key}")
    return [command, source, *added, *rest]


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
