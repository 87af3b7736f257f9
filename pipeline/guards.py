"""The guards that an export stands on, held against every size that is declared.

torch.export itself checks a guard only where it is on one dim that was given as it is: for a
derived dim (``8*_h``) and for two dims at once (``h*w < 10000``) it takes what the example
showed for the whole range (torch 2.13). So each guard that the shape environment recorded is
evaluated at the dims' legal sizes.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType
from typing import Any

import torch

from pipeline.dims import Dim
from pipeline.spec import Input

_WORDS = {
    "Eq": lambda a, b: a == b,
    "Ne": lambda a, b: a != b,
    "Mod": lambda a, b: a % b,
    "PythonMod": lambda a, b: a % b,
    "FloorDiv": lambda a, b: a // b,
    "CleanDiv": lambda a, b: a // b,
    "Max": max,
    "Min": min,
    "True": True,
    "False": False,
}
_MOST = 1 << 14  # sizes of a dim at which a guard is evaluated
_PROBES = 24  # sizes of each dim where a guard is on several
_TRIED = 3  # sizes at which a broken guard is tried out
_ELEMENTS = 1 << 23  # of the inputs for which a broken guard is tried out


@dataclass(frozen=True)
class Broken:
    """A guard that some of the declared sizes break.

    Args:
        text: the guard, in torch's symbols.
        words: the guard, in the dims.
        dims: the dims that it is on.
        sizes: some of the sizes that break it, by dim, the smallest first.
    """

    text: str
    words: str
    dims: tuple[Dim, ...]
    sizes: Sequence[Mapping[str, int]]


@dataclass(frozen=True)
class _Symbol:
    dim: Dim
    step: int  # the symbol's value is the dim's size divided by this


def holds(guard: str, values: Mapping[str, int]) -> bool | None:
    """The value of a guard's text at given values of its symbols; None if it can't be told."""
    code = _compiled(guard)
    if code is None:
        return None
    try:
        return bool(eval(code, {"__builtins__": {}, **_WORDS}, dict(values)))
    except (ArithmeticError, NameError, TypeError):
        return None


def symbols_in(guard: str) -> set[str]:
    """The names of the symbols in a guard's text."""
    return set(re.findall(r"\b[a-z]+\d+\b", guard))


@lru_cache(maxsize=4096)
def _compiled(guard: str) -> CodeType | None:
    # ~ on a bool is not its negation, and a name with a dot is no function of _WORDS
    if "~" in guard or re.search(r"[A-Za-z_]\.", guard):
        return None
    try:
        return compile(guard, "<guard>", "eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def broken_guards(program: torch.export.ExportedProgram, inputs: Sequence[Input]) -> list[Broken]:
    """The guards of a program that not all declared sizes keep."""
    symbols, guards = _recorded(program, inputs)
    found = []
    for text in dict.fromkeys(guards):
        used = sorted(symbols_in(text))
        if not used or any(name not in symbols for name in used):
            continue
        dims = {symbols[name].dim.name: symbols[name].dim for name in used}
        most = _MOST if len(dims) == 1 else _PROBES
        bad: list[dict[str, int]] = []
        for sizes in _ascending([legal_sizes(dim, most) for dim in dims.values()]):
            at = dict(zip(dims, sizes, strict=True))
            values = {n: at[symbols[n].dim.name] // symbols[n].step for n in used}
            if holds(text, values) is False:
                bad.append(at)
                if len(bad) == _TRIED:
                    break
        if bad:
            words = re.sub(r"\b[a-z]+\d+\b", lambda match: _word(symbols[match[0]]), text)
            found.append(Broken(text, words, tuple(dims.values()), tuple(bad)))
    return found


def good_sizes(
    program: torch.export.ExportedProgram,
    inputs: Sequence[Input],
    dim: Dim,
    guards: Sequence[Broken],
) -> list[int]:
    """The legal sizes of a dim that keep all of these guards, which are on this dim alone."""
    symbols, _ = _recorded(program, inputs)
    own = {name: s.step for name, s in symbols.items() if s.dim.name == dim.name}
    return [
        size
        for size in legal_sizes(dim, _MOST)
        if all(holds(g.text, {n: size // step for n, step in own.items()}) for g in guards)
    ]


def matters(
    program: torch.export.ExportedProgram,
    module: torch.nn.Module,
    args: Sequence[torch.Tensor],
) -> bool:
    """False if the exported program does as the module does at sizes that break a guard.

    Many guards only chose a faster way (memory layouts, sizes of 1). Where the inputs are too
    large to try, the guard is taken to matter.
    """
    if sum(arg.numel() for arg in args) > _ELEMENTS:
        return True
    try:
        want = _flat(module(*args))
        got = _flat(program.module(check_guards=False)(*args))
    except Exception:  # the model, or the graph, fails at these sizes
        return True
    return len(want) != len(got) or not all(
        a.shape == b.shape and torch.allclose(a, b, rtol=1e-3, atol=1e-4, equal_nan=True)
        for a, b in zip(want, got, strict=True)
    )


def legal_sizes(dim: Dim, most: int) -> list[int]:
    """The legal sizes of a dim in order; where there are more than `most`, half of them the
    smallest, the others spread over the rest, the largest included."""
    every = range(dim.min, dim.max + 1, dim.multiple_of)
    if len(every) <= most:
        return list(every)
    half = most // 2
    rest = every[half:]
    chosen = {rest[i * (len(rest) - 1) // (half - 1)] for i in range(half)}
    return [*every[:half], *sorted(chosen)]


def _recorded(
    program: torch.export.ExportedProgram, inputs: Sequence[Input]
) -> tuple[dict[str, _Symbol], list[str]]:
    """torch's symbols of the inputs' dims, and the texts of all guards."""
    names = program.graph_signature.user_inputs
    values = {n.name: n.meta.get("val") for n in program.graph.nodes if n.op == "placeholder"}
    symbols: dict[str, _Symbol] = {}
    guards: list[str] = []
    for name, declared in zip(names, inputs, strict=True):
        value: Any = values[str(name)]
        for size, dim in zip(value.shape, declared.shape, strict=True):
            if not isinstance(dim, Dim) or isinstance(size, int):
                continue
            symbols[str(size.node._expr)] = _Symbol(dim, 1)
            expr = size.node.expr
            if len(expr.free_symbols) == 1:
                (root,) = expr.free_symbols
                factor = expr / root
                if factor.is_Integer:
                    symbols[str(root)] = _Symbol(dim, int(factor))
            guards = [str(g.expr) for g in size.node.shape_env.guards]
    return symbols, guards


def _word(symbol: _Symbol) -> str:
    name = symbol.dim.name
    return name if symbol.step == 1 else f"({name}/{symbol.step})"


def _ascending(sizes: Sequence[Sequence[int]]) -> Iterator[tuple[int, ...]]:
    """All combinations, those of few elements first."""
    return iter(sorted(itertools.product(*sizes), key=math.prod))


def _flat(result: Any) -> list[torch.Tensor]:
    return list(result) if isinstance(result, (tuple, list)) else [result]
