"""Dataclasses to JSON and back, by their type hints; errors name the path to the field."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from types import MappingProxyType, NoneType, UnionType
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

from pipeline.errors import ArtifactError, InputError, first_line

Writers = Mapping[type, Callable[[Any], Any]]
Readers = Mapping[Any, Callable[[Any, str, str], Any]]


def encode(value: Any, writers: Writers = MappingProxyType({})) -> Any:
    """Converts dataclasses to JSON's types; a float that is not finite becomes None.

    It does not check values; `decode` does that.

    Args:
        value: The value to convert.
        writers: A function for each type that is not written field by field.
    """
    if type(value) in writers:
        return writers[type(value)](value)
    if is_dataclass(value):
        return {item.name: encode(getattr(value, item.name), writers) for item in fields(value)}
    if isinstance(value, Mapping):
        return {key: encode(item, writers) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [encode(item, writers) for item in value]
    if isinstance(value, float):  # numpy's float64 is one too, but not of JSON's type
        return float(value) if math.isfinite(value) else None
    return value


def fail(where: str, at: str, what: str) -> NoReturn:
    """Raises an `ArtifactError` with the file, the path in the file, and the problem."""
    raise ArtifactError(f"{where}: {at}: {what}" if at else f"{where}: {what}")


_JSON: dict[Any, type] = {tuple: list, Mapping: dict}  # the types in JSON
_CONTAINERS: dict[Any, str] = {tuple: "a list", Mapping: "an object"}
_UNFIT = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
_LARGEST = 1 << 63  # no size or count of a model is larger
_SCALARS = {str: "a string", int: "an integer", float: "a finite number", bool: "true or false"}


def decode(
    value: Any, kind: Any, where: str, at: str, readers: Readers = MappingProxyType({})
) -> Any:
    """Converts a value from JSON to a `kind`, the inverse of `encode`.

    Args:
        value: The value from JSON.
        kind: A dataclass, a Mapping with string keys, a tuple, a Literal, str, int, float, bool,
            or a union of these. The types in a union must differ in JSON.
        where: The file, for the beginning of errors.
        at: The path to the value in the file, such as ``points[2].sizes``.
        readers: A function for each kind that is read in another way. Its arguments are the value,
            `where` and `at`.

    Raises:
        ArtifactError: A field is missing or unknown, or has another type or an invalid value. Or a
            computed field (`init=False`) has another value than computed.
    """
    if kind in readers:
        return readers[kind](value, where, at)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return _decode_union(value, arguments, where, at, readers)
    if origin is tuple:
        return _decode_tuple(value, arguments, where, at, readers)
    if origin is Mapping:
        return {
            key: decode(item, arguments[1], where, f"{at}.{key}", readers)
            for key, item in _object(value, where, at).items()
        }
    if is_dataclass(kind):
        return _decode_fields(value, kind, where, at, readers)
    if origin is Literal:
        right, words = value in arguments, " or ".join(map(repr, arguments))
    else:
        right, words = _is_a(value, kind), _SCALARS[kind]
    if not right:
        fail(where, at, f"expected {words}")
    return float(value) if kind is float else value


def _is_a(value: Any, kind: type) -> bool:
    if isinstance(value, bool):
        return kind is bool
    if kind is float:  # Python reads JSON's 1e999 as infinity
        return isinstance(value, int | float) and abs(value) <= sys.float_info.max
    if kind is int:
        return isinstance(value, int) and abs(value) <= _LARGEST
    return isinstance(value, kind)


def _object(value: Any, where: str, at: str) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        fail(where, at, "expected an object")
    return value


def _decode_union(value: Any, kinds: tuple[Any, ...], where: str, at: str, readers: Readers) -> Any:
    if value is None and NoneType in kinds:
        return None
    rest = [kind for kind in kinds if kind is not NoneType]
    if len(rest) == 1:
        return decode(value, rest[0], where, at, readers)
    for kind in rest:
        if _JSON.get(get_origin(kind), kind) is type(value):
            return decode(value, kind, where, at, readers)
    words = [_SCALARS.get(kind) or _CONTAINERS[get_origin(kind)] for kind in rest]
    fail(where, at, f"expected {' or '.join(words)}")


def _decode_tuple(
    value: Any, kinds: tuple[Any, ...], where: str, at: str, readers: Readers
) -> tuple[Any, ...]:
    if not isinstance(value, list):
        fail(where, at, "expected a list")
    if kinds[-1] is ...:
        kinds = kinds[:1] * len(value)
    if len(value) != len(kinds):
        fail(where, at, f"expected a list of {len(kinds)}")
    return tuple(
        decode(item, kind, where, f"{at}[{index}]", readers)
        for index, (item, kind) in enumerate(zip(value, kinds, strict=True))
    )


def decode_members(
    value: Any, hints: Mapping[str, Any], where: str, at: str, readers: Readers
) -> dict[str, Any]:
    """The members of a JSON object by name, each of the kind in `hints`.

    Raises:
        ArtifactError: See `decode`.
    """
    content = _object(value, where, at)
    prefix = f"{at}." if at else ""
    for name in {**hints, **content}:
        if name not in content or name not in hints:
            fail(where, prefix + name, f"is {'unknown' if name in content else 'missing'}")
    return {
        name: decode(content[name], hint, where, prefix + name, readers)
        for name, hint in hints.items()
    }


def _decode_fields(value: Any, kind: Any, where: str, at: str, readers: Readers) -> Any:
    found = decode_members(value, get_type_hints(kind), where, at, readers)
    computed = [item.name for item in fields(kind) if not item.init]
    try:
        made = kind(**{name: item for name, item in found.items() if name not in computed})
    except InputError as error:
        fail(where, at, str(error))
    except KeyError as error:  # a finding that lacks both its text and a fact for the text
        fail(where, at, f"lacks {error}, which other fields need")
    except _UNFIT as error:  # such as a fact that is text where the finding's text needs a number
        fail(where, at, f"its fields don't fit together: {first_line(error)}")
    for name in computed:
        if getattr(made, name) != found[name]:
            at = f"{at}.{name}" if at else name
            fail(where, at, f"is {found[name]}, which contradicts other fields")
    return made
