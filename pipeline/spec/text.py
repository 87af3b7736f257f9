"""Inputs and dims as text: ``image:1x3x{h}x{w}``, ``h=135:440:2160/8``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from pipeline.errors import InputError
from pipeline.spec.dims import Dim, DimExpr, Size, read_size
from pipeline.spec.forms import DIM_FORM, INPUT_FORM
from pipeline.spec.ranges import read_range
from pipeline.spec.structure import Path, name_of
from pipeline.spec.tensors import Input

_NO_SHAPE = f"expected ':' and a shape; the form is {INPUT_FORM}"
_PLACE = re.compile(r"\.?([A-Za-z_]\w*)|\[(\d+)\]|\[(['\"])(.+?)\3\]")
_MANY = re.compile(r"\[(\d+)\.\.(\d+)\]")
_MOST_PARTS = 4096
_DIM = re.compile(r"(\d*)(?::(\d*))?:(\d+)(?:/(\d+)(?:\+(\d+))?)?\Z")


def parse_dim(text: str, *, auto: bool = True) -> Dim:
    """Reads ``h=135:440:2160/8``. A min or opt that you leave out takes its default.

    Args:
        text: The dim as text.
        auto: Whether the pipeline may narrow the dim.

    Raises:
        InputError: The text does not have that form, or the dim is not legal.
    """
    name, equals, value = (part.strip() for part in text.partition("="))
    match = _DIM.match(value)
    if not equals or not match:
        hint = ""
        if equals and value.isdigit():
            hint = (
                f". For a fixed size, write {name}={value}:{value}, or a number in --input. For a "
                f"largest size, write {name}=:{value}"
            )
        raise InputError(f"dim {text!r} is not {DIM_FORM}{hint}")
    low, opt, high, multiple, offset = (None if not n else int(n) for n in match.groups())
    assert high is not None
    return Dim(
        name,
        **{key: n for key, n in (("min", low), ("opt", opt)) if n is not None},
        max=high,
        multiple_of=1 if multiple is None else multiple,
        offset=offset or 0,
        auto=auto,
    )


def parse_dims(texts: Sequence[str], *, auto: bool = True) -> dict[str, Dim]:
    """Reads several dims, by name.

    Raises:
        InputError: A text does not have the form, or a name is given twice.
    """
    dims: dict[str, Dim] = {}
    for text in texts:
        dim = parse_dim(text, auto=auto)
        if dim.name in dims:
            raise InputError(f"dim {dim.name} is given twice")
        dims[dim.name] = dim
    return dims


def split_dims(texts: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Separates the dims with a range from those with an expression.

    Args:
        texts: The dims as text, such as ``seq=1:8:64`` and ``t=past+seq``.

    Returns:
        The texts of the dims with a range, unchanged, and the expression of each other dim by name.

    Raises:
        InputError: A name is given twice, at least once with an expression.
    """
    ranges: list[str] = []
    expressions: dict[str, str] = {}
    names: list[str] = []
    for text in texts:
        name, _, value = (part.strip() for part in text.partition("="))
        names.append(name)
        if _is_expression(value):
            expressions[name] = value
        else:
            ranges.append(text)
    for name in expressions:
        if names.count(name) > 1:
            raise InputError(f"dim {name} is given twice")
    return ranges, expressions


def _is_expression(text: str) -> bool:
    try:
        return bool(DimExpr(text).names)
    except InputError:
        return False


def parse_inputs(texts: Sequence[str], dims: Mapping[str, Dim]) -> Any:
    """Reads inputs into a dict of keyword arguments for `ModelSpec.inputs`.

    A name may be a path into a nested argument: ``past[0][1]:...`` and ``batch.image:...`` are
    parts of the arguments ``past`` and ``batch``. An argument with numbered parts becomes a tuple,
    one with named parts a dict. ``past[0..27]`` stands for 28 parts.

    Raises:
        InputError: A text does not have the form (the message names the character). Or a dim is
            not declared, or two names contradict each other.
    """
    tree: dict[str | int, Any] = {}
    used: set[str] = set()
    for text in (one for many in texts for one in _each(many)):
        path, new = _parse_input(text, dims)
        used.update(dim.name for dim in new.dims)
        _put(tree, path, new, text)
    for name in [name for name in dims if name not in used]:
        raise InputError(f"dim {name} is declared, but no input uses it")
    return {name: _nested(part, str(name)) for name, part in tree.items()}


