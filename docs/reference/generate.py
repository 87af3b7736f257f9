"""Writes the generated pages of this folder: command-line.md and findings.md.

python docs/reference/generate.py
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path

from pipeline.commands.parser import EXAMPLES, all_commands, command_parser
from pipeline.spec.findings import FAILING, NOTES
from pipeline.spec.rules import RULE_KINDS
from pipeline.spec.verdicts import CHECKS, GOOD_CHECKS, ROW_CHANGES, VERDICTS

HEAD = """# Which commands and options are there?

This page is generated from the command line's parser. To make it again:

    python docs/reference/generate.py

`make` only calls these commands. Activate the environment first: `. .venv/bin/activate`.
Every command accepts `--json`: the report is JSON on stdout, and each step is a line of JSON
on stderr. `--debug` shows a traceback with an error.

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
| 130 | interrupted; the line says whether the artifact is the old or the new one |
"""


FINDINGS = """# Which kinds of findings are there?

This page is generated from the tables in the code. To make it again:

    python docs/reference/generate.py

A finding is an object with a `kind`, `facts` and a `text`. You find them in `manifest.json` and in
the output of `--json`. In your programs, decide on the kind and the facts. A text may change.

```py
import json

manifest = json.load(open("artifacts/linear/manifest.json"))
for point in manifest["comparison"]["points"]:
    for result in point["results"]:
        if result["kind"] != "agrees":
            print(point["sizes"], result["output"], result["kind"], result["text"])
```
"""


def command_line() -> str:
    """The page of the command line: a table of the commands, and a part for each."""
    parser = command_parser()
    commands = all_commands(parser)
    rows = "".join(
        f"| `{name}` | {_cell(sub.description or '')} |\n" for name, sub in commands.items()
    )
    everywhere = "".join(_rows(parser))
    parts = (_part(name, sub) for name, sub in commands.items())
    head = f"{HEAD}{rows}\nOptions before the command:\n\n| option | meaning |\n|---|---|\n"
    return f"{head}{everywhere}\n{''.join(parts)}{TAIL.lstrip()}"


def _part(name: str, parser: argparse.ArgumentParser) -> str:
    """One command: what it does, and its arguments."""
    places = [a.metavar or a.dest for a in parser._actions if not a.option_strings]
    usage = " ".join(["pipeline", name, "[OPTIONS]", *map(str, places)])
    rows = "".join(_rows(parser))
    text = f"## {name}\n\n{parser.description}\n\n```text\n{usage}\n```\n\n"
    examples = "\n".join(EXAMPLES[name])
    text += f"For example:\n\n```sh\n{examples}\n```\n\n"
    return f"{text}| argument | meaning |\n|---|---|\n{rows}\n" if rows else text


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


def findings() -> str:
    """The page of the kinds of findings: a table for each list of kinds."""
    notes = {kind: note.meaning for kind, note in NOTES.items()}
    failing = ", ".join(f"`{kind}`" for kind in notes if kind in FAILING)
    verdicts = {kind: verdict.meaning for kind, verdict in VERDICTS.items()}
    checks = {kind: check.meaning for kind, check in CHECKS.items()}
    return FINDINGS + "".join(
        (
            _kinds(
                "How does a run's output compare with the reference?",
                "`comparison.points[].results[]` holds one for each pair of runs and output. "
                "Every kind but `agrees` fails the comparison.",
                verdicts,
            ),
            _kinds(
                "What did the checks of a single run find?",
                "`comparison.checks[]` holds them. These kinds pass: "
                f"{', '.join(f'`{kind}`' for kind in checks if kind in GOOD_CHECKS)}.",
                checks,
            ),
            _kinds(
                "How do the rows of a batch depend on each other?",
                "`comparison.checks[].rows[]` holds them. With `in_model` the reference does the "
                "same, and it is no fault.",
                ROW_CHANGES,
            ),
            _kinds(
                "Which notes are there?",
                "`comparison.notes[]` holds them; `comparison.points[].left_out` holds why sizes "
                "were not compared; `compare` and `--against` report what got worse. These kinds "
                f"fail a comparison: {failing}.",
                notes,
            ),
            _kinds(
                "Which rules may a model have on its sizes?",
                "`export.refinements[]` holds the rules that narrowed your dims. `pipeline check "
                "--json` reports the others.",
                RULE_KINDS,
            ),
        )
    )


def _kinds(title: str, text: str, meanings: Mapping[str, str]) -> str:
    """A part with a table of kinds."""
    rows = "".join(f"| `{kind}` | {_cell(meaning)} |\n" for kind, meaning in meanings.items())
    return f"\n## {title}\n\n{text}\n\n| kind | meaning |\n|---|---|\n{rows}"


PAGES = {"command-line.md": command_line, "findings.md": findings}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (Path(__file__).parent / name).write_text(page(), encoding="utf-8")
