"""The guards of a saved program, compared with its dims, as size rules.

A program exported with ``Dim.AUTO`` or ``Dim.DYNAMIC`` is valid for sizes that keep its guards.
torch refuses to run it at others, so only these sizes are legal.
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
Texts = Mapping[tuple[str, int], int | str]  # a number or an expression by input and axis


@dataclass(frozen=True)
class _Guard:
    text: str  # with symbols s0, s1, ... for the dims
    words: str  # with the dims' names
    names: tuple[str, ...]


def guard_rules(
    path: object,
    program: torch.export.ExportedProgram,
    texts: Texts,
    dims: Mapping[str, Dim],
) -> tuple[str, ...]:
    """A rule for each guard that some sizes of the dims break.

    Args:
        path: The file's path, for errors.
        program: The program.
        texts: The size of every axis, by input and axis.
        dims: The dims by name.

    Raises:
        InputError: The program accepts fewer sizes of a dim, and a narrower range can express them.
            Or no rule can express a guard.
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
        f"{path}: the program runs only at sizes that keep {words}, and no rule can express this. "
        "Export it with a torch.export.Dim for each dim"
    )


def _guards(
    path: object,
    program: torch.export.ExportedProgram,
    texts: Texts,
    symbols: Mapping[str, str],
) -> list[_Guard]:
    """The guards on sizes, each with symbols for the dims."""
    guards = []
    for code in dict.fromkeys(getattr(program, "_guards_code", ())):
        # other guards are on constants, or on strides, and inputs are contiguous
        if ".size()" not in code or ".stride()" in code:
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
    """Raises `InputError` if a narrower dim would keep all guards on this dim alone."""
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
        raise InputError(f"{path}: accepts no size of {dim}: torch exported it for {words}")
    new = rule.refined
    if new is None or len(sizes) == _MOST:
        return  # a rule expresses it
    step = f"/{new.multiple_of}" if new.multiple_of > 1 else ""
    step += f"+{new.offset}" if new.offset else ""
    raise InputError(
        f"{path}: accepts less than {dim.min}..{dim.max} of {dim.name}: torch exported it for "
        f"{words}: {rule.text()}. "
        f"Pass --dim {dim.name}={new.min}:{new.legal(dim.opt)}:{new.max}{step}"
    )
