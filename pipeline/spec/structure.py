"""Nested inputs and outputs of a model, and their flat, named tensors in ONNX.

A model may take and return tuples, dicts and dataclasses of tensors, and caches of transformers. A
tensor is named after its path: ``past[0]["key"]`` is ``past_0_key``.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from pipeline.errors import InputError
from pipeline.spec.tensors import Input

Path = tuple[str | int, ...]


def children(value: Any) -> list[tuple[str | int, Any]] | None:
    """The parts of a tuple, list, dict or dataclass, each with its key; None for a leaf.

    Mappings are checked first: transformers' outputs are mappings and dataclasses, and the mapping
    leaves out parts that are None.
    """
    if isinstance(value, Mapping):
        return [(str(key), part) for key, part in value.items()]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return list(zip(value._fields, value, strict=True))
    if isinstance(value, (tuple, list)):
        return list(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, (type, Input)):
        return [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value)]
    return _layers(value) if is_cache(type(value)) else None


def is_cache(kind: type) -> bool:
    """True for a class of transformers that holds the keys and values of attention layers."""
    return any(
        base.__name__ == "Cache" and base.__module__.startswith("transformers.")
        for base in kind.__mro__
    )


def _layers(cache: Any) -> list[tuple[str | int, Any]]:
    """The layers of a cache, each a pair of keys and values. An encoder's layers have four parts.

    A layer that holds more than keys and values is a leaf: the state of a recurrent layer, or the
    number of tokens that a sliding window has seen.
    """
    inner = getattr(cache, "self_attention_cache", None)
    if inner is not None:
        both = zip(_layers(inner), _layers(cache.cross_attention_cache), strict=True)
        return [(n, (*own, *cross)) for (n, own), (_, cross) in both]
    return [
        (n, (layer.keys, layer.values) if type(layer).__name__ == "DynamicLayer" else layer)
        for n, layer in enumerate(cache.layers)
    ]


def leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every leaf with its path. None is skipped."""
    parts = children(value)
    if parts is None:
        if value is not None:
            yield path, value
        return
    for place, part in parts:
        yield from leaves(part, (*path, place))


def mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    """The same structure with other leaves."""
    parts = children(value)
    if parts is None:
        return None if value is None else function(value)
    return rebuilt(value, [mapped(part, function) for _, part in parts])


def rebuilt(value: Any, new: Sequence[Any]) -> Any:
    """A tuple, list, dict or dataclass with other parts, in the order of `children`."""
    parts = children(value) or []
    if isinstance(value, Mapping):
        pairs = dict(zip(value, new, strict=True))
        kind: Any = type(value)
        return kind(pairs)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*new)
    if isinstance(value, (tuple, list)):
        return type(value)(new)
    return dataclasses.replace(value, **{str(p): n for (p, _), n in zip(parts, new, strict=True)})


def name_of(path: Path, alone: str) -> str:
    """``("past", 0, "key")`` as ``past_0_key``; `alone` if the path has no words."""
    words = [re.sub(r"\W+", "_", str(place)).strip("_") for place in path]
    text = "_".join(word for word in words if word)
    if not text or text[0].isdigit():
        return f"{alone}_{text}" if text else alone
    return text


def flat_inputs(inputs: Any) -> tuple[Any, tuple[Input, ...]]:
    """Flattens nested inputs and names each of them.

    Args:
        inputs: A tuple or list (positional arguments) or a dict (keyword arguments) of `Input`
            and of tuples, lists, dicts and dataclasses of them.

    Returns:
        The structure with names in place of the inputs (None for a flat tuple), and the inputs.

    Raises:
        InputError: A leaf is not an `Input`.
    """
    if not isinstance(inputs, (tuple, list, Mapping)):
        raise InputError(
            f"inputs={inputs!r}: expected a tuple of Input (positional arguments) or a dict of "
            "Input (keyword arguments)"
        )
    found = []
    for path, leaf in leaves(inputs):
        if not isinstance(leaf, Input):
            place = "".join(f"[{part!r}]" for part in path)
            raise InputError(f"inputs{place} is {leaf!r}, not an Input")
        found.append(leaf if leaf.name else dataclasses.replace(leaf, name=name_of(path, "input")))
    flat = isinstance(inputs, (tuple, list)) and all(isinstance(i, Input) for i in inputs)
    names = iter(found)
    return None if flat else mapped(inputs, lambda _: next(names).name), tuple(found)


