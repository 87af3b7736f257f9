"""The guards that a saved program was exported with, held against the dims, as size rules.

A program exported with ``Dim.AUTO`` or ``Dim.DYNAMIC`` holds for the sizes that keep its guards,
and torch refuses to run it at others: these are the legal ones here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pipeline.errors import InputError
from pipeline.probe.evaluate import symbols_in, where_holds
from pipeline.probe.grid import legal_sizes, size_grid
from pipeline.probe.rules import fitted
from pipeline.spec.dims import Dim, SizeRule

if TYPE_CHECKING:
    import torch

_SIZE = re.compile(r"L((?:\['\w+'\]|\[\d+\]|\.\w+)+?)\.size\(\)\[(\d+)\]")
_MOST = 1 << 18  # sizes of a dim at which a guard is evaluated
Texts = Mapping[tuple[str, int], int | str]  # of an axis: a number or an expression


@dataclass(frozen=True)
class _Guard:
    text: str  # in symbols s0, s1, ... that stand for the dims
    words: str  # in the dims
    names: tuple[str, ...]


def guard_rules(
    path: object,
    program: torch.export.ExportedProgram,
    texts: Texts,
    dims: Mapping[str, Dim],
) -> tuple[str, ...]:
    """The rules for the guards that some sizes of the dims break.

    Args:
        path: of the file, for errors.
        program: the program.
        texts: of every axis of every input, by input and axis.
        dims: by name.

    Raises:
        InputError: the program takes fewer sizes of a dim, and a narrower range would say so; or
            no rule can say what a guard asks for.
    """
    symbols = {name: f"s{n}" for n, name in enumerate(dims)}
    guards = _guards(path, program, texts, symbols)
    for name, dim in dims.items():
        _check_alone(path, dim, [g for g in guards if g.names == (name,)], symbols[name])
    rules = []
    for guard in guards:
        used = tuple(dims[name] for name in guard.names)
        grid = size_grid(used, ())
        kept = where_holds(guard.text, {symbols[d.name]: grid[:, n] for n, d in enumerate(used)})
        if kept is None:
            raise _unsaid(path, guard.words)
        if kept.all():
            continue
        try:
            SizeRule(guard.words)
        except InputError as error:
            raise _unsaid(path, guard.words) from error
        rules.append(guard.words)
    return tuple(rules)


def _unsaid(path: object, words: str) -> InputError:
    return InputError(
        f"{path}: the program holds for sizes that keep {words} only, and no rule can say that: "
        "export it with a torch.export.Dim for each dim"
    )


def _guards(
    path: object,
    program: torch.export.ExportedProgram,
    texts: Texts,
    symbols: Mapping[str, str],
) -> list[_Guard]:
    """The guards on sizes, each in symbols for the dims."""
    guards = []
    for code in dict.fromkeys(getattr(program, "_guards_code", ())):
        if ".size()" not in code or ".stride()" in code:  # on a constant; contiguous tensors come
            continue
        try:
            words = _SIZE.sub(lambda m: _axis_text(m, texts), code)
        except KeyError as error:
            raise _unsaid(path, code) from error
        words = re.sub(r"\((\w+)\)", r"\1", words)
        names = tuple(name for name in symbols if re.search(rf"\b{name}\b", words))
        text = re.sub(r"\b[A-Za-z]\w*\b", lambda m: symbols.get(m[0], m[0]), words)
        if names and set(symbols_in(text)) <= set(symbols.values()):
            guards.append(_Guard(text, words, names))
        elif names:
            raise _unsaid(path, words)
    return guards


def _axis_text(match: re.Match[str], texts: Texts) -> str:
    name = "_".join(re.findall(r"\w+", match[1]))
    return f"({texts[name, int(match[2])]})"


def _check_alone(path: object, dim: Dim, guards: Sequence[_Guard], symbol: str) -> None:
    """Raises `InputError` where a narrower dim would keep all guards on it alone."""
    sizes = np.array(legal_sizes(dim, _MOST))
    good = np.ones(len(sizes), bool)
    broken = []
    for guard in guards:
        kept = where_holds(guard.text, {symbol: sizes})
        if kept is not None and not kept.all():
            good &= kept
            broken.append(guard.words)
    if not broken:
        return
    words = " and ".join(broken)
    rule = fitted(dim, sizes[good].tolist())
    if not good.any():
        raise InputError(f"{path}: takes no size of {dim}: torch exported it for {words}")
    new = rule.refined
    if new is None or len(sizes) == _MOST:
        return  # a rule says it
    step = f"/{new.multiple_of}" if new.multiple_of > 1 else ""
    step += f"+{new.offset}" if new.offset else ""
    raise InputError(
        f"{path}: takes less than {dim.min}..{dim.max} of {dim.name}, since torch exported it for "
        f"{words}: {rule.text()}: --dim {dim.name}={new.min}:{new.legal(dim.opt)}:{new.max}{step}"
    )
