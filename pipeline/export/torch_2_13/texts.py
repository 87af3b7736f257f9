"""Makes a text that a model forms from a symbolic size count as a use of its value.

``str(x.shape[-1])`` and ``f"{h}x{w}"`` give ``s77`` while torch traces. A model that looks such a
text up in a table finds nothing, and the program keeps what it does then for every size. Under
`true_texts` the text has the example's number, and torch learns that the program holds for this
number only. So the size counts as baked in, at the model's line.

A text that the model's line only prints, logs, raises or asserts is left to torch.
"""

from __future__ import annotations

import ast
import linecache
import re
import sys
from contextlib import AbstractContextManager
from functools import lru_cache
from types import FrameType
from typing import Any

import torch

from pipeline.export.exchange import Exchange
from pipeline.probe.code_files import is_model_file

_MESSAGES = (
    "assert", "check", "debug", "error", "exception", "fail", "info", "log", "pprint", "print",
    "raise", "warn", "warning",
)  # fmt: skip
_WORDS = re.compile("[A-Z]?[a-z]+|[A-Z]+")
_KINDS = (torch.SymInt, torch.SymFloat, torch.SymBool)
_torchs = {kind: kind.__repr__ for kind in _KINDS}


def _text(number: Any) -> str:
    kind = next(kind for kind in _KINDS if isinstance(number, kind))
    if not _is_used(sys._getframe(1)):
        return str(_torchs[kind](number))
    plain = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}[kind]
    return repr(plain(number))


def _is_used(frame: FrameType) -> bool:
    """True if a line of the model makes a text that it may use for more than a message."""
    file = frame.f_code.co_filename
    return is_model_file(file) and not _is_message(file, frame.f_lineno)


@lru_cache(maxsize=256)
def _is_message(file: str, line: int) -> bool:
    """True if the statement at this line raises, asserts, prints or logs."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return False
    around = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or node.lineno)
    ]
    inner = [s for s in around if not any(s is not o and o in ast.walk(s) for o in around)]
    return bool(inner) and all(map(_only_says, inner))


def _only_says(inner: ast.stmt) -> bool:
    """True for a statement that raises, asserts, prints or logs."""
    if isinstance(inner, ast.Expr) and isinstance(inner.value, ast.Call):
        name = inner.value.func
        words = _WORDS.findall(getattr(name, "attr", getattr(name, "id", "")))
        return any(word.lower() in _MESSAGES for word in words)
    return isinstance(inner, (ast.Raise, ast.Assert))


_exchange = Exchange({(kind, "__repr__"): _text for kind in _KINDS})


def true_texts() -> AbstractContextManager[None]:
    """Exchanges the texts of symbolic numbers, for the model's own code."""
    return _exchange.used()