def call_with(arguments: Any, values: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments from the structure of names and the values by name."""
    built = mapped(arguments, lambda name: values[name])
    return ((), dict(built)) if isinstance(built, Mapping) else (tuple(built), {})


def by_name_or_place(
    name: str, forward: Callable[..., Any], arguments: Any, *, hooked: bool = False
) -> tuple[Any, str]:
    """Decides whether arguments are passed by keyword or by position.

    Args:
        name: The model's name, for an error.
        forward: The module's ``forward``.
        arguments: The structure of names.
        hooked: Whether the module has hooks, which see positional arguments only.

    Returns:
        The arguments: a mapping is passed by keyword, a tuple by position. A mapping becomes a
        tuple if ``forward`` has no names for the arguments (``*args``), with a note; and if it or
        a hook needs them by position.

    Raises:
        InputError: ``forward`` has no argument of a name. The message lists its arguments.
    """
    if not isinstance(arguments, Mapping):
        return arguments, ""
    try:
        signature = inspect.signature(forward)
    except (TypeError, ValueError):
        return tuple(arguments.values()), _by_position(arguments, "has no readable signature")
    parameters = signature.parameters.values()
    kinds = [p.kind for p in parameters]
    known = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    unknown = [word for word in arguments if word not in known]
    first = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if not unknown and (hooked or inspect.Parameter.POSITIONAL_ONLY in kinds):
        whole = set(arguments) == set(first[: len(arguments)])  # none before them is left out
        return (tuple(arguments[p] for p in first if p in arguments) if whole else arguments), ""
    if not unknown or inspect.Parameter.VAR_KEYWORD in kinds:
        return arguments, ""
    rest = inspect.Parameter.VAR_POSITIONAL in kinds
    if rest and list(arguments)[: len(first)] == first:
        why = f"is forward{signature}, which names none of them"
        return tuple(arguments.values()), _by_position(unknown, why)
    close = difflib.get_close_matches(unknown[0], known, n=1)
    raise InputError(
        f"model {name}: its forward has no argument {unknown[0]!r}"
        f"{f' (did you mean {close[0]!r}?)' if close else ''}; its arguments: "
        f"{', '.join(known) or 'none'}"
    )


def _by_position(names: Iterable[str], why: str) -> str:
    return f"{', '.join(names)}: passed by position, because the model's forward {why}"


def check_signature(name: str, forward: Callable[..., Any], arguments: Any, count: int) -> None:
    """Checks that ``forward`` accepts these arguments.

    Args:
        name: The model's name, for an error.
        forward: The module's ``forward``.
        arguments: The structure of names, or None for `count` positional arguments.
        count: The number of inputs.

    Raises:
        InputError: ``forward`` can't be called with these arguments.
    """
    args, kwargs = ((None,) * count, {}) if arguments is None else call_with(arguments, _Any())
    try:
        signature = inspect.signature(forward)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        forgotten = [
            p.name
            for place, p in enumerate(signature.parameters.values())
            if p.default is p.empty
            and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
            and p.name not in kwargs
            and (place >= len(args) or p.kind is p.KEYWORD_ONLY)
        ]
        do = " ".join(f"--input {word}:SHAPE" for word in forgotten)
        raise InputError(
            f"model {name}: its forward{signature} can't be called with the inputs as declared: "
            f"{error}{f'. Add {do} (in Python: to inputs)' if do else ''}"
        ) from error


class _Any(Mapping[str, None]):
    """A mapping that has every name."""

    def __getitem__(self, name: str) -> None:
        return None

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


def output_names(
    result: Any, is_tensor: Callable[[Any], bool], *, unique: bool = True
) -> list[str]:
    """A name for every tensor in a model's result.

    Raises:
        InputError: A part of the result is not a tensor; the message names the part. Or two names
            are equal, if they must be unique.
    """
    names: list[str] = []
    for path, leaf in leaves(result):
        if not is_tensor(leaf):
            place = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in path)
            raise InputError(
                f"output{place} is of type {type(leaf).__name__}, not a tensor. Return tensors, "
                "or tuples, dicts and dataclasses of tensors"
            )
        names.append(name_of(path, "output"))
    if not names:
        raise InputError("the model returns no tensor. Return one or more tensors")
    twice: Sequence[str] = [name for name in names if names.count(name) > 1]
    if twice and unique:
        raise InputError(
            f"two outputs would be called {twice[0]}. Name each output with --output-name (in "
            "Python: output_names=)"
        )
    return names
