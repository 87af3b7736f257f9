"""Branches on sizes that only choose numbers, pad or crop, as arithmetic on sizes.

torch.export follows one side of each branch. Window attention, say, does not shift its windows
where one window covers the image::

    if window >= height:
        shift[0] = 0

Both sides of such a branch only give numbers to names and to elements of lists. So its function is
compiled again with the branch as arithmetic (`pipeline.export.select`): the shift becomes a size
that is 0 there. A side may also pad or crop a tensor (``x = F.pad(x, (0, n))``, ``x = x[:, :-n]``):
on the other side, a copy of it is padded by 0, or a view of it is cropped to its size. If one of
the two is written to later, the branch stays. That is done while torch traces, for the lines that
are named. The program is checked like any other.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

from pipeline.export.asked import Line
from pipeline.export.exchange import Exchange
from pipeline.export.number_syntax import NumberBranches
from pipeline.export.select import writes_watched

_WITH_CODE = (
    FunctionType, MethodType, type, property, staticmethod, classmethod, functools.partial,
)  # fmt: skip

_Codes = Mapping[tuple[str, int], CodeType]  # code by its name and first line


@contextlib.contextmanager
def selecting(lines: Collection[Line], classes: Collection[type] = ()) -> Iterator[None]:
    """While it is active, the branches at these lines are arithmetic, where they can be.

    Only functions and methods are changed to which a Python module's names or the classes lead.

    Args:
        lines: The lines.
        classes: The classes of the model's modules; a function may have defined them.

    Raises:
        Undecided: the model writes into a tensor that such a branch pads, crops or chooses.
    """
    new: dict[tuple[Any, str], Any] = {}
    for file in {file for file, _ in lines}:
        codes = _compiled(file, frozenset(line for other, line in lines if other == file))
        for function in _functions(file, classes) if codes else ():
            code = function.__code__
            other = codes.get(_key(code))
            if other is not None and other.co_freevars == code.co_freevars:
                new[function, "__code__"] = other
    with Exchange(new).used() if new else contextlib.nullcontext(), writes_watched():
        yield


def _functions(file: str, classes: Collection[type]) -> list[FunctionType]:
    """The functions of a file, and those inside their wrappers."""
    found: dict[int, FunctionType] = {}
    seen: set[int] = set()

    def visit(value: Any) -> None:
        if id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, FunctionType):
            if value.__code__.co_filename == file:
                found[id(value)] = value
            cells = value.__closure__ or ()
            parts = [getattr(value, "__wrapped__", None), *map(_content, cells)]
        elif isinstance(value, type) and value.__module__ in names:
            parts = list(vars(value).values())
        elif isinstance(value, property):
            parts = [value.fget]
        else:
            parts = [getattr(value, name, None) for name in ("__func__", "func", "__wrapped__")]
        for part in parts:
            if isinstance(part, _WITH_CODE):
                visit(part)

    modules = [m for m in list(sys.modules.values()) if getattr(m, "__file__", None) == file]
    names = {module.__name__ for module in modules}
    named = [value for module in modules for value in vars(module).values()]
    for value in (*named, *(base for one in classes for base in one.__mro__)):
        if isinstance(value, _WITH_CODE):
            visit(value)
    return list(found.values())


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None


def arithmetic_lines(lines: Collection[Line]) -> frozenset[Line]:
    """Those of the lines whose branch can be arithmetic, as far as its text tells."""
    return frozenset(
        (file, line)
        for file, line in lines
        if not file.startswith("<") and _compiled(file, frozenset({line}))
    )


def _key(code: CodeType) -> tuple[str, int]:
    return code.co_name, code.co_firstlineno


def _parts(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _parts(constant)


@functools.cache
def _compiled(file: str, lines: frozenset[int]) -> _Codes:
    """The functions of a file with the branches at some lines as arithmetic.

    Empty if none of them can be. A function that has the name and line of another is left out.
    """
    try:
        change = NumberBranches(lines)
        tree = change.visit(ast.parse(Path(file).read_text(encoding="utf-8"), file))
        if not change.count:
            return {}
        whole = compile(tree, file, "exec", dont_inherit=True)
    except (OSError, SyntaxError, UnicodeDecodeError, RecursionError):
        return {}
    found: dict[tuple[str, int], CodeType] = {}
    twice = set()
    for code in _parts(whole):
        twice |= {_key(code)} & found.keys()
        found[_key(code)] = code
    return {key: code for key, code in found.items() if key not in twice}
