"""Ranges and patterns of an input's random values as text: ``0..1000``, ``1..t``, ``prefix``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from pipeline.errors import InputError
from pipeline.spec.dims import Dim, DimExpr
from pipeline.spec.forms import BOOL_FORM, RANGE_FORM
from pipeline.spec.tensors import End, Pattern

_BOOLS: dict[tuple[float, float], tuple[float, float]] = {
    (1, 2): (1.0, 2.0), (1, 1): (1.0, 2.0), (0, 0): (-2.0, -1.0),
    (0, 1): (-1.0, 1.0), (-1, 1): (-1.0, 1.0),
}  # fmt: skip


def read_range(text: str, dtype: str, dims: Mapping[str, Dim]) -> dict[str, Any]:
    """Reads a range or a pattern into fields of an `Input`.

    Args:
        text: ``0..1000``; ``1..t``, where an end is an expression of dims; or a pattern.
        dtype: The input's dtype.
        dims: The dims by name.

    Raises:
        InputError: The text has none of these forms.
    """
    if text in get_args(Pattern) and text:
        return {"pattern": text}
    parts = text.split("..")
    if len(parts) != 2:
        raise InputError(f"expected {RANGE_FORM}")
    low, high = (_end(part.strip(), dims) for part in parts)
    if dtype == "bool":
        if not isinstance(low, float) or not isinstance(high, float):
            raise InputError(f"{text} is not a valid range; {BOOL_FORM}")
        low, high = _bool_range(low, high)
    return {"low": low, "high": high, "pattern": ""}


def _end(text: str, dims: Mapping[str, Dim]) -> End:
    try:
        return float(text)
    except ValueError:
        pass
    try:
        names = DimExpr(text).names
    except InputError as error:
        raise InputError(f"expected {RANGE_FORM}: {error}") from error
    for name in sorted(names - dims.keys()):
        raise InputError(f"expected {RANGE_FORM}: there is no dim {name}")
    return DimExpr(text, tuple(dim for name, dim in dims.items() if name in names))


def _bool_range(low: float, high: float) -> tuple[float, float]:
    """Translates a bool's range into one for `Input.sample`, which makes positive values true.

    1..2 and 1..1 are all true, and 0..0 is all false. 0..1 and -1..1 are half true, half false.
    Without this translation 0..1 would be all true, because all its values are positive.

    Raises:
        InputError: The range is another one.
    """
    if (low, high) not in _BOOLS:
        raise InputError(f"{low:g}..{high:g} is not a valid range; {BOOL_FORM}")
    return _BOOLS[low, high]


def split_range(text: str) -> tuple[str, str]:
    """Splits ``ids=0..1000`` into the input's name and its range.

    Raises:
        InputError: The text does not have that form.
    """
    name, equals, values = (part.strip() for part in text.partition("="))
    if not equals or not name or not values:
        raise InputError(f"range {text!r} is not INPUT=LOW..HIGH, such as ids=0..1000")
    return name, values
