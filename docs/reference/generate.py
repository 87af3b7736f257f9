"""Prints docs/reference/command-line.md, made from the command line's own parser.

python docs/reference/generate.py > docs/reference/command-line.md
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from pipeline.commands.main import command_parser

HEAD = """# Which commands and options are there?

This page is generated from the command line's parser. To make it again:

    python docs/reference/generate.py > docs/reference/command-line.md

`make` only calls these commands. Activate the environment first: `. .venv/bin/activate`.
Every command accepts `--json` for a report as JSON, and `--debug` for a traceback with an error.

| command | what it does |
|---|---|
"""
TAIL = """
## Exit codes

| code | meaning |
|---|---|
| 0 | done, and nothing that was compared differs |
| 1 | a conversion or a comparison failed |
| 2 | bad input; one line says what, where and what to do |
| 130 | interrupted; the old artifact is untouched |
"""


def page() -> str:
    """The whole page as Markdown: a table of the commands, and a part for each."""
    parser = command_parser()
    (commands,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    texts = {choice.dest: choice.help or "" for choice in commands._choices_actions}
    rows = "".join(f"| `{name}` | {_cell(text)} |\n" for name, text in texts.items())
    everywhere = "".join(_rows(parser))
    parts = (_part(name, commands.choices[name]) for name in texts)
    head = f"{HEAD}{rows}\nOptions before the command:\n\n| option | meaning |\n|---|---|\n"
    return f"{head}{everywhere}\n{''.join(parts)}{TAIL.lstrip()}"


def _part(name: str, parser: argparse.ArgumentParser) -> str:
    """One command: what it does, and its arguments."""
    places = [a.metavar or a.dest for a in parser._actions if not a.option_strings]
    usage = " ".join(["pipeline", name, "[OPTIONS]", *map(str, places)])
    rows = "".join(_rows(parser))
    text = f"## {name}\n\n{parser.description}\n\n```\n{usage}\n```\n\n"
    return f"{text}| argument | meaning |\n|---|---|\n{rows}\n"


def _rows(parser: argparse.ArgumentParser) -> Iterator[str]:
    """A row for each argument that `--help` shows, but for `--help` itself."""
    for action in parser._actions:
        if action.help is argparse.SUPPRESS or action.dest == "help":
            continue
        if isinstance(action, argparse._SubParsersAction):
            continue
        value = "" if action.nargs == 0 else _value(action)
        words = [f"{flag} {value}".strip() for flag in action.option_strings] or [value]
        text = (action.help or "") % {"prog": parser.prog, "default": action.default}
        shown = ", ".join(f"`{_cell(word)}`" for word in words)
        yield f"| {shown} | {_cell(text)} |\n"


def _value(action: argparse.Action) -> str:
    """What stands for an argument's value."""
    if action.choices is not None and action.metavar is None:
        return "{" + ",".join(map(str, action.choices)) + "}"
    name = action.metavar or (action.dest.upper() if action.option_strings else action.dest)
    return str(name)


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


if __name__ == "__main__":
    print(page(), end="")
