"""Finds dims of an ONNX file that are always the sum or product of two others.

A file may not declare this: an exporter with a name for each axis writes ``t`` for ``past + seq``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from pipeline.probe.onnx_runner import Failure, OnnxProbe, Sizes
from pipeline.spec.dims import DimExpr
from pipeline.spec.model import ModelSpec

_LEAST = 4  # fewest sets of sizes that must run


def always(spec: ModelSpec, runs: OnnxProbe, base: Sizes) -> dict[str, tuple[str, Failure]]:
    """The dims that are always the sum or product of two others.

    Args:
        spec: The spec. Every dim has a range.
        runs: The runs of the file.
        base: Sizes of all dims at which the file runs.

    Returns:
        For each such dim, the expression, and a run that failed at another size of the dim.
    """
    free = [name for name, dim in spec.dims.items() if not dim.static]
    found: dict[str, tuple[str, Failure]] = {}
    for a, b in itertools.combinations(free, 2):
        for text in (f"{a}+{b}", f"{a}*{b}"):
            rest = [name for name in free if name not in (a, b, *found)]
            alike = [tuple(n for n in rest if base[n] == base[name]) for name in rest]
            for follow in dict.fromkeys([*((name,) for name in rest), *alike]):
                if runs.over or {a, b, *follow} & found.keys():
                    continue
                ran = _ran(runs, _near(spec, base, (a, b), text, follow))
                for name in follow if ran else ():
                    broken = _broken(spec, runs, ran, name)
                    if broken is not None:
                        found[name] = text, broken
    return found


def _near(
    spec: ModelSpec, base: Sizes, pair: tuple[str, str], text: str, follow: Sequence[str]
) -> Iterator[dict[str, int]]:
    """Legal sizes near the base, with the expression's value as the size of the dims `follow`."""
    sides = []
    for name in pair:
        dim = spec.dims[name]
        near = {dim.legal(base[name] + k * dim.multiple_of) for k in (-1, 1, 2)}
        sides.append([base[name], *sorted(near - {base[name]})])
    for x, y in itertools.product(*sides):
        sizes = {**base, pair[0]: x, pair[1]: y}
        size = DimExpr(text).value(sizes)
        if all(spec.dims[name].legal(size) == size for name in follow):
            yield {**sizes, **dict.fromkeys(follow, size)}


def _ran(runs: OnnxProbe, every: Iterator[dict[str, int]]) -> list[dict[str, int]]:
    """The sizes that ran; empty if a run fails, or fewer than `_LEAST` ran."""
    tried = []
    for sizes in every:
        found = runs.at(sizes)
        if isinstance(found, Failure):
            return []
        tried += [sizes] if found is not None else []
    return tried if len(tried) >= _LEAST else []


def _broken(spec: ModelSpec, runs: OnnxProbe, ran: Sequence[Sizes], name: str) -> Failure | None:
    """A run that fails because only this dim is one step larger than in a good run."""
    dim = spec.dims[name]
    more = ({**sizes, name: dim.legal(sizes[name] + dim.multiple_of)} for sizes in ran)
    return next((failure for failure in map(runs.fails, more) if failure is not None), None)
