"""Caches of transformers as arguments of a model.

ONNX has only tensors. So a cache is a tuple of layers, and each layer is a pair of keys and values:
``past_key_values[0..27][0..1]``. Before a call, the tuple becomes the object that the model takes.
`pipeline.spec.structure.children` does the reverse for results.
"""

from __future__ import annotations

import inspect
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pipeline.errors import InputError
from pipeline.spec.structure import is_cache

_MADE = ("Cache", "DynamicCache", "EncoderDecoderCache")
_SELF, _BOTH = 2, 4  # tensors of a layer: keys and values, and those of an encoder


def cache_arguments(forward: Callable[..., Any]) -> dict[str, int]:
    """The arguments of ``forward`` that are caches by their annotation: name to position."""
    if "transformers" not in sys.modules:
        return {}
    try:
        parameters = list(inspect.signature(forward).parameters.values())
    except (TypeError, ValueError):
        return {}
    try:
        hints = typing.get_type_hints(inspect.unwrap(forward))
    except Exception:  # a name that only type checkers import
        hints = {}
    found = {}
    for place, parameter in enumerate(parameters):
        hint = hints.get(parameter.name, parameter.annotation)
        kinds = typing.get_args(hint) or (hint,)
        if any(isinstance(k, type) and is_cache(k) and k.__name__ in _MADE for k in kinds):
            found[parameter.name] = place
    return found


def with_caches(
    caches: Mapping[str, int], model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call with caches in place of tuples of layers.

    Args:
        caches: From `cache_arguments`.
        model: The module. Its ``config`` says which layers see only the last tokens.
        args: The positional arguments.
        kwargs: The keyword arguments.

    Raises:
        InputError: A layer has neither two nor four tensors.
    """
    config = getattr(model, "config", None)
    positions = {place: name for name, place in caches.items()}
    placed = tuple(
        _cache(positions[n], value, config) if n in positions else value
        for n, value in enumerate(args)
    )
    named = {
        name: _cache(name, value, config) if name in caches else value
        for name, value in kwargs.items()
    }
    return placed, named


def _cache(name: str, value: Any, config: Any) -> Any:
    """The cache of these layers; a value that is no tuple of layers stays as it is."""
    if not isinstance(value, Sequence) or not value or not all(map(_is_layer, value)):
        return value
    from transformers import DynamicCache, EncoderDecoderCache

    layers = [tuple(layer.values() if isinstance(layer, Mapping) else layer) for layer in value]
    config = config if hasattr(config, "get_text_config") else None
    counts = {len(layer) for layer in layers}
    own = [layer[:_SELF] for layer in layers]
    if counts == {_SELF}:
        return _whole(name, DynamicCache(config=config), own)
    if counts == {_BOTH}:
        cross = [layer[_SELF:] for layer in layers]
        both = _whole(name, DynamicCache(config=config), own)
        return EncoderDecoderCache(both, _whole(name, DynamicCache(), cross))
    raise InputError(
        f"input {name}: each layer of a cache has its keys and its values: {name}[0..N][0..1]. "
        f"With an encoder: {name}[0..N][0..3]"
    )


def _whole(name: str, empty: Any, layers: Sequence[Sequence[Any]]) -> Any:
    """The cache with these layers.

    Args:
        name: The input, for errors.
        empty: The model's cache without tokens. It has layers if the model's config names them.
        layers: The keys and values of each layer.

    Raises:
        InputError: The model has another number of layers, or one that keeps more than keys and
            values.
    """
    have, given = len(empty.layers), len(layers)
    if have and have != given:
        raise InputError(f"input {name}: the model has {have} layers, and {given} are described")
    for layer in empty.layers:
        kind = type(layer).__name__
        if kind != "DynamicLayer":
            raise InputError(
                f"input {name}: a layer of the model's cache is a {kind}, which keeps more than "
                "keys and values. Write a module round the model that takes and returns all of it "
                "as tensors"
            )
    for place, (keys, values) in enumerate(layers):
        empty.update(keys, values, place)
    return empty


def _is_layer(value: Any) -> bool:
    return isinstance(value, (tuple, list, Mapping))
