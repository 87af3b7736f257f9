"""What a module keeps between its calls, and how to put it back.

A module keeps values in its attributes, buffers and submodules, in the objects that those hold, in
class attributes, in variables around its methods (closures) and in global variables. The walk here
finds all of them except the objects of installed packages and of C extensions.
"""

from __future__ import annotations

import argparse
import contextlib
import dis
import linecache
import operator
import sys
import types
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from pipeline.probe.code_files import is_model_file, is_own, is_standard
from pipeline.spec.model import ModelSpec

if TYPE_CHECKING:
    import torch

_MISSING = object()
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_MOST = 50_000  # objects that are walked; a module that holds a whole dataset is not its state
_OF_A_MODULE = 32  # more for each submodule: its parameters, buffers and dicts of hooks
_MADE_IN_PYTHON = 1 << 9  # Py_TPFLAGS_HEAPTYPE
_NAMESPACES = (types.SimpleNamespace, argparse.Namespace)  # of the standard library's objects
_OF_GLOBALS = ("LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_NAME")
_INSIDE = ("_modules", "_parameters", "_buffers", "__dict__")  # left out of an attribute's name


class _Holder(Protocol):
    """Holds values that a call of a module may replace."""

    def changes(self) -> Iterator[tuple[str, Any]]:
        """The path and the present value of everything that is not as it was."""

    def restore(self) -> None:
        """Puts back what was there."""


@dataclass(frozen=True)
class _Names:
    """The values of a dict, of an object's attributes or of some variables, by key."""

    path: str
    read: Callable[[], dict[Any, Any]]
    write: Callable[[Any, Any], None]
    delete: Callable[[Any], None]
    saved: dict[Any, Any]

    def changes(self) -> Iterator[tuple[str, Any]]:
        now = self.read()
        if now.keys() == self.saved.keys() and all(
            map(operator.is_, map(now.get, self.saved), self.saved.values())
        ):
            return  # fast, as almost nothing changes
        changed = [
            key
            for key in {**self.saved, **now}
            if not _same(self.saved.get(key, _MISSING), now.get(key, _MISSING))
        ]
        if all(isinstance(key, str) for key in changed):
            yield from ((_joined(self.path, key), now.get(key, _MISSING)) for key in changed)
        else:  # a table
            yield self.path, now

    def restore(self) -> None:
        now = self.read()
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


@dataclass(frozen=True)
class _Items:
    """The items of a list, a deque or a set."""

    path: str
    holder: Any
    saved: tuple[Any, ...]

    def changes(self) -> Iterator[tuple[str, Any]]:
        now = tuple(self.holder)
        if len(now) == len(self.saved) and all(map(operator.is_, now, self.saved)):
            return  # fast, for a list of a million numbers
        if len(now) != len(self.saved) or not all(map(_same, now, self.saved)):
            yield self.path, self.holder

    def restore(self) -> None:
        for _ in self.changes():
            self.holder.clear()
            (self.holder.update if isinstance(self.holder, set) else self.holder.extend)(self.saved)


@dataclass(frozen=True)
class _Tensor:
    """The content of a tensor. Without a copy, only its version is watched."""

    path: str
    tensor: torch.Tensor
    alias: torch.Tensor
    version: int | None
    learns: bool
    copy: torch.Tensor | None

    def changes(self) -> Iterator[tuple[str, Any]]:
        if self.copy is None:
            written = self.version != _version(self.tensor)
        else:
            written = not _equal(self.copy, self.alias)
        if self._moved or written:
            yield self.path, self.tensor

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
class _Array:
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
class Change:
    """Something that a module kept from a call.

    Args:
        path: The name: the attributes from the module to it, as in ``encoder.cache[0]``.
        value: The present value.
        holder: The object that holds the value.
    """

    path: str
    value: Any
    holder: _Holder

    @property
    def is_back(self) -> bool:
        """True if the old value is there again."""
        return all(path != self.path for path, _ in self.holder.changes())


