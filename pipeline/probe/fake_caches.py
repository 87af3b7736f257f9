"""Caches of functions that keep tensors without values after a run as shapes.

A model may compute a table in a function under ``functools.lru_cache``. RT-DETR of transformers
does so for its anchors. A later call with the same arguments would get the tensors of the run
without values.
"""

from __future__ import annotations

import functools
import gc
import sys
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

from torch._subclasses.fake_tensor import FakeTensor

_CACHE = type(functools.lru_cache(len))
_DEEPEST = 10  # containers from a cache to a tensor in it
_MOST = 10_000  # objects to look at in a cache
_CONTAINERS = ("dict", "tuple", "list", "_lru_list_elem", _CACHE.__name__)  # a cache of caches


class FakeCaches:
    """The ``lru_cache`` caches of the process, to empty those with tensors without values.

    An object looks for caches once, and again after an import.
    """

    # each cache, and its counts at the last look; a reference would keep a model alive
    _seen: ClassVar[WeakKeyDictionary[Any, Any]] = WeakKeyDictionary()

    def __init__(self) -> None:
        self._modules = 0

    def clear(self) -> None:
        """Empties each cache that has such a tensor; the others stay."""
        if self._modules != len(sys.modules):  # an import may bring more functions
            self._modules = len(sys.modules)
            for found in gc.get_objects():
                if type(found) is _CACHE:
                    self._seen.setdefault(found, None)
        for cache, before in list(self._seen.items()):
            counts = cache.cache_info()
            if counts == before or not counts.currsize:
                continue
            if _has_fakes(cache):
                cache.cache_clear()
            self._seen[cache] = cache.cache_info()


def _has_fakes(cache: Any) -> bool:
    level, seen = [cache], 0
    for _ in range(_DEEPEST):
        level = [
            part
            for one in level
            for part in gc.get_referents(one)
            if isinstance(part, FakeTensor) or type(part).__name__ in _CONTAINERS
        ]
        if any(isinstance(part, FakeTensor) for part in level):
            return True
        level = [*{id(part): part for part in level}.values()]
        seen += len(level)
        if not level or seen > _MOST:
            break
    return False
