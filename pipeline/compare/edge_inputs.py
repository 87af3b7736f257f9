"""Compares models for inputs at the edges of their ranges.

Random inputs around 0 cancel: their sum over an image is small, and an average is nearly 0. The sum
over a bright image can be beyond 65504, the largest float16. A random index seldom is the one row
of a table that is large, and no random image is all 0. So models also run with inputs that are all
0, all the least, all the largest, and random in the upper half; see
`pipeline.spec.tensors.Input.edge`. torch, exported.onnx and model.onnx run at small sizes, because
in float32 a fault there does not depend on the size. half.onnx runs at large ones.

Rounding alone may move an output much there, such as a norm of a constant. So only what is wholly
wrong counts: another shape, and in a floating-point output NaN or infinity where the reference has
a number, or a difference of more than half its largest value. Rounding must not make the same of
it: the simulated rounding of half precision, or for float32 slightly changed inputs. If no such
input is drawn from a range, a difference alone does not count in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Final

import numpy as np
import onnx

from pipeline.compare.rounding_tolerance import NoiseRunner
from pipeline.compare.run_names import HALF
from pipeline.compare.runners import outputs
from pipeline.errors import PipelineError, first_line
from pipeline.graph.files import nodes_of
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
from pipeline.spec.runner import Runner
from pipeline.spec.tensors import EDGES, Feed, Input, Precision, Tolerance
from pipeline.spec.verdicts import Check

CHECK: Final = "inputs at the edges"
_WRONG = 0.5  # of an output's largest value
_LEAST = 0.01  # of its largest value over all edges: what is smaller counts as this
_SMALL = 1e-6  # the change of inputs, as a share of the ends of their range
_MARGIN = 4  # the factor on what rounding does, as in `pipeline.spec.noise`
_IN_HALF = "Build with --precision auto, or keep nodes in float32 by --recipe"
_IN_FLOAT = "Pass such values with --inputs to find the op"

Rounded = Callable[[Sequence[Feed]], Iterable[Feed]]


@dataclass(frozen=True)
class Edges:
    """Inputs at the edges of their ranges, and what a reference makes of them.

    Args:
        reference: Runs the reference.
        rounded: Computes the outputs for these inputs with rounding; None if nothing does so.
        points, feeds: The sizes, with the edge as the label; and the inputs for each.
        plain: The outputs of the reference for each.
        failed: The edges at which the reference fails, or has no number in its outputs.
    """

    reference: Runner
    rounded: Rounded | None
    points: list[Point] = field(default_factory=list)
    feeds: list[Feed] = field(default_factory=list)
    plain: list[Feed] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    @staticmethod
    def of(
        reference: Runner,
        interface: Interface,
        sizes: Mapping[str, int],
        rounded: Rounded | None,
        announce: Announce,
        watch: Stopwatch,
    ) -> Edges:
        """Runs a reference at the edges. Edges at which it fails are left out.

        Args:
            reference: Runs the reference.
            interface: The inputs and their ranges.
            sizes: The size of every dim.
            rounded: Computes the outputs for given inputs with rounding.
            announce: Called with each run that begins.
            watch: Measures the runs.
        """
        found = Edges(reference, rounded)
        if all(i.values is not None or i.pattern for i in interface.inputs):
            return found
        feeds = [{i.name: i.edge(sizes, edge) for i in interface.inputs} for edge in EDGES]
        results = _tried(reference.run, feeds)
        for edge, feed in zip(EDGES, feeds, strict=True):
            announce(f"{reference.name} with all inputs {edge}")
            with watch("edges of the ranges"):
                plain = next(results)
            if plain is None or not any(_has_numbers(array) for array in plain.values()):
                # such inputs make no sense for this model
                found.failed.append(edge)
                continue
            found.plain.append(plain)
            found.points.append(Point(f"inputs {edge}", sizes))
            found.feeds.append(feed)
        return found

    def wrong(self, n: int, got: Feed, tolerances: Mapping[str, Tolerance]) -> str:
        """Returns the first output that is wholly wrong at edge `n`; empty if there is none.

        Args:
            n: The index of the edge.
            got: The outputs of the run.
            tolerances: The tolerance of each output, by name. A difference within it is right.
        """
        for name, want in self.plain[n].items():
            if name not in got:  # the comparison says so
                continue
            if got[name].shape != want.shape:  # the values decide this size
                noisy = self._noisy[n]
                wrong = noisy is None or noisy[name].shape == want.shape
            else:
                wrong = want.dtype.kind == "f" and self._off(n, name, got[name], tolerances[name])
            if wrong:
                return name
        return ""

    def _off(self, n: int, name: str, got: np.ndarray, allowed: Tolerance) -> bool:
        """True if a floating-point output is wholly wrong, and rounding does not do the same.

        Elements that are no number in the reference, or by rounding, do not count.
        """
        want = self.plain[n][name]
        scale = max(_largest(want), _LEAST * max(_largest(feed[name]) for feed in self.plain))
        most = max(_WRONG * scale, allowed.atol + allowed.rtol * _largest(want))
        known = np.isfinite(want)
        if np.isfinite(got[known]).all() and _far(want[known], got[known]) <= most:
            return False
        noisy = self._noisy[n]
        rounded = want if noisy is None else noisy[name]
        if rounded.shape != want.shape:
            return False
        known &= np.isfinite(rounded)
        if not np.isfinite(got[known]).all():
            return True
        if self.rounded is None:  # nobody knows how far rounding moves it
            return False
        far = _far(want[known], got[known])
        return far > max(most, _MARGIN * _far(want[known], rounded[known]))

    @cached_property
    def _noisy(self) -> list[Feed | None]:
        if self.rounded is None:
            return [None] * len(self.feeds)
        return list(_tried(self.rounded, self.feeds))


def _has_numbers(array: np.ndarray) -> bool:
    return array.dtype.kind != "f" or not array.size or bool(np.isfinite(array).any())


def _far(want: np.ndarray, got: np.ndarray) -> float:
    return Difference(want, got).largest if want.size else 0.0


def _tried(run: Rounded, feeds: Sequence[Feed]) -> Iterator[Feed | None]:
    """The outputs for each feed; None where the run fails. All run in one session until then."""
    results: Iterator[Feed] | None = None
    for n in range(len(feeds)):
        results = results or iter(run(feeds[n:]))
        try:
            with collected():
                found = next(results)
        except Exception:  # any library error
            results = None
            yield None
        else:
            yield found


def half_edges(
    model: Path,
    interface: Interface,
    precision: Precision,
    planned: Sequence[Point],
    announce: Announce,
    watch: Stopwatch,
) -> Edges:
    """The edges for a model in half precision: at the largest sizes, with the least batch.

    There are none if the model may not end.

    Args:
        model: The ONNX file before half precision.
        interface: The inputs and their ranges.
        precision: ``fp16`` or ``bf16``.
        planned: The sizes of the comparison.
        announce, watch: See `Edges.of`.
    """
    reference, rounded = OnnxRunner(model, "model.onnx"), NoiseRunner(model, precision).run
    if may_not_end(model):
        return Edges(reference, rounded)
    sizes = _largest_sizes(interface, planned)
    return Edges.of(reference, interface, sizes, rounded, announce, watch)


def may_not_end(model: Path) -> bool:
    """Whether an ONNX file has a loop, which inputs that make no sense may make endless."""
    graph = onnx.load(model, load_external_data=False).graph
    return any(node.op_type == "Loop" for node in nodes_of(graph))


def float_edges(
    reference: Runner,
    interface: Interface,
    planned: Sequence[Point],
    announce: Announce,
    watch: Stopwatch,
) -> Edges:
    """The edges for a model in float32: at the least sizes.

    Args:
        reference: Runs torch, or the ONNX file that is the source.
        interface, planned, announce, watch: See `half_edges`.
    """
    inputs = interface.inputs
    least = min(planned, key=lambda point: elements(inputs, point.sizes)).sizes
    floats = any(map(_is_drawn, inputs))

    def rounded(feeds: Sequence[Feed]) -> Iterable[Feed]:
        return reference.run(_changed(feed, interface, least) for feed in feeds)

    return Edges.of(reference, interface, least, rounded if floats else None, announce, watch)


def _is_drawn(one: Input) -> bool:
    """True for floats of a range, which can change a little."""
    return np.dtype(one.dtype).kind == "f" and one.values is None


def _changed(feed: Feed, interface: Interface, sizes: Mapping[str, int]) -> Feed:
    """Floats with a small change, relative to the ends of their range and within them."""
    rng = np.random.default_rng(0)
    changed = dict(feed)
    for one in interface.inputs:
        array = feed[one.name]
        if _is_drawn(one):
            low, high = one.range_at(sizes)
            size = max(_SMALL, float(np.finfo(array.dtype).eps)) * max(abs(low), abs(high))
            noisy = array + size * rng.uniform(-1, 1, array.shape)
            changed[one.name] = np.clip(noisy, low, high).astype(array.dtype)
    return changed


def check_edges(
    edges: Edges,
    runner: Runner,
    tolerances: Mapping[str, Tolerance],
    announce: Announce,
    watch: Stopwatch,
    cause: Callable[[Feed], str] = lambda _: "",
) -> list[Check]:
    """Compares a run with the reference at the edges; empty if there are none.

    Args:
        edges: The inputs, and the outputs of the reference.
        runner: The run.
        tolerances: The tolerance of each output of the run, by name.
        announce, watch: See `Edges.of`.
        cause: What makes a run in half precision wrong at an edge, as text; see
            `pipeline.compare.half_overflow`.
    """
    found = outputs(runner, edges.feeds, edges.points, announce, watch)
    for n, point in enumerate(edges.points):
        try:
            got = next(found)
        except PipelineError as error:
            reason = {"reason": f"with all {point.label}: {first_line(error)}"}
            return [Check(CHECK, runner.name, "run-failed", dict(point.sizes), reason)]
        name = edges.wrong(n, got, tolerances)
        if name:
            where, want = cause(edges.feeds[n]), edges.plain[n][name]
            facts: Facts = {
                "edge": point.label,
                "output": name,
                **_said(got[name], want),
                "reference": edges.reference.name,
                "where": where and f" ({where})",
                "do": _IN_HALF if runner.name == HALF else _IN_FLOAT,
            }
            return [Check(CHECK, runner.name, "wrong-at-an-edge", dict(point.sizes), facts)]
    if not edges.feeds and not edges.failed:
        return []
    failed = ", ".join(edges.failed)
    left = f"; {edges.reference.name} fails, or has no number, with all inputs {failed}"
    facts = {"count": len(edges.points), "left": left if edges.failed else ""}
    return [Check(CHECK, runner.name, "right-at-edges", facts=facts)]


def _largest_sizes(interface: Interface, planned: Sequence[Point]) -> dict[str, int]:
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


def _said(got: np.ndarray, want: np.ndarray) -> Facts:
    """What an output is, and what the reference has, as text."""
    if got.shape != want.shape:
        return {"got": f"of shape {[*got.shape]}", "want": f"of shape {[*want.shape]}"}
    known = np.isfinite(want)
    got, want = got[known], want[known]
    said = f"off by up to {Difference(want, got).largest:.3g}"
    if not np.isfinite(got).all():
        said = "NaN" if np.isnan(got).any() else "infinity"
    return {"got": said, "want": f"up to {_largest(want):.3g}"}
