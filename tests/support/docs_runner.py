"""Runs the commands of pages in one folder, and compares what they print with what pages show."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from docs_blocks import NOT_RUN, SHOWN, Block, blocks_of
from quick_exports import keep_table

from pipeline.commands.main import main


def nothing(_: str) -> None:
    """Does nothing before a command."""


@dataclass
class Runner:
    """Runs commands in the current folder.

    Args:
        capture: pytest's `capsys`.
        pages: the pages to run, in this order.
        before: is called with each command before it runs.
        ran: what each command that ran has printed.
    """

    capture: Any
    pages: Sequence[str] = ()
    before: Callable[[str], None] = nothing
    ran: dict[str, str] = field(default_factory=dict)

    def run_pages(self) -> None:
        """Runs the `sh` blocks of the pages. A `text` block is the output of the last command.

        It may also be in `SHOWN`.
        """
        last = ""
        for block in (block for page in self.pages for block in blocks_of(page)):
            if block.language == "sh":
                for command in block.commands:
                    if command not in NOT_RUN:
                        last = self.output(command, str(block))
            elif block.language == "text" and not block.text.startswith(SHOWN):
                check_shown(block, last)

    def output(self, command: str, where: str, code: int = 0) -> str:
        """What a command prints. An equal command does not run twice, unless there is `before`."""
        if command in self.ran and self.before is nothing:
            return self.ran[command]
        self.before(command)
        name, *words = shlex.split(command)
        if name == "cp":
            shutil.copy(*words)
            return ""
        if name == "cat":
            return Path(words[0]).read_text()
        assert name == "pipeline", f"{where}: {command}: the test does not know {name}"
        keep_table()
        self.capture.readouterr()
        found = main(words)
        output, errors = self.capture.readouterr()
        assert found == code, f"{where}: {command}: exit code {found}\n{output}{errors}"
        self.ran[command] = f"{output}{errors}"
        return self.ran[command]


def check_shown(block: Block, output: str) -> None:
    """Each line of a block is in the output, in this order. `...` stands for any text.

    Seconds, and the folders of the model's files, may differ.
    """
    rest = plain(output)
    for line in plain(block.text).splitlines():
        parts = ".*?".join(re.escape(part.strip()) for part in line.split("..."))
        found = re.search(rf"^(usage: )? *{parts} *$", rest, re.MULTILINE)
        assert found is not None, f"{block}: not printed: {line}\n{rest}"
        rest = rest[found.end() :]


def plain(text: str) -> str:
    """A text without folders, and with 0 in place of seconds."""
    text = re.sub(r"(?<![\w/])/(?:[\w.-]+/)+(?=[\w-]+\.py)", "", text)
    return re.sub(r"\b[\d.]+ s\b", "0 s", text)
