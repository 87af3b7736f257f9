"""The namespaces of a model's own modules, and a builtin's name in them while a model is traced.

All threads share the namespaces. What a name stands for must be right in every thread.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any

import torch

Namespace = dict[str, Any]

_FOREIGN = sys.stdlib_module_names | {"torch", "numpy", "sympy", "onnx", "pipeline", "builtins"}
_STEPS = 2  # from a module to the modules of the functions it uses, and on to theirs

_lock = threading.Lock()
_entered: dict[tuple[int, str], int] = {}  # users of a name, by its namespace's id and the name


@contextmanager
def renamed(name: str, value: Any, places: Iterable[Namespace]) -> Iterator[None]:
    """Gives a builtin's name another value in some namespaces; leaves those that define the name.

    Args:
        name: the builtin's name.
        value: what the name stands for inside; the same object at each call.
        places: the namespaces.
    """
    taken: list[Namespace] = []
    try:
        for place in places:
            if place.get(name, value) is value:
                _enter(place, name, value)
                taken.append(place)
        yield
    finally:
        for place in taken:
            _leave(place, name, value)


def _enter(place: Namespace, name: str, value: Any) -> None:
    with _lock:
        count = _entered.get((id(place), name), 0)
        if count == 0:
            place[name] = value
        _entered[id(place), name] = count + 1


def _leave(place: Namespace, name: str, value: Any) -> None:
    with _lock:
        _entered[id(place), name] -= 1
        if _entered[id(place), name] == 0:
            del _entered[id(place), name]
            if place.get(name) is value:
                del place[name]


def namespaces(module: torch.nn.Module) -> list[Namespace]:
    """The namespaces of the model's modules, and of the modules whose functions they use."""
    found: dict[int, Namespace] = {}
    edge = [
        vars(kind)["forward"].__globals__
        for part in module.modules()
        for kind in type(part).__mro__
        if isinstance(vars(kind).get("forward"), FunctionType)
    ]
    for _ in range(_STEPS + 1):
        fresh = {id(n): n for n in edge if id(n) not in found and not _foreign(n)}
        found.update(fresh)
        edge = [used for n in fresh.values() for v in list(n.values()) for used in _used(v)]
    return list(found.values())


def _used(value: Any) -> list[Namespace]:
    """The namespace of a function, class or module."""
    if isinstance(value, FunctionType):
        return [value.__globals__]
    if isinstance(value, type):
        value = sys.modules.get(value.__module__)
    return [vars(value)] if isinstance(value, ModuleType) else []


def _foreign(namespace: Namespace) -> bool:
    name = str(namespace.get("__name__", ""))
    if name.startswith("pipeline.models."):
        return False
    return name != "__main__" and name.split(".", maxsplit=1)[0] in _FOREIGN
