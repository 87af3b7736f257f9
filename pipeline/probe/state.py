"""What a module keeps between its calls, and how to put it back.

A module keeps values in its attributes, buffers and submodules, in the objects that those hold, in
class attributes, in variables around its methods (closures) and in global variables. The walk here
finds all of them except the objects of installed packages and of C extensions.
"""

from __future__ import annotations

import argparse
import contextlib
import dis
import sys
import types
from collections import ChainMap, OrderedDict, UserDict, UserList, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.probe.code_files import is_own, is_standard
from pipeline.probe.held_values import (
    PLAIN,
    ArrayContent,
    Entries,
    Holder,
    Items,
    StateChange,
    TensorContent,
    is_plain,
    items_of,
    joined,
    position_of,
    storage_of,
    version_of,
)
from pipeline.spec.model import ModelSpec

if TYPE_CHECKING:
    import torch

_MOST = 50_000  # objects that are walked; a module that holds a whole dataset is not its state
_OF_A_MODULE = 32  # more for each submodule: its parameters, buffers and dicts of hooks
_MADE_IN_PYTHON = 1 << 9  # Py_TPFLAGS_HEAPTYPE
# of the standard library's objects
_NAMESPACES = (types.SimpleNamespace, argparse.Namespace, UserDict, UserList, ChainMap)
_OF_GLOBALS = ("LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_NAME")


class ModuleState:
    """What a module keeps at one moment.

    Args:
        module: The module.
        weights: Whether to copy the parameters too. Otherwise their content is not put back.
    """

    def __init__(self, module: torch.nn.Module, *, weights: bool = False) -> None:
        self._seen: dict[int, Any] = {}  # keeps what was walked alive, so that ids stay valid
        self._holders: list[Holder] = []
        self._iterators: list[tuple[str, Any, Any]] = []  # path, iterator, position
        self._weights = set() if weights else {storage_of(t) for t in module.parameters()}
        self._most = _MOST + _OF_A_MODULE * sum(1 for _ in module.modules())
        self._walk(module)

    def changes(self) -> dict[str, StateChange]:
        """Everything that changed since then, by its path."""
        return {
            path: StateChange(path, value, holder)
            for holder in self._holders
            for path, value in holder.changes()
        }

    def moved(self) -> list[str]:
        """The paths of the iterators and generators that went on since then."""
        return [path for path, value, was in self._iterators if position_of(value) != was]

    def rewritten(self) -> list[str]:
        """The paths of the tensors that were written since then, and have the same content."""
        return [
            holder.path
            for holder in self._holders
            if isinstance(holder, TensorContent) and holder.is_rewritten
        ]

    def restore(self) -> None:
        """Puts everything back, also after an object that can't be written."""
        failed: Exception | None = None
        for holder in self._holders:
            try:
                holder.restore()
            except Exception as error:
                failed = failed or error
        if failed is not None:
            raise failed

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
            if isinstance(value, PLAIN) or id(value) in self._seen:
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
            # around __getitem__ and others, which may make objects, as transformers' ACT2FN does
            kind = OrderedDict if isinstance(value, OrderedDict) else dict
            write, delete = partial(kind.__setitem__, value), partial(kind.__delitem__, value)
            return self._names(path, lambda: dict(kind.items(value)), write, delete)
        parts: list[tuple[Any, str]] = []
        if isinstance(value, (tuple, list, deque, set)):
            items = items_of(value)
            if not isinstance(value, tuple):
                self._holders.append(Items(path, value, items))
            parts = [(item, f"{path}[{n}]") for n, item in enumerate(items)]
        elif isinstance(value, types.FunctionType):
            parts = self._variables(value) if is_own(value.__code__.co_filename) else []
        elif isinstance(value, types.MethodType):
            parts = [(value.__func__, path), (value.__self__, path)]
        elif isinstance(value, type):
            own = value.__flags__ & _MADE_IN_PYTHON and is_own(_file_of(value))
            parts = self._class(value) if own else []
        elif (position := position_of(value)) is not None:
            self._iterators.append((path, value, position))
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
        self._holders.append(Entries(path, read, write, delete, saved))
        return [(value, joined(path, key)) for key, value in saved.items()]

    def _object(self, value: Any, path: str) -> list[tuple[Any, str]]:
        from torch.nn.modules.lazy import LazyModuleMixin

        found = []
        if isinstance(value, LazyModuleMixin):  # its first call gives it another class
            kind = {"__class__": type(value)}
            self._holders.append(
                Entries(
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
        if is_plain(tensor):
            alias = tensor.detach()
            copy = None if storage_of(tensor) in self._weights else alias.clone()
            learns = tensor.requires_grad
            self._holders.append(
                TensorContent(path, tensor, alias, version_of(tensor), learns, copy)
            )
        return []

    def _array(self, array: np.ndarray, path: str) -> list[tuple[Any, str]]:
        if array.dtype != object and array.flags.writeable:
            self._holders.append(ArrayContent(path, array, array.copy()))
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
