"""Sets of sizes: all legal sets if they are few enough, otherwise a sample."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from pipeline.probe.evaluate import result_of
from pipeline.spec.dims import Dim

MOST_SIZES = 1 << 14  # most sizes of a dim at which a guard is evaluated

_ALONE = 1 << 19  # most sizes of a dim at which a guard on no other dim is evaluated
_GRID = 1 << 18  # most combinations of sizes at which a guard on several dims is evaluated


def complete(dims: Sequence[Dim]) -> bool:
    """True if `size_grid` holds every combination of the dims' sizes."""
    counts = [len(range(d.min, d.max + 1, d.multiple_of)) for d in dims]
    if len(counts) == 1:
        return counts[0] <= _ALONE
    return max(counts, default=0) <= MOST_SIZES and math.prod(counts) <= _GRID


@lru_cache(maxsize=16)
def size_grid(dims: tuple[Dim, ...], rules: tuple[str, ...]) -> np.ndarray:
    """Combinations of legal sizes that keep the rules, int [combinations, dims].

    These are all combinations. If there are too many, each dim has all its sizes, with some sizes
    of the other dims. Combinations with few elements come first.
    """
    count = len(dims)
    every = [legal_sizes(dim, _ALONE if count == 1 else MOST_SIZES) for dim in dims]
    if count == 1 or math.prod(map(len, every)) <= _GRID:
        blocks = [every]
    else:
        probes = max(4, int((_GRID / max(map(len, every))) ** (1 / (count - 1))))
        full = max(64, _GRID // probes ** (count - 1))
        blocks = [
            [legal_sizes(d, full if i == k else probes) for i, d in enumerate(dims)]
            for k in range(count)
        ]
    meshes = [np.stack([m.ravel() for m in np.meshgrid(*b)], axis=1) for b in blocks]
    rows = meshes[0] if len(meshes) == 1 else np.unique(np.concatenate(meshes), axis=0)
    columns = dict(zip((dim.name for dim in dims), rows.T, strict=True))
    for rule in rules:
        kept = result_of(rule, columns)  # None for a rule on other dims
        if kept is not None:
            rows = rows[kept]
            columns = dict(zip((dim.name for dim in dims), rows.T, strict=True))
    found: np.ndarray = rows[np.argsort(rows.astype(float).prod(axis=1), kind="stable")]
    return found


def evidence(dims: tuple[Dim, ...], rules: tuple[str, ...]) -> str:
    """``all 36 sizes of h``, or ``a sample of 262144 of the 4104676 sizes of h and w``."""
    names = " and ".join(dim.name for dim in dims)
    if complete(dims):
        return f"all {len(size_grid(dims, rules))} sizes of {names}"
    total = math.prod(len(range(d.min, d.max + 1, d.multiple_of)) for d in dims)
    return f"a sample of {len(size_grid(dims, rules))} of the {total} sizes of {names}"


def legal_sizes(dim: Dim, most: int) -> list[int]:
    """At most `most` legal sizes of a dim, in order.

    If the dim has more, half of the result are the smallest sizes. The others are spread over the
    rest, and include the largest size.
    """
    every = range(dim.min, dim.max + 1, dim.multiple_of)
    return [every[k] for k in spread(len(every), most)]


def spread(count: int, most: int) -> list[int]:
    """At most `most` (4 or more) of `count` indices: half are the first; the last is included."""
    if count <= most:
        return list(range(count))
    half = most // 2
    return [*range(half), *(half + i * (count - half - 1) // (half - 1) for i in range(half))]
