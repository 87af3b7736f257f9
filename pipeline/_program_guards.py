"""The guards that a saved program was exported with, as narrower dims and as size rules.

A program exported with ``Dim.AUTO`` or ``Dim.DYNAMIC`` holds for the sizes that keep its guards,
and torch refuses to run it at others: these are the legal ones here.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from pipeline.constraints import fitted
from pipeline.dims import Dim, SizeRule
from pipeline.errors import InputError
from pipeline.guards import _grid, _kept, legal_sizes, symbols_in

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


def keep_guards(
    path: object,
    program: torch.export.ExportedProgram,
    texts: Texts,
    dims: Mapping[str, Dim],
    given: Collection[str],
) -> tuple[dict[str, Dim], tuple[str, ...]]:
    """The dims without the sizes that break a guard, and the rules for guards on several dims.

    Args:
        path: of the file, for errors.
        program: the program.
        texts: of every axis of every input, by input and axis.
        dims: by name.
        given: names of dims that are not to be narrowed, since the user said their range.

    Raises:
        InputError: a given dim has sizes that the program does not take, or a guard can't be said.
    """
    symbols = {name: f"s{n}" for n, name in enumerate(dims)}
    guards = _guards(path, program, texts, symbols)
    narrowed = {n: _narrowed(path, d, guards, symbols[n], n in given) for n, d in dims.items()}
    rules = []
    for guard in guards:
        used = tuple(narrowed[name] for name in guard.names)
        grid = _grid(used, ())
        kept = _kept(guard.text, {symbols[d.name]: grid[:, n] for n, d in enumerate(used)})
        if kept is None:
            raise _unsaid(path, guard.words)
        if kept.all():
            continue
        try:
            SizeRule(guard.words)
        except InputError as error:
            raise _unsaid(path, guard.words) from error
        rules.append(guard.words)
    return narrowed, tuple(rules)


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


def _narrowed(path: object, dim: Dim, guards: Sequence[_Guard], symbol: str, given: bool) -> Dim:
    """The dim with the sizes that keep all guards on it alone, where a Dim can say them."""
    sizes = np.array(legal_sizes(dim, _MOST))
    good = np.ones(len(sizes), bool)
    broken = []
    for guard in guards:
        if guard.names != (dim.name,):
            continue
        kept = _kept(guard.text, {symbol: sizes})
        if kept is not None and not kept.all():
            good &= kept
            broken.append(guard.words)
    if not broken:
        return dim
    rule = fitted(dim, sizes[good].tolist(), f"{' and '.join(broken)} must hold")
    if not good.any():
        raise InputError(f"{path}: the program takes no size of {dim}: {rule.words}")
    if rule.refined is None or len(sizes) == _MOST:
        return dim  # a rule says it
    if given:
        new = rule.refined
        step = f"/{new.multiple_of}" if new.multiple_of > 1 else ""
        step += f"+{new.offset}" if new.offset else ""
        raise InputError(
            f"{path}: --dim {dim.name}: {rule.words}, as it was exported: "
            f"--dim {dim.name}={new.min}:{new.opt}:{new.max}{step}"
        )
    new = rule.refined
    opt = new.legal(dim.opt)
    return replace(new, opt=opt)
