"""Tries recipes of half precision on the CPU, with the rounding of a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from pipeline.compare.edge_inputs import Edges
from pipeline.compare.half_runner import HalfRunner
from pipeline.compare.runners import Ground, outputs
from pipeline.machine.resources import Stopwatch
from pipeline.rewrite.half_islands import Choices
from pipeline.spec.closeness import Difference
from pipeline.spec.recipe import Recipe, all_but, pattern_of
from pipeline.spec.tensors import Feed, Precision, Tolerance

# of the tolerance: the rest is left for the difference between torch and model.onnx
MOST = 0.9
_Wide = frozenset[int]


@dataclass
class Trials:
    """Tries recipes, and remembers the results.

    Args:
        model: The ONNX file before half precision.
        precision: ``fp16`` or ``bf16``.
        choices: The nodes that may compute in half precision.
        ground: The sizes and the inputs.
        plain: The outputs of the model at each size.
        edges: Inputs at the edges of their ranges.
        tolerances: The tolerance of each output, by name.
        places: The indices of the sizes at which each recipe is tried, in order. The edges follow
            the sizes.
        limit: How many recipes may be tried.
        runs: How many were tried.
        stopped: Whether the limit was reached.
    """

    model: Path
    precision: Precision
    choices: Choices
    ground: Ground
    plain: Sequence[Feed]
    edges: Edges
    tolerances: Mapping[str, Tolerance]
    places: list[int]
    limit: int
    runs: int = 0
    stopped: bool = False
    _shares: dict[tuple[_Wide, int], float] = field(default_factory=dict)

    def recipe(self, wide: Sequence[str]) -> Recipe:
        """The recipe that keeps these groups and parts in float32."""
        return all_but(self.precision, [pattern_of(name) for name in wide])

    def hold(self, wide: Sequence[str]) -> bool:
        """True if the error is small enough at `places`. False, without a run, after the limit."""
        nodes = self._nodes(wide)
        known = [self._shares.get((nodes, n)) for n in self.places]
        if any(share is not None and share > MOST for share in known):
            return False
        if None not in known:
            return True
        if self.runs >= self.limit:
            self.stopped = True
            return False
        self._run(wide, nodes, self.places)
        return all(self._shares.get((nodes, n), np.inf) <= MOST for n in self.places)

    def worst(self, wide: Sequence[str]) -> tuple[float, int]:
        """The largest error as a share of the tolerance, and the index of its size. Ends at the
        first size with an error that is too large. The limit does not count."""
        nodes, every = self._nodes(wide), range(len(self.plain) + len(self.edges.plain))
        self._run(wide, nodes, every)
        return max((self._shares[nodes, n], n) for n in every if (nodes, n) in self._shares)

    def _nodes(self, wide: Sequence[str]) -> _Wide:
        return frozenset(self.choices.wide(self.recipe(wide)))

    def _run(self, wide: Sequence[str], nodes: _Wide, places: Sequence[int]) -> None:
        left = [n for n in places if (nodes, n) not in self._shares]
        if not left:
            return
        self.runs += all(nodes != tried for tried, _ in self._shares)
        points = [*self.ground.points, *self.edges.points]
        feeds = [*self.ground.feeds, *self.edges.feeds]
        name = f"recipe {self.runs}, {len(nodes)} nodes in float32,"
        runner = HalfRunner(self.model, self.precision, True, name, self.recipe(wide))
        found = outputs(
            runner, [feeds[n] for n in left], [points[n] for n in left], self.ground.announce,
            Stopwatch(),
        )  # fmt: skip
        for n, got in zip(left, found, strict=False):
            self._shares[nodes, n] = share = self._share(n, got)
            if share > MOST:
                break

    def _share(self, n: int, got: Feed) -> float:
        edge = n - len(self.plain)
        if edge >= 0:
            return np.inf if self.edges.wrong(edge, got, self.tolerances) else 0.0
        return max(
            share_of(self.plain[n][name], got[name], limit)
            for name, limit in self.tolerances.items()
        )


def share_of(want: np.ndarray, got: np.ndarray, tolerance: Tolerance) -> float:
    """The largest difference of two arrays of one shape, as a share of the tolerance."""
    difference = Difference(want, got, wide=False)
    if not want.size or difference.same.all():
        return 0.0
    if want.dtype.kind != "f":
        most = tolerance.differing * want.size
        return difference.unequal / most if most else np.inf
    off, allowed = difference.off, difference.allowed(tolerance)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        shares = np.where(difference.same, 0.0, off / allowed)
    return float(np.nan_to_num(shares, nan=np.inf, posinf=np.inf).max())
