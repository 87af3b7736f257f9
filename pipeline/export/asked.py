"""Hears what a model's code asks about its sizes while torch traces it."""

from __future__ import annotations

import dis
import linecache
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import sympy
import torch
from torch.fx.experimental import sym_node
from torch.fx.experimental.sym_node import SymNode

from pipeline.export.exchange import Exchange
from pipeline.export.symbols import exact
from pipeline.probe.code_files import is_framework

_SYMBOLS = (torch.__file__, sym_node.__file__)  # have SymBool and its arithmetic
_ASKING = (
    *_SYMBOLS,
    str(Path(__file__).with_name("select.py")),
    str(Path(__file__).with_name("cut.py")),
)
_MOST_TURNS = 4  # of a loop that count as code that did not run before
_LAYERS = str(Path(torch.__file__).parent / "nn") + os.sep

Line = tuple[str, int]  # a file and a line's number
Function = tuple[str, int, str]  # a file, the function's first line, its name
Instruction = tuple[Function, int, int]  # its function, its offset, how often it ran before


class Asked(NamedTuple):
    """A condition on symbolic sizes that was evaluated, or a size that became a number.

    Args:
        condition: the condition in torch's symbols, or what a number was made of.
        held: the condition or its opposite, whichever was true; for a number ``size == number``.
        line: the model's line, as ``file:line in function: code``.
        number: the number that was made of a size; None for a condition.
        place: the model's file and line, if one of its functions runs.
        inside: whether something that Python has in C asked, such as the ``==`` of two tuples. On
            the other side it may ask for more, and no other code of the model runs.
    """

    condition: str
    held: str
    line: str = ""
    number: float | None = None
    place: Line | None = None
    inside: bool = False


_heard: ContextVar[list[Asked] | None] = ContextVar("_heard", default=None)
_torchs: dict[str, Callable[..., Any]] = {
    name: vars(SymNode)[name] for name in ("bool_", "guard_int", "guard_float")
}


def _bool(node: Any) -> bool:
    """`SymNode.bool_`, which Python's ``if`` calls; torch's ops in C++ call another method."""
    result: bool = _torchs["bool_"](node)
    heard = _heard.get()
    if heard is not None:
        asking = frame = _outside(sys._getframe(1), _ASKING)
        frame = _outside(frame, _LAYERS)
        if frame is not None and (frame is not asking or _is_of_model(frame)):
            heard.append(_asked(node, result, frame)._replace(inside=_is_inside()))
    return result


def _is_inside() -> bool:
    """Whether no branch of Python code evaluates a condition, but a function or operator in C.

    In Python 3.13 a comparison evaluates its own result, so there every comparison counts.
    """
    frame = _outside(sys._getframe(2), _SYMBOLS)
    if frame is None:
        return False
    name = dis.opname[frame.f_code.co_code[frame.f_lasti]]
    return "JUMP" not in name and name not in ("UNARY_NOT", "TO_BOOL")


def hear(condition: torch.SymBool) -> None:
    """Records a condition that the model's code has as arithmetic, and not as a branch."""
    heard = _heard.get()
    frame = _outside(sys._getframe(1), _ASKING)
    if heard is not None and frame is not None:
        heard.append(_asked(condition.node, bool(condition.node.hint), frame))


def decide(condition: torch.SymBool) -> bool:
    """Evaluates a condition that the model reads from a tensor, and records it."""
    result: bool = _torchs["bool_"](condition.node)
    heard, frame = _heard.get(), sys._getframe(1)
    if heard is not None:
        heard.append(_asked(condition.node, result, _of_model(frame) or frame))
    return result


def _asked(node: Any, result: bool, frame: FrameType) -> Asked:
    held = node._expr if result else sympy.Not(node._expr)
    place = frame.f_code.co_filename, frame.f_lineno
    return Asked(exact(node._expr), exact(held), _line_of(frame), place=place)


def _int(node: Any, file: str, line: int) -> int:
    """`SymNode.guard_int`, which makes a number of a size, for Python and for torch's ops."""
    _hear_number(node)
    return int(_torchs["guard_int"](node, file, line))


def _float(node: Any, file: str, line: int) -> float:
    """`SymNode.guard_float`."""
    _hear_number(node)
    return float(_torchs["guard_float"](node, file, line))


def _hear_number(node: Any) -> None:
    heard = _heard.get()
    if heard is not None and not node.expr.is_number:
        made_of, frame = exact(node.expr), _of_model(sys._getframe(2))
        place = frame and (frame.f_code.co_filename, frame.f_lineno)
        heard.append(Asked(made_of, f"Eq({made_of}, {node.hint})", number=node.hint, place=place))


_exchange = Exchange(
    {(SymNode, "bool_"): _bool, (SymNode, "guard_int"): _int, (SymNode, "guard_float"): _float}
)


@contextmanager
def listening() -> Iterator[list[Asked]]:
    """Records what the code of a model, or of a layer of torch.nn, asks about symbolic sizes.

    A condition that became arithmetic counts too: behind another branch, the model may not ask it.

    Conditions that torch's ops evaluate are left out: they choose ways to the same result, or fail.
    """
    heard: list[Asked] = []
    token = _heard.set(heard)
    try:
        with _exchange.used():
            yield heard
    finally:
        _heard.reset(token)


def _outside(frame: FrameType | None, places: str | tuple[str, ...]) -> FrameType | None:
    """The first caller whose file is not in a place."""
    while frame is not None and frame.f_code.co_filename.startswith(places):
        frame = frame.f_back
    return frame


def _of_model(frame: FrameType | None) -> FrameType | None:
    """The first caller that is the model's."""
    while frame is not None and not _is_of_model(frame):
        frame = frame.f_back
    return frame


def _is_of_model(frame: FrameType) -> bool:
    return not is_framework(frame.f_code.co_filename)


def _line_of(frame: FrameType) -> str:
    code = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}: {code}"


def instructions_of(call: Callable[[], object]) -> set[Instruction]:
    """The instructions of a model's code that run in a call, and their first repetitions.

    Lines would not be enough: ``if h == 17 and w == 23`` is one line whether it asks for w or not.
    ``all(size == 17 for size in sizes)`` runs the same instructions, but more often.
    """
    turns: Counter[tuple[Function, int]] = Counter()

    def entered(frame: FrameType, _event: str, _: object) -> Any:
        if not _is_of_model(frame):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        code = frame.f_code
        function = code.co_filename, code.co_firstlineno, code.co_name

        def run(frame: FrameType, event: str, _: object) -> Any:
            if event == "opcode":
                turns[function, frame.f_lasti] += 1
            return run

        return run

    before = sys.gettrace()
    sys.settrace(entered)
    try:
        call()
    finally:
        sys.settrace(before)
    return {(*at, turn) for at, n in turns.items() for turn in range(min(n, _MOST_TURNS))}
