"""The values that a module keeps between its calls: what changed, and how to put it back.

`pipeline.probe.state` finds these values in a module.
"""

from __future__ import annotations

import itertools
import operator
import re
import types
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    import torch

PLAIN = (bool, int, float, complex, str, bytes, type(None))
_MISSING = object()
_HOOKS = re.compile(r"(^|\.)_\w*hooks(_with_kwargs|_always_called)?$")  # dicts of a module
_INSIDE = ("_modules", "_parameters", "_buffers", "__dict__")  # left out of an attribute's name


class Holder(Protocol):
    """Holds values that a call of a module may replace."""

    def changes(self) -> Iterator[tuple[str, Any]]:
        """The path and the present value of everything that is not as it was."""

    def restore(self) -> None:
        """Puts back what was there."""


@dataclass(frozen=True)
class Entries:
    """The values of a dict, of an object's attributes or of some variables, by key."""

    path: str
    read: Callable[[], dict[Any, Any]]
    write: Callable[[Any, Any], None]
    delete: Callable[[Any], None]
    saved: dict[Any, Any]

    def changes(self) -> Iterator[tuple[str, Any]]:
        now = self.read()
        if self._is(now):
            return
        changed = [
            key
            for key in {**self.saved, **now}
            if not _same(self.saved.get(key, _MISSING), now.get(key, _MISSING))
        ]
        if all(isinstance(key, str) for key in changed):
            yield from ((joined(self.path, key), now.get(key, _MISSING)) for key in changed)
        else:  # a table
            yield self.path, now

    def restore(self) -> None:
        now = self.read()
        if self._is(now):
            return
        for key in {**self.saved, **now}:
            old = self.saved.get(key, _MISSING)
            if _same(old, now.get(key, _MISSING)):
                continue
            if old is _MISSING:
                self.delete(key)
            else:
                self.write(key, old)
        # a key that was deleted came back at the end
        if not all(map(operator.is_, self.read(), self.saved)):
            for key, old in self.saved.items():
                self.delete(key)
                self.write(key, old)

    def _is(self, now: dict[Any, Any]) -> bool:
        """True if these are the saved objects, in order: fast, because almost nothing changes."""
        return (
            len(now) == len(self.saved)
            and all(map(operator.is_, now.values(), self.saved.values()))
            and all(map(operator.is_, now, self.saved))
        )


@dataclass(frozen=True)
class Items:
    """The items of a list, a deque or a set."""

    path: str
    holder: Any
    saved: tuple[Any, ...]

    def changes(self) -> Iterator[tuple[str, Any]]:
        now = items_of(self.holder)
        if len(now) == len(self.saved) and all(map(operator.is_, now, self.saved)):
            return  # fast, for a list of a million numbers
        if len(now) != len(self.saved) or not all(map(_same, now, self.saved)):
            yield self.path, self.holder

    def restore(self) -> None:
        for _ in self.changes():
            kind = _built_in(self.holder)
            kind.clear(self.holder)
            (kind.update if kind is set else kind.extend)(self.holder, self.saved)


def _built_in(holder: Any) -> Any:
    """The type whose methods touch only the items. A class of a user may do more in its own."""
    return next(kind for kind in (list, deque, set, tuple) if isinstance(holder, kind))


def items_of(holder: Any) -> tuple[Any, ...]:
    """The items of a list, a deque, a set or a tuple, as they are stored."""
    return tuple(_built_in(holder).__iter__(holder))


@dataclass(frozen=True)
class TensorContent:
    """The content of a tensor. Without a copy, only its version is watched."""

    path: str
    tensor: torch.Tensor
    alias: torch.Tensor
    version: int | None
    learns: bool
    copy: torch.Tensor | None

    def changes(self) -> Iterator[tuple[str, Any]]:
        if self.copy is None:
            written = self.version != version_of(self.tensor)
        else:
            written = not _equal(self.copy, self.alias)
        if self._moved or written:
            yield self.path, self.tensor

    @property
    def is_rewritten(self) -> bool:
        """True if the tensor was written, and nothing changed."""
        return self.version != version_of(self.tensor) and not any(self.changes())

    def restore(self) -> None:
        import torch

        with torch.no_grad():
            if self._moved:
                self.tensor.data = self.alias
            if self.tensor.requires_grad != self.learns and self.tensor.is_leaf:
                self.tensor.requires_grad_(self.learns)
            if self.copy is not None and not _equal(self.copy, self.alias):
                strides = self.alias.stride()
                _each_once(self.alias, strides).copy_(_each_once(self.copy, strides))

    @property
    def _moved(self) -> bool:
        """True if the tensor has other memory, another shape or another dtype."""
        return _geometry(self.tensor) != _geometry(self.alias)


