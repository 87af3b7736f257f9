"""Prints the text of a command: the one place that writes to the terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TextIO

# called before a result is printed: they end what moves on the terminal
BEFORE_RESULTS: list[Callable[[], None]] = []


def show(text: str, stream: TextIO | None = None) -> None:
    """Prints text, with escapes in place of control characters.

    Names in manifests and ONNX files come from other people. A terminal would obey their escape
    sequences.

    Args:
        text: Lines of text.
        stream: Where to print; by default stdout.
    """
    if stream is None:
        for end in BEFORE_RESULTS:
            end()
    out = stream or sys.stdout
    out.write(plain(text) + "\n")  # one write: a signal may come between the two of print()
    if stream is not None:
        out.flush()


def on_terminal() -> bool:
    """Whether a person reads stdout as it is printed. In a file or a pipe, no text is cut."""
    return sys.stdout.isatty()


def plain(text: str) -> str:
    """The text with escapes (``\\x1b``) in place of everything that is not printable.

    Ends of lines and tabs stay.
    """
    if text.isprintable():
        return text
    return "".join(ch if ch.isprintable() or ch in "\n\t" else _escape(ch) for ch in text)


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