class ModuleState:
    """What a module keeps at one moment.

    Args:
        module: The module.
        weights: Whether to copy the parameters too. Otherwise their content is not put back.
    """

    def __init__(self, module: torch.nn.Module, *, weights: bool = False) -> None:
        self._seen: dict[int, Any] = {}  # keeps what was walked alive, so that ids stay valid
        self._holders: list[_Holder] = []
        self._weights = set() if weights else {_storage(t) for t in module.parameters()}
        self._most = _MOST + _OF_A_MODULE * sum(1 for _ in module.modules())
        self._walk(module)

    def changes(self) -> dict[str, Change]:
        """Everything that changed since then, by its path."""
        return {
            path: Change(path, value, holder)
            for holder in self._holders
            for path, value in holder.changes()
        }

    def restore(self) -> None:
        """Puts everything back, also after an object that can't be written."""
        with contextlib.ExitStack() as stack:
            for holder in reversed(self._holders):
                stack.callback(holder.restore)

    @contextlib.contextmanager
    def restored(self) -> Iterator[ModuleState]:
        """Puts everything back at the end of the block."""
        try:
            yield self
        finally:
            self.restore()

    def _walk(self, first: Any) -> None:
        todo = deque([(first, "")])
        while todo and len(self._seen) < self._most:
            value, path = todo.popleft()
            if isinstance(value, _PLAIN) or id(value) in self._seen:
                continue
            self._seen[id(value)] = value
            todo += self._parts(value, path)

    def _parts(self, value: Any, path: str) -> list[tuple[Any, str]]:
        """Records what one object holds, and returns it with the paths."""
        import torch

        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if isinstance(value, np.ndarray):
            return self._array(value, path)
        if isinstance(value, dict):
            return self._names(path, lambda: dict(value), value.__setitem__, value.__delitem__)
        parts: list[tuple[Any, str]] = []
        if isinstance(value, (tuple, list, deque, set)):
            if not isinstance(value, tuple):
                self._holders.append(_Items(path, value, tuple(value)))
            parts = [(item, f"{path}[{n}]") for n, item in enumerate(value)]
        elif isinstance(value, types.FunctionType):
            parts = self._variables(value) if is_own(value.__code__.co_filename) else []
        elif isinstance(value, types.MethodType):
            parts = [(value.__func__, path), (value.__self__, path)]
        elif isinstance(value, type):
            own = value.__flags__ & _MADE_IN_PYTHON and is_own(_file_of(value))
            parts = self._class(value) if own else []
        elif _is_walked(type(value)):
            parts = [*self._object(value, path), *((kind, path) for kind in type(value).__mro__)]
        return parts

    def _names(
        self,
        path: str,
        read: Callable[[], dict[Any, Any]],
        write: Callable[[Any, Any], None],
        delete: Callable[[Any], None],
    ) -> list[tuple[Any, str]]:
        saved = read()
        self._holders.append(_Names(path, read, write, delete, saved))
        return [(value, _joined(path, key)) for key, value in saved.items()]

    def _object(self, value: Any, path: str) -> list[tuple[Any, str]]:
        from torch.nn.modules.lazy import LazyModuleMixin

        found = []
        if isinstance(value, LazyModuleMixin):  # its first call gives it another class
            kind = {"__class__": type(value)}
            self._holders.append(
                _Names(
                    path,
                    lambda: {"__class__": type(value)},
                    lambda name, old: setattr(value, name, old),
                    lambda name: None,  # noqa: ARG005 - an object always has a class
                    kind,
                )
            )
        inner = getattr(value, "__dict__", None)
        if type(inner) is dict:
            # around __setattr__, in which a class may do more
            found += self._names(path, lambda: dict(inner), inner.__setitem__, inner.__delitem__)
        slots = _slots(value.__class__)
        if slots:
            found += self._names(
                path,
                lambda: {name: getattr(value, name) for name in slots if hasattr(value, name)},
                lambda name, old: object.__setattr__(value, name, old),
                lambda name: object.__delattr__(value, name),
            )
        return found

    def _class(self, kind: type) -> list[tuple[Any, str]]:
        """Class attributes, and what the methods find around themselves."""

        def data() -> dict[Any, Any]:
            return {
                name: value
                for name, value in vars(kind).items()
                if not name.startswith("__") and not hasattr(value, "__get__")
            }

        methods = [
            getattr(value, "__func__", value)
            for value in vars(kind).values()
            if isinstance(value, (types.FunctionType, staticmethod, classmethod))
        ]
        return [
            *((method, kind.__name__) for method in methods),
            *self._names(
                kind.__name__, data, lambda n, v: setattr(kind, n, v), lambda n: delattr(kind, n)
            ),
        ]

    def _variables(self, function: types.FunctionType) -> list[tuple[Any, str]]:
        """Defaults, the variables of the closure, and the global variables that the code names."""
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=False))
        names = {name for code in _codes(function.__code__) for name in _globals(code)}
        spaces = function.__globals__

        def closure() -> dict[Any, Any]:
            return {n: c.cell_contents for n, c in cells.items() if not _is_empty(c)}

        def outside() -> dict[Any, Any]:
            return {n: spaces[n] for n in names if n in spaces}

        def empty(name: str) -> None:
            del cells[name].cell_contents

        defaults = function.__defaults__ or ()
        arguments = function.__code__.co_varnames[: function.__code__.co_argcount]
        return [
            *zip(defaults, arguments[len(arguments) - len(defaults) :], strict=True),
            *self._names("", closure, lambda n, v: setattr(cells[n], "cell_contents", v), empty),
            *self._names("", outside, spaces.__setitem__, spaces.__delitem__),
        ]

    def _tensor(self, tensor: torch.Tensor, path: str) -> list[tuple[Any, str]]:
        if _is_plain(tensor):
            alias = tensor.detach()
            copy = None if _storage(tensor) in self._weights else alias.clone()
            learns = tensor.requires_grad
            self._holders.append(_Tensor(path, tensor, alias, _version(tensor), learns, copy))
        return []

    def _array(self, array: np.ndarray, path: str) -> list[tuple[Any, str]]:
        if array.dtype != object and array.flags.writeable:
            self._holders.append(_Array(path, array, array.copy()))
        return []


