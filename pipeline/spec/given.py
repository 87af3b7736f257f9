"""Checks of what a user passes in Python: the names of fields, and the kind of each value."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from pipeline.errors import InputError

_Class = TypeVar("_Class", bound=type)


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
    """Makes an unknown field of a dataclass an `InputError`. Python's own error lists no names."""
    made: Any = cls
    own = made.__init__
    known = tuple(field.name for field in fields(made) if field.init)

    @functools.wraps(own)
    def checked(self: Any, *args: Any, **given: Any) -> None:
        check_names(given, known, cls.__name__)
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


def _shown(value: Any) -> str:
    return repr(str(value) if isinstance(value, Path) else value)