def by_argument(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Puts the texts whose names are paths, such as ``past[0..27][0]``, into their arguments.

    Raises:
        InputError: A path does not have the form, or two names contradict each other.
    """
    tree: dict[str | int, Any] = {}
    found: dict[str, Any] = {}
    for name, value in inputs.items():
        if not isinstance(value, str) or not isinstance(name, str) or name.isidentifier():
            found[name] = value
            continue
        for text in _each(f"{name}:{value}"):
            _put(tree, _path(text.partition(":")[0], text), value, text)
    for name in found.keys() & tree.keys():
        _clash(str(name))
    return found | {str(name): _nested(part, str(name)) for name, part in tree.items()}


def _put(tree: dict[str | int, Any], path: Path, value: object, text: str) -> None:
    node = tree
    for place in path[:-1]:
        node = node.setdefault(place, {})
        if not isinstance(node, dict):
            _clash(text)
    if path[-1] in node:
        _clash(text)
    node[path[-1]] = value


def _each(text: str) -> list[str]:
    """The inputs that a text with ``[0..27]`` in its name stands for."""
    place, colon, rest = text.partition(":")
    match = _MANY.search(place)
    if not match or "'" in place or '"' in place:
        return [text]
    first, last = int(match[1]), int(match[2])
    if not first <= last < first + _MOST_PARTS:
        _point(text, match.start(), "expected the first and the last number of parts, as in [0..3]")
    before, after = place[: match.start()], place[match.end() :]
    parts = (_each(f"{before}[{n}]{after}{colon}{rest}") for n in range(first, last + 1))
    return [one for some in parts for one in some]


def _clash(text: str) -> NoReturn:
    raise InputError(f"input {text!r}: another input already has this name")


def _nested(part: Any, where: str) -> Any:
    """Makes tuples of numbered parts and dicts of named parts."""
    if not isinstance(part, dict):
        return part
    places = list(part)
    if all(isinstance(place, int) for place in places):
        if sorted(places) != list(range(len(places))):
            raise InputError(
                f"input {where}: its parts are {sorted(places)}; number them from 0 without gaps"
            )
        return tuple(_nested(part[n], f"{where}[{n}]") for n in range(len(places)))
    if any(isinstance(place, int) for place in places):
        raise InputError(f"input {where}: has both numbered and named parts")
    return {name: _nested(part[name], f"{where}.{name}") for name in places}


def parse_input(text: str, dims: Mapping[str, Dim]) -> Input:
    """Reads one input, such as ``image:1x3x{h}x{w}``.

    Raises:
        InputError: The text does not have the form, or a dim is not declared.
    """
    return _parse_input(text, dims)[1]


def _parse_input(text: str, dims: Mapping[str, Dim]) -> tuple[Path, Input]:
    place, colon, rest = text.partition(":")
    path = _path(place, text)
    if not colon:
        _point(text, len(text), _NO_SHAPE)
    shape_text, _, more = rest.partition(":")
    dtype, _, range_text = more.partition(":")
    shape = _shape(text, len(place) + 1, shape_text, dims)
    name = name_of(path, "input")
    values: dict[str, Any] = {}
    if range_text:
        try:
            values = read_range(range_text, dtype, dims)
        except InputError as error:
            _point(text, len(text) - len(range_text), str(error))
    elif dtype and "float" not in dtype and dtype != "bool":
        values = {"low": 0.0, "high": 2.0}
    return path, Input(name, shape, dtype or "float32", **values)


def _path(place: str, text: str) -> Path:
    path: list[str | int] = []
    at = 0
    while at < len(place):
        match = _PLACE.match(place, at)
        if not match:
            named = "expected a name such as image, past[0] or batch.image"
            _point(text, at, _NO_SHAPE if at and place[at] == "=" else named)
        word, number, _, key = match.groups()
        path.append(int(number) if number else word or key)
        at = match.end()
    if not path or isinstance(path[0], int):
        _point(text, 0, "expected the name of an argument of forward")
    return tuple(path)


def _shape(text: str, start: int, shape: str, dims: Mapping[str, Dim]) -> tuple[Size, ...]:
    """Reads ``1x3x{h}x{w}``. An empty text is a scalar."""
    sizes: list[Size] = []
    at = 0
    while at < len(shape):
        match = re.match(r"(\d+)|\{([^{}]*)\}", shape[at:])
        if not match:
            _point(text, start + at, "expected a number or {dim}")
        if match[1]:
            sizes.append(int(match[1]))
        else:
            sizes.append(_size(text, start + at + 1, match[2].strip(), dims))
        at += match.end()
        if at < len(shape):
            if shape[at] != "x":
                _point(text, start + at, "expected 'x' between sizes")
            at += 1
            if at == len(shape):
                _point(text, start + at, "expected a size after 'x'")
    return tuple(sizes)


def _size(text: str, at: int, inner: str, dims: Mapping[str, Dim]) -> Size:
    try:
        expr = DimExpr(inner)
    except InputError as error:
        _point(text, at, str(error))
    for name in sorted(expr.names):
        if name not in dims:
            known = f"; declared: {', '.join(dims)}" if dims else ""
            _point(
                text,
                at,
                f"dim {name} is not declared: add --dim {name}=MIN:OPT:MAX{known}. "
                f'In Python: dims={{"{name}": (MIN, OPT, MAX)}}',
            )
    return read_size(inner, dims)


def _point(text: str, at: int, what: str) -> NoReturn:
    raise InputError(f"input {text!r}, character {at + 1} ({text[at : at + 8]!r}): {what}")