def untouched(module: torch.nn.Module) -> AbstractContextManager[ModuleState]:
    """Restores what calls inside the block change in the module, such as a cached tensor."""
    return ModuleState(module).restored()


@contextlib.contextmanager
def left_as_given(spec: ModelSpec) -> Iterator[ModelSpec]:
    """Yields the spec with another `build`; at the end, restores every module that it returned.

    A `build` may return a module that its caller uses afterwards. A conversion puts it into eval
    mode, takes its gradients and calls it.
    """
    states: list[ModuleState] = []

    def build(weights: Path | None) -> torch.nn.Module:
        import torch

        module = spec.build(weights)
        if isinstance(module, torch.nn.Module):
            states.append(ModuleState(module))
        return module

    try:
        yield replace(spec, build=build)
    finally:
        for state in reversed(states):
            state.restore()


def content(value: Any, depth: int = 8) -> Any:
    """A value that is equal for two states with equal content."""
    import torch

    if isinstance(value, _PLAIN) or depth == 0:
        return repr(value) if isinstance(value, _PLAIN) else type(value).__name__
    if isinstance(value, torch.Tensor):
        known = (str(value.dtype), () if value.is_nested else tuple(value.shape))
        return (*known, zlib.crc32(_bytes(value).numpy().data)) if _is_plain(value) else known
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


def line_of_change(change: Change, call: Callable[[], object]) -> str:
    """Calls the module again to find the line that makes a change.

    Args:
        change: The change. The state must have been restored since.
        call: Calls the module. It runs with a trace function, so it is slow.

    Returns:
        The line as ``file:line in function: code``; an empty text if it was not found.
    """
    last: tuple[str, int, str] | None = None
    found = ""

    def look(frame: types.FrameType, *_: object) -> Any:
        nonlocal last, found
        file = frame.f_code.co_filename
        if found or not is_model_file(file):
            return None
        if last is not None and not change.is_back:
            found = f"{last[0]}:{last[1]} in {last[2]}: {linecache.getline(*last[:2]).strip()}"
            return None
        last = file, frame.f_lineno, frame.f_code.co_name
        return look

    old = sys.gettrace()
    sys.settrace(look)
    try:
        call()
    finally:
        sys.settrace(old)
    return found


def _joined(path: str, key: Any) -> str:
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
    if isinstance(a, _PLAIN):
        return bool(a == b) or repr(a) == repr(b) == "nan"
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, types.MethodType):
        return a.__func__ is b.__func__ and a.__self__ is b.__self__
    return False


def _storage(tensor: torch.Tensor) -> int | None:
    return tensor.untyped_storage().data_ptr() if _is_plain(tensor) else None


def _is_plain(tensor: torch.Tensor) -> bool:
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


def _version(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for item in code.co_consts:
        if isinstance(item, types.CodeType):
            yield from _codes(item)


@cache
def _globals(code: types.CodeType) -> frozenset[str]:
    """The global variables that the code names; `co_names` has attributes too."""
    return frozenset(i.argval for i in dis.get_instructions(code) if i.opname in _OF_GLOBALS)


def _is_empty(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return True
    return False


def _file_of(kind: type) -> str:
    """The file of a class; empty if it has none, as in a shell."""
    module = sys.modules.get(kind.__module__)
    return getattr(module, "__file__", None) or ""


@cache
def _slots(kind: type) -> list[str]:
    """The names of the slots of the user's classes."""
    return [
        name
        for base in kind.__mro__
        if is_own(_file_of(base))
        for name, slot in vars(base).items()
        if isinstance(slot, types.MemberDescriptorType)
    ]


def _is_walked(kind: type) -> bool:
    """True for objects that may hold a module's values."""
    if kind in _NAMESPACES:
        return True
    file = _file_of(kind)
    if not file:  # from C, or typed into a shell
        return bool(kind.__flags__ & _MADE_IN_PYTHON)
    return not is_standard(file)