@dataclass(frozen=True)
class ArrayContent:
    """The content of a NumPy array."""

    path: str
    array: np.ndarray
    copy: np.ndarray

    def changes(self) -> Iterator[tuple[str, Any]]:
        if self.array.tobytes() != self.copy.tobytes():
            yield self.path, self.array

    def restore(self) -> None:
        for _ in self.changes():
            self.array[...] = self.copy


@dataclass(frozen=True)
class StateChange:
    """Something that a module kept from a call.

    Args:
        path: The name: the attributes from the module to it, as in ``encoder.cache[0]``.
        value: The present value.
        holder: The object that holds the value.
    """

    path: str
    value: Any
    holder: Holder

    @property
    def is_back(self) -> bool:
        """True if the old value is there again."""
        return all(path != self.path for path, _ in self.holder.changes())


def position_of(value: Any) -> Any:
    """How far an iterator has come, as something to compare; None if it does not show it.

    An iterator can't be put back, so it has no `Holder`.
    """
    if isinstance(value, types.GeneratorType):
        frame = value.gi_frame
        return "ended" if frame is None else (frame.f_lasti, *_places(frame.f_locals))
    if isinstance(value, itertools.count):
        return repr(value)
    if type(value).__module__ == "builtins" and isinstance(value, Iterator):
        return operator.length_hint(value, -1)
    return None


def _places(variables: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The numbers, the iterators' positions and the other objects in a generator's variables."""
    for name, value in variables.items():
        yield name, repr(value) if isinstance(value, PLAIN) else position_of(value) or id(value)


def content_at(path: str, value: Any) -> Any:
    """The content of the value at a path. The keys of hooks are numbers that torch counts up."""
    hooks = isinstance(value, dict) and _HOOKS.search(path)
    return content([*value.values()] if hooks else value)


def content(value: Any, depth: int = 8) -> Any:
    """A value that is equal for two states with equal content."""
    import torch

    if isinstance(value, PLAIN) or depth == 0:
        return repr(value) if isinstance(value, PLAIN) else type(value).__name__
    if isinstance(value, torch.Tensor):
        known = (str(value.dtype), () if value.is_nested else tuple(value.shape))
        return (*known, zlib.crc32(_bytes(value).numpy().data)) if is_plain(value) else known
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, dict):
        return tuple(
            (content(key, depth - 1), content(item, depth - 1)) for key, item in value.items()
        )
    if isinstance(value, (list, tuple, deque, set, frozenset)):
        items = [content(item, depth - 1) for item in value]
        return tuple(sorted(map(str, items)) if isinstance(value, (set, frozenset)) else items)
    inner = getattr(value, "__dict__", None)
    return type(value).__name__, content(inner, depth - 1) if type(inner) is dict else ""


def joined(path: str, key: Any) -> str:
    if key in _INSIDE:
        return path
    plain = isinstance(key, str) and (key.isidentifier() or key.isdigit())
    name = key if plain else f"[{key!r}]"
    return f"{path}.{name}" if path and not name.startswith("[") else f"{path}{name}"


def _same(a: Any, b: Any) -> bool:
    """True if nothing was replaced. Parts of `a` are not compared: they have their own holders."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, PLAIN):
        return bool(a == b) or repr(a) == repr(b) == "nan"
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, types.MethodType):
        return a.__func__ is b.__func__ and a.__self__ is b.__self__
    return False


def storage_of(tensor: torch.Tensor) -> int | None:
    return tensor.untyped_storage().data_ptr() if is_plain(tensor) else None


def is_plain(tensor: torch.Tensor) -> bool:
    """True if the tensor has its own bytes: not fake, sparse, quantised or uninitialised."""
    import torch

    kinds = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
    return (
        type(tensor) in kinds
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not (tensor.is_quantized or tensor.is_nested)
    )


def _geometry(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _each_once(tensor: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """The tensor without repetitions (stride 0), as `expand` makes them; they can't be written."""
    for dim, stride in enumerate(strides):
        if stride == 0:
            tensor = tensor.narrow(dim, 0, min(1, tensor.shape[dim]))
    return tensor


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.contiguous().flatten().view(torch.uint8)


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    import torch

    return torch.equal(_bytes(a), _bytes(b))


def version_of(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version
