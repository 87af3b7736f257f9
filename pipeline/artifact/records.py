"""Dataclasses to JSON and back, by their type hints; errors name the path to the field."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

from pipeline.errors import ArtifactError


def encode(value: Any) -> Any:
    """Dataclasses to JSON's own types; a float that is not finite becomes None.

    Values are not checked; `decode` does that.
    """
    if is_dataclass(value):
        return {item.name: encode(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, Mapping):
        return {key: encode(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [encode(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def fail(where: str, at: str, what: str) -> NoReturn:
    """Raises the ArtifactError that says what is wrong, and where."""
    raise ArtifactError(f"{where}: {at}: {what}" if at else f"{where}: {what}")


_SCALARS = {str: "a string", int: "an integer", float: "a finite number", bool: "true or false"}


def decode(value: Any, kind: Any, where: str, at: str) -> Any:
    """`value`, which came from JSON, as a `kind`: the other way of `encode`.

    Args:
        kind: a dataclass, a Mapping with string keys, a tuple, a Literal, str, int, float, bool,
            or a union of one of them with None, or of several scalars.
        where: the file, with which the errors begin.
        at: the path to the value in the file, as ``points[2].sizes``.

    Raises:
        ArtifactError: a field is missing, unknown or of another type.
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return _decode_union(value, arguments, where, at)
    if origin is tuple:
        return _decode_tuple(value, arguments, where, at)
    if origin is Mapping:
        return {
            key: decode(item, arguments[1], where, f"{at}.{key}")
            for key, item in _object(value, where, at).items()
        }
    if is_dataclass(kind):
        return _decode_fields(_object(value, where, at), kind, where, at)
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
    return isinstance(value, kind)


def _object(value: Any, where: str, at: str) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        fail(where, at, "expected an object")
    return value


def _decode_union(value: Any, kinds: tuple[Any, ...], where: str, at: str) -> Any:
    if value is None and NoneType in kinds:
        return None
    rest = [kind for kind in kinds if kind is not NoneType]
    if len(rest) == 1:
        return decode(value, rest[0], where, at)
    if type(value) not in rest:
        fail(where, at, f"expected {' or '.join(_SCALARS[kind] for kind in kinds)}")
    return decode(value, type(value), where, at)


def _decode_tuple(value: Any, kinds: tuple[Any, ...], where: str, at: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        fail(where, at, "expected a list")
    if kinds[-1] is ...:
        kinds = kinds[:1] * len(value)
    if len(value) != len(kinds):
        fail(where, at, f"expected a list of {len(kinds)}")
    return tuple(
        decode(item, kind, where, f"{at}[{index}]")
        for index, (item, kind) in enumerate(zip(value, kinds, strict=True))
    )


def _decode_fields(content: dict[str, Any], kind: Any, where: str, at: str) -> Any:
    hints = get_type_hints(kind)
    prefix = f"{at}." if at else ""
    for name in {**hints, **content}:
        if name not in content or name not in hints:
            fail(where, prefix + name, f"is {'unknown' if name in content else 'missing'}")
    return kind(
        **{name: decode(content[name], hint, where, prefix + name) for name, hint in hints.items()}
    )
