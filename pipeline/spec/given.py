"""Checks of what a user passes in Python: the names of fields, and the kind of each value."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, TypeVar

from pipeline.errors import InputError

_Class = TypeVar("_Class", bound=type)
# a call of each class to copy
_CALLS = {
    "Tolerance": 'Tolerance(rtol=1e-3, atol=1e-5, why="float32 rounding")',
    "Dim": 'Dim("h", min=64, opt=128, max=512)',
    "Input": 'Input("x", (1, 3, h, w))',
    "Output": 'Output("y")',
    "Profile": 'Profile("small", {"h": (64, 128, 256)})',
    "Padding": 'Padding({"h": 8, "w": 8})',
    "ModelSpec": 'ModelSpec("net", build, (Input("x", (1, 3, h, w)),))',
    "Config": 'Config("file.py:factory", inputs=("x:1x3x{h}x{w}",), dims=("h=64:512", "w=64:512"))',
}


def check_names(given: Iterable[str], known: Iterable[str], of: str) -> None:
    """Raises `InputError` for a name that is not known. It has the most similar one.

    Args:
        given: The names to check.
        known: The valid names.
        of: What has these names, such as ``Config``.
    """
    known = tuple(known)
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f" (did you mean {close[0]}?)" if close else ""
            words = f"The options of {of}: {', '.join(known)}"
            raise InputError(f"no option {name!r}{hint}. {words}")


def named_fields(cls: _Class) -> _Class:
    """Makes a wrong call of a dataclass an `InputError` that says what to call.

    A field may be unknown or missing, or there may be too many values. Python's own errors list no
    names and give no example.
    """
    made: Any = cls
    own = made.__init__
    known = tuple(field.name for field in fields(made) if field.init)
    needed = [
        field.name
        for field in fields(made)
        if field.init and field.default is MISSING and field.default_factory is MISSING
    ]

    @functools.wraps(own)
    def checked(self: Any, *args: Any, **given: Any) -> None:
        check_names(given, known, cls.__name__)
        form = f". Write for example {_CALLS[cls.__name__]}" if cls.__name__ in _CALLS else ""
        places = known[: len(args)]
        if len(args) > len(known):
            text = f"{len(args)} values for the {len(known)} fields {', '.join(known)}"
            raise InputError(f"{cls.__name__}: {text}{form}")
        for name in (name for name in places if name in given):
            raise InputError(f"{cls.__name__}: {name} is given twice{form}")
        if missing := [name for name in needed if name not in (*places, *given)]:
            verb = "is" if len(missing) == 1 else "are"
            raise InputError(f"{cls.__name__}: {' and '.join(missing)} {verb} missing{form}")
        own(self, *args, **given)

    made.__init__ = checked
    return cls


def check_texts(word: str, values: Any, example: str, others: tuple[type, ...] = ()) -> None:
    """Raises `InputError` unless the values are a sequence of texts.

    Args:
        word: The name of the field.
        values: The value of the field.
        example: A valid text, for the message.
        others: Other valid types of each value.
    """
    form = f'Write {word}=("{example}",)'
    if isinstance(values, (str, Path)) or not isinstance(values, (tuple, list)):
        if isinstance(values, Mapping):
            raise InputError(f"{word}={values!r}: expected a tuple of texts, not a dict. {form}")
        raise InputError(f"{word}={_shown(values)}: expected a tuple. {form}")
    for value in values:
        if not isinstance(value, (str, *others)):
            kind = type(value).__name__
            raise InputError(f"{word}: {value!r} is a {kind}, and a text is expected. {form}")


def check_kind(word: str, value: Any, kinds: tuple[type, ...], form: str) -> None:
    """Raises `InputError` unless a value is of one of these types; a bool is no number.

    Args:
        word: The name of the field.
        value: The value of the field; None is valid.
        kinds: The valid types.
        form: A valid value, for the message.
    """
    if value is None or (isinstance(value, kinds) and not isinstance(value, bool)):
        return
    kind = type(value).__name__
    raise InputError(f"{word}={value!r}: is of the type {kind}. Write for example {word}={form}")


def _shown(value: Any) -> str:
    return repr(str(value) if isinstance(value, Path) else value)
