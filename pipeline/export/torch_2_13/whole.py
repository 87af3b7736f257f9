"""Keeps ``int(size)`` and ``int(size / size)`` symbolic while a model is traced.

Attention over windows often computes
``B = int(windows.shape[0] / (H * W / window_size / window_size))``. Python's ``int`` must return a
number, so torch.export bakes the batch in. Under `whole_numbers` the name ``int`` in the model's
own modules is a type that keeps a symbolic size symbolic. Of a quotient of sizes it takes the whole
part in integers (see `pipeline.export.torch_2_13.quotients`). Every other call and every other
float (``int(h * 0.7)``, ``int(n ** 0.5)``) uses Python's own ``int``, unless its line is written
anew because a number was baked in there (`pipeline.export.number_branches`).

Only the name changes, in the namespaces of modules whose source can be read. Their functions may
use ``int`` only in calls and in isinstance; code that runs at import may use it freely. If a
function passes the type itself on (``dtype=int``, ``type(n) is int``), its module does not change.
Neither does code without a source (``exec``, a notebook), nor a namespace that defines ``int``.

All threads share the namespaces. There the type is Python's ``int`` for everything but symbolic
sizes. In a thread that is not under `whole_numbers`, it is Python's ``int`` for those too.
"""

from __future__ import annotations

import ast
import builtins
import functools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from pipeline.export.declared import Sizes, declared_size
from pipeline.export.torch_2_13.namespaces import Namespace, namespaces, renamed
from pipeline.export.torch_2_13.quotients import whole_part

_MENTIONED = re.compile(r"\bint\s*\(|\bmap\s*\(\s*int\b")
_TAKES_THE_TYPE = ("isinstance", "issubclass", "map")

_sizes: ContextVar[Sizes | None] = ContextVar("_sizes", default=None)


class _Meta(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, builtins.int)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, builtins.int)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs:
            (value,) = args
            if isinstance(value, torch.Tensor) and _sizes.get() is not None:
                value = value.item()  # may be a size: see size_tensors
            if isinstance(value, (torch.SymInt, torch.SymFloat)):
                return whole(value)
        return builtins.int(*args, **kwargs)


class _Int(builtins.int, metaclass=_Meta):
    """``int`` that keeps symbolic sizes symbolic."""


def whole(value: torch.SymInt | torch.SymFloat) -> Any:
    """``int(value)``, as a SymInt if that is equal at every declared size."""
    sizes = _sizes.get()
    if sizes is None or value.node.expr.is_number:
        return builtins.int(value)
    if isinstance(value, torch.SymInt):
        return value
    env, expr = value.node.shape_env, value.node.expr
    symbols = []
    for symbol in sorted(expr.free_symbols, key=str):
        source = next(iter(env.var_to_sources.get(symbol, ())), None)
        size = None if source is None else declared_size(source.name, sizes)
        if size is None:
            return builtins.int(value)
        symbols.append((str(symbol), size))
    found = whole_part(expr, tuple(symbols))
    if found is None:
        return builtins.int(value)
    parts = {
        symbol: env.create_symintnode(symbol, hint=builtins.int(env.backed_var_to_val[symbol]))
        for symbol in found.free_symbols
    }
    # with Python's operators, so that torch traces them
    return sympy_interp(PythonReferenceAnalysis, parts, found)


@contextmanager
def whole_numbers(module: torch.nn.Module, sizes: Sizes) -> Iterator[None]:
    """Makes ``int`` in the model's modules keep the declared sizes symbolic.

    Args:
        module: the model.
        sizes: the declared sizes, by the argument of its ``forward`` and the axis.
    """
    token = _sizes.set(dict(sizes))
    try:
        with renamed("int", _Int, filter(_only_called, namespaces(module))):
            yield
    finally:
        _sizes.reset(token)


def _only_called(namespace: Namespace) -> bool:
    file = namespace.get("__file__")
    try:
        return file is not None and _fits(Path(file), Path(file).stat().st_mtime_ns)
    except (OSError, ValueError, SyntaxError, RecursionError):
        return False


@functools.lru_cache(maxsize=1024)
def _fits(file: Path, changed: int) -> bool:
    """True if the functions in a file use ``int`` only in calls and in type checks."""
    del changed  # only a part of the cache's key
    if file.suffix != ".py":
        return False
    text = file.read_text(encoding="utf-8")
    if not _MENTIONED.search(text):
        return False
    uses = _Uses()
    uses.visit(ast.parse(text))
    return uses.fit


class _Uses(ast.NodeVisitor):
    """Looks for a use of ``int`` as a value, in code that runs after the import."""

    def __init__(self) -> None:
        self.fit = True
        self._inside = False

    def visit_Name(self, node: ast.Name) -> None:
        if node.id == "int" and (self._inside or not isinstance(node.ctx, ast.Load)):
            self.fit = False

    def visit_Call(self, node: ast.Call) -> None:
        if not (isinstance(node.func, ast.Name) and node.func.id == "int"):
            self.visit(node.func)
        asks = isinstance(node.func, ast.Name) and node.func.id in _TAKES_THE_TYPE
        for value in [*node.args, *(keyword.value for keyword in node.keywords)]:
            kinds = value.elts if isinstance(value, ast.Tuple) else [value]
            for kind in kinds if asks else [value]:
                if not (asks and isinstance(kind, ast.Name)):
                    self.visit(kind)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.visit(node.target)
        if node.value is not None:
            self.visit(node.value)

    def visit_arg(self, node: ast.arg) -> None:
        self.fit = self.fit and node.arg != "int"

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> None:
        for outer in getattr(node, "decorator_list", []):
            self.visit(outer)
        self.visit(node.args)
        before, self._inside = self._inside, True
        for part in node.body if isinstance(node.body, list) else [node.body]:
            self.visit(part)
        self._inside = before

    visit_FunctionDef = visit_AsyncFunctionDef = visit_Lambda = _function

    def visit_Global(self, node: ast.Global) -> None:
        self.fit = self.fit and "int" not in node.names
