"""Compares half precision with float32 for inputs at the edges of their ranges.

Random inputs around 0 cancel: their sum over an image is small, and an average is nearly 0. The sum
over a bright image can be beyond 65504, the largest float16. A random index seldom is the one row
of a table that is large. So half.onnx also runs with inputs that are all 0, all the least, all the
largest, and random in the upper half; see `pipeline.spec.tensors.Input.edge`.

Rounding alone may move an output much there, such as a norm of a constant. So only an output that
is wholly wrong counts: NaN or infinity where model.onnx has a number, or a difference of more than
half its largest value. Simulated rounding must not make the same of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Final

import numpy as np

from pipeline.compare.half_overflow import first_overflow
from pipeline.compare.half_runner import HalfRunner
from pipeline.compare.rounding_tolerance import NoiseRunner
from pipeline.compare.run_names import HALF
from pipeline.compare.runners import outputs
from pipeline.graph.session import OnnxRunner
from pipeline.machine.polygraphy import collected
from pipeline.machine.progress import Announce
from pipeline.machine.resources import Stopwatch
from pipeline.probe.sample_sizes import elements
from pipeline.spec.closeness import Difference
from pipeline.spec.dims import kept_rules
from pipeline.spec.findings import Facts
from pipeline.spec.interface import Interface
from pipeline.spec.profiles import Point
from pipeline.spec.recipe import Recipe
from pipeline.spec.tensors import EDGES, Feed, Precision, Tolerance
from pipeline.spec.verdicts import Check

CHECK: Final = "inputs at the edges"
_WRONG = 0.5  # of an output's largest value
_LEAST = 0.01  # of its largest value over all edges: what is smaller counts as this
_MARGIN = 4  # the factor on what simulated rounding does, as in `pipeline.spec.noise`


@dataclass(frozen=True)
class Edges:
    """Inputs at the edges of their ranges, and what a model makes of them.

    Args:
        model: The ONNX file before half precision.
        precision: ``fp16`` or ``bf16``.
        points, feeds: The sizes, with the edge as the label; and the inputs for each.
        plain: The outputs of the model for each.
    """

    model: Path
    precision: Precision
    points: list[Point] = field(default_factory=list)
    feeds: list[Feed] = field(default_factory=list)
    plain: list[Feed] = field(default_factory=list)

    @staticmethod
    def of(
        model: Path,
        interface: Interface,
        precision: Precision,
        planned: Sequence[Point],
        announce: Announce,
        watch: Stopwatch,
    ) -> Edges:
        """Runs a model at the edges. Edges at which it fails are left out.

        Args:
            model: The ONNX file before half precision.
            interface: The inputs and their ranges.
            precision: ``fp16`` or ``bf16``.
            planned: The sizes of the comparison.
            announce: Called with each run that begins.
            watch: Measures the runs.
        """
        found = Edges(model, precision)
        if not planned or all(i.values is not None or i.pattern for i in interface.inputs):
            return found
        sizes = _sizes(interface, planned)
        feeds = [{i.name: i.edge(sizes, 0, edge) for i in interface.inputs} for edge in EDGES]
        run = None  # all edges in one session; after a failure, the rest in another one
        for n, (edge, feed) in enumerate(zip(EDGES, feeds, strict=True)):
            announce(f"model.onnx with all inputs {edge}")
            run = run or OnnxRunner(model).run(feeds[n:])
            try:
                with watch("edges of the ranges"), collected():
                    found.plain.append(next(run))
            except Exception:  # any library error: such inputs make no sense for this model
                run = None
                continue
            found.points.append(Point(f"inputs {edge}", sizes))
            found.feeds.append(feed)
        return found

    def wrong(self, n: int, got: Feed, tolerances: Mapping[str, Tolerance]) -> str:
        """Returns the first output that is wholly wrong at edge `n`; empty if there is none.

        Args:
            n: The index of the edge.
            got: The outputs in half precision.
            tolerances: The tolerance of each output, by name. A difference within it is right.
        """
        for name, want in self.plain[n].items():
            if want.dtype.kind != "f" or not want.size or got[name].shape != want.shape:
                continue
            allowed = tolerances[name]
            if self._off(want, got[name], name, allowed) and not self._by_rounding(
                n, name, got[name]
            ):
                return name
        return ""

    def _off(self, want: np.ndarray, got: np.ndarray, name: str, allowed: Tolerance) -> bool:
        known = np.isfinite(want)
        if not known.any():
            return False
        if not np.isfinite(got[known]).all():
            return True
        scale = max(_largest(want), _LEAST * max(_largest(feed[name]) for feed in self.plain))
        least = allowed.atol + allowed.rtol * _largest(want)
        return Difference(want[known], got[known]).largest > max(_WRONG * scale, least)

    def _by_rounding(self, n: int, name: str, got: np.ndarray) -> bool:
        """True if simulated rounding moves the output as far."""
        want, noisy = self.plain[n][name], self._noisy[n][name]
        known = np.isfinite(want)
        if not np.isfinite(got[known]).all():
            return not np.isfinite(noisy[known]).all()
        far = Difference(want[known], got[known]).largest
        return far <= _MARGIN * Difference(want[known], noisy[known]).largest

    @cached_property
    def _noisy(self) -> list[Mapping[str, np.ndarray]]:
        return list(NoiseRunner(self.model, self.precision).run(self.feeds))


def check_edges(
    edges: Edges,
    runner: HalfRunner,
    recipe: Recipe | None,
    tolerances: Mapping[str, Tolerance],
    announce: Announce,
    watch: Stopwatch,
) -> list[Check]:
    """Compares a model in half precision with itself at the edges; empty if there are none.

    Args:
        edges: The inputs, and what the model makes of them.
        runner: Runs the model in half precision.
        recipe: Which nodes compute in half precision; by default, the rules decide.
        tolerances: The tolerance of each output, by name.
        announce, watch: See `Edges.of`.

    Raises:
        RunFailed: The model in half precision failed.
    """
    found = outputs(runner, edges.feeds, edges.points, announce, watch)
    count = len(edges.points)
    for n, (point, got) in enumerate(zip(edges.points, found, strict=True)):
        name = edges.wrong(n, got, tolerances)
        if name:
            where = ""
            if edges.precision == "fp16":
                where = first_overflow(edges.model, edges.feeds[n], recipe)
            facts: Facts = {
                "edge": point.label,
                "output": name,
                "got": _said(got[name]),
                "want": _said(edges.plain[n][name]),
                "where": where and f" ({where})",
            }
            return [Check(CHECK, HALF, "wrong-at-an-edge", dict(point.sizes), facts)]
    return [Check(CHECK, HALF, "right-at-edges", facts={"count": count})] if count else []


def _sizes(interface: Interface, planned: Sequence[Point]) -> dict[str, int]:
    """The largest sizes of the comparison, but the least of each dim that is a batch only."""
    inputs = interface.inputs
    largest = max(planned, key=lambda point: elements(inputs, point.sizes)).sizes
    inner = {dim.name for i in inputs for dim in replace(i, shape=i.shape[1:]).dims}
    sizes = {
        name: size if name in inner else min(point.sizes[name] for point in planned)
        for name, size in largest.items()
    }
    return sizes if kept_rules(interface.rules, sizes) else dict(largest)


def _largest(array: np.ndarray) -> float:
    return Difference(array, array).scale


def _said(array: np.ndarray) -> str:
    if not np.isfinite(array).all():
        return "NaN" if np.isnan(array).any() else "infinity"
    return f"up to {_largest(array):.3g}"
