"""Compares torch with ONNX, ONNX with rewritten ONNX, and ONNX with the engine.

Polygraphy compares the numbers. This module chooses the sizes, and reports those that do not fit
into memory. It fails what Polygraphy accepts: another name, dtype or shape of an output, NaN,
infinity, and a tolerance so wide that zeros would pass.

ONNX Runtime runs without graph optimisations, because they could hide a fault of a pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from pipeline.artifact.manifest import ComparisonInfo, PointInfo
from pipeline.compare.near_zero import settled
from pipeline.compare.plan import ComparisonPlan, Job
from pipeline.compare.problems import Problem, problems, with_worst
from pipeline.compare.run_names import EXPORTED, TORCH, in_precision
from pipeline.compare.verdict import judge, origins_of, other_shape
from pipeline.compare.weak_parts import weak_parts
from pipeline.errors import CompareError, PipelineError, first_line
from pipeline.machine.polygraphy import collected
from pipeline.machine.progress import Announce
from pipeline.machine.resources import Stopwatch
from pipeline.probe.eager import call_module
from pipeline.probe.history import advice
from pipeline.probe.state import ModuleState
from pipeline.spec.closeness import Difference
from pipeline.spec.dims import shape_at, sizes_text
from pipeline.spec.findings import Facts, Note, NoteKind, note
from pipeline.spec.metrics import measured
from pipeline.spec.precision import ROUNDED
from pipeline.spec.profiles import Point, Profile
from pipeline.spec.runner import Runner
from pipeline.spec.tensors import Feed, Precision
from pipeline.spec.verdicts import ADVICE, AdviceKind, Verdict

if TYPE_CHECKING:
    import torch

_CLOSE = 1e-5  # of an output's largest value
_SHOWN = 3  # attributes in an error

# name of a run -> one {output: array} for each point
Runs = dict[str, Sequence[Feed]]


@dataclass(frozen=True)
class Ground:
    """The sizes and inputs of every run.

    Args:
        points, feeds: The sizes, and the inputs for each.
        announce: Called with each step that begins.
        watch: Measures the time of each run.
    """

    points: list[Point]
    feeds: list[Feed]
    announce: Announce
    watch: Stopwatch

    def collect(self, runner: Runner) -> Sequence[Feed]:
        """Returns the runner's outputs at all points; see `collect`."""
        return collect(runner, self.feeds, self.points, self.announce, self.watch)


class RunFailed(CompareError):
    """A run ended in an error.

    Args:
        run: The name of the run.
        point: The number of the point at which the run failed.
    """

    def __init__(self, message: str, *, run: str, point: int, detail: str = "") -> None:
        super().__init__(message, detail=detail)
        self.run, self.point = run, point


@dataclass(frozen=True)
class TorchRunner:
    """Runs a torch module without gradients; see `pipeline.spec.runner.Runner`.

    Args:
        module: The module in eval mode. It gets the inputs in their order.
        outputs: The names of its outputs, in order.
        first: Whether only the module's first call counts, see `ModelSpec.state`.
    """

    module: torch.nn.Module
    outputs: Sequence[str]
    first: bool = False
    name: str = TORCH
    precision: Precision = "fp32"

    def run(self, feeds: Iterable[Feed]) -> Iterator[dict[str, np.ndarray]]:
        """Yields the outputs by name for each feed.

        Raises:
            CompareError: The module does not return one tensor for each name, or it remembers
                earlier calls.
        """
        import torch

        from pipeline.export.module import inner

        module = inner(self.module)
        state = ModuleState(module)
        used: ModuleState | None = None  # after the calls so far, if one of them left something
        for feed in feeds:
            # what the module keeps does not reach the next call
            with torch.inference_mode(), state.restored():
                arrays = self._called(feed)
                if used is not None:
                    used.restore()
                    if not all(map(_close, self._called(feed), arrays)):
                        raise _remembers(feed, [*state.changes()])
                if used is not None or (state.changes() and not self.first):
                    used = ModuleState(module)
            yield dict(zip(self.outputs, arrays, strict=True))

    def _called(self, feed: Feed) -> list[np.ndarray]:
        import torch

        result = call_module(self.module, feed)
        flat = result if isinstance(result, (tuple, list)) else (result,)
        if len(flat) != len(self.outputs) or not all(isinstance(t, torch.Tensor) for t in flat):
            raise CompareError(
                f"the model returns {type(result).__name__}, but the spec names the "
                f"outputs {', '.join(self.outputs)}. Return one tensor for each, as a tensor or "
                "a tuple"
            )
        # a crop is a view, and a tensor that the module keeps is put back
        return [t.detach().cpu().contiguous().numpy().copy() for t in flat]


def _close(got: np.ndarray, want: np.ndarray) -> bool:
    """True if a later call gives what a first one gives; it may add in another order."""
    if got.shape != want.shape:
        return False
    difference = Difference(want, got)
    return difference.odd_alike and difference.largest_finite <= _CLOSE * difference.scale


def _remembers(feed: Feed, paths: Sequence[str]) -> CompareError:
    shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in feed.items())
    return CompareError(
        f"the torch model remembers earlier calls: with {shapes}, a later call gives other outputs "
        f"than a first call. The model keeps {', '.join(paths[:_SHOWN])}. {advice(paths[:_SHOWN])}"
    )


def module_of(runner: Runner | None) -> torch.nn.Module | None:
    """Returns the torch module that a runner runs, if any."""
    return runner.module if isinstance(runner, TorchRunner) else None


def collect(
    runner: Runner,
    feeds: Iterable[Feed],
    points: Sequence[Point],
    announce: Announce,
    watch: Stopwatch,
) -> list[Feed]:
    """Returns the runner's outputs at all points; see `outputs`."""
    return list(outputs(runner, feeds, points, announce, watch))


def outputs(
    runner: Runner,
    feeds: Iterable[Feed],
    points: Sequence[Point],
    announce: Announce,
    watch: Stopwatch,
) -> Iterator[Feed]:
    """Yields the runner's outputs at each point.

    Args:
        runner: Computes the outputs.
        feeds: The inputs, one set for each point.
        points: The sizes.
        announce: Called with the runner and the sizes before each run.
        watch: Measures the runs under the runner's name.

    Raises:
        RunFailed: The run failed at a point. The message names the run and the sizes.
    """
    name, results = runner.name, runner.run(feeds)
    for number, point in enumerate(points):
        announce(f"{name} at {point}, {number + 1} of {len(points)}")
        try:
            with watch(name), collected() as messages:
                found = next(results)
        except PipelineError:
            raise
        except Exception as error:  # any library error: the message needs the sizes
            first = first_line(error).rstrip(".")
            text = "\n".join([*messages.errors, str(error)])
            hint = f". {ADVICE['limit-inputs']}" if name == TORCH else ""
            if "NOT_IMPLEMENTED" in first:
                hint = f". {ADVICE['no-kernel']}"
            message = f"{name} fails at {point}: {first}{hint}"
            raise RunFailed(message, run=name, point=number, detail=text) from error
        yield found


def conclude(
    plan: ComparisonPlan,
    runs: Runs,
    pairs: Sequence[tuple[str, str]],
    job: Job,
    notes: Sequence[Note] = (),
) -> ComparisonInfo:
    """Compares every pair of runs at every point that ran."""
    infos = []
    index = 0
    for info in plan.infos:
        ran, results = info.compared, list(info.results)
        if ran and not pairs:
            infos.append(_alone(info, runs, index))
        else:
            origins = origins_of({run: all_[index] for run, all_ in runs.items()} if ran else {})
            for first, second in pairs if ran else ():
                left, right = runs[first][index], runs[second][index]
                if left and right:  # an engine's profile may not cover the point
                    judged = judge(first, second, left, right, job.tolerances(second), origins)
                    advised = [_advised(result, job) for result in judged]
                    results += [_with_metric(result, job, left, right) for result in advised]
            if ran:
                results += _other_than_declared(job, info, runs, index)
            infos.append(replace(info, results=tuple(results)))
        index += ran
    infos, near_zero = settled(infos)
    if (job.untold or job.measured) and len(plan.run) > 1:
        infos = with_worst(infos)
    notes = [
        *plan.notes,
        *notes,
        *near_zero,
        *_nothing(infos),
        *(_uncompared(infos, job) if pairs else ()),
    ]
    if pairs:
        notes += weak_parts(runs[pairs[0][0]], job.interface.tolerances())
    if job.untold and any(in_precision(run) for run in runs):
        notes.append(note("no-engine-tolerance", precision=job.precision))
    return ComparisonInfo(
        job.memory_limit, tuple(infos), tuple(notes), engine_tolerances=job.measured
    )


def _advised(result: Verdict, job: Job) -> Verdict:
    """Adds advice to a failed verdict if the engine's precision may be the cause."""
    run = result.pair[1]
    if result.passed or not in_precision(run):
        return result
    if job.precision == "fp16" and result.facts.get("whose") == run:
        return result.knowing(advice="fp16-overflow", clean=result.pair[0])
    if result.kind == "values-differ" and job.precision in ROUNDED:
        return result.knowing(advice="rounding-picks", precision=job.precision)
    if result.kind == "inconclusive" and job.measured:
        return result.knowing(advice="rounding-hides", precision=job.precision)
    if result.max_rel is None or not (job.untold or job.measured):
        return result
    advice: AdviceKind = "state-engine-tolerance" if job.untold else "beyond-rounding"
    return result.knowing(advice=advice, precision=job.precision)


def _with_metric(result: Verdict, job: Job, left: Feed, right: Feed) -> Verdict:
    """Adds the output's metric to the facts, if the output has one."""
    name = result.output
    metric = next((o.metric for o in job.interface.outputs if o.name == name), None)
    if metric is None or result.max_abs is None:
        return result
    value = measured(metric, left[name], right[name])
    facts = {**result.facts, "metric": metric, "measured": value}
    return result if value is None else replace(result, facts=facts)


def _other_than_declared(job: Job, info: PointInfo, runs: Runs, index: int) -> list[Verdict]:
    """Returns a verdict for each output of the first run with another shape than declared."""
    name, arrays = next((n, run[index]) for n, run in runs.items())
    return [
        other_shape(("declared", name), output, got, want)
        for output, shape in job.interface.output_shapes.items()
        if output in arrays
        and (got := arrays[output].shape) != (want := shape_at(shape, info.sizes))
    ]


def _alone(info: PointInfo, runs: Runs, index: int) -> PointInfo:
    """Returns the result of a point with one run only: not compared, but NaN fails."""
    facts: Facts = {"whose": EXPORTED, "advice": "limit-inputs"}
    wrong = [
        Verdict("not-finite", (EXPORTED, EXPORTED), name, facts=facts)
        for name, array in runs[EXPORTED][index].items()
        if array.dtype.kind == "f" and not np.isfinite(array).all()
    ]
    left_out = note("one-run", run=EXPORTED)
    return replace(info, left_out=left_out, results=(*info.results, *wrong))


def _nothing(infos: Sequence[PointInfo]) -> list[Note]:
    """Returns a note if nothing was compared because of memory."""
    left_out = [info.left_out for info in infos if info.left_out is not None]
    too_large = any(why.kind == "too-large" for why in left_out)
    return [note("nothing-compared")] if too_large and len(left_out) == len(infos) else []


def _uncompared(infos: Sequence[PointInfo], job: Job) -> list[Note]:
    """Returns a note for each profile without a compared size."""
    notes = []
    for profile in job.interface.profiles:
        mine = [info for info in infos if profile.allows(info.sizes)]
        if not mine:
            notes.append(note("no-size-keeps-the-rules", profile=profile.name))
        elif not any(info.compared for info in mine):
            dear = all(info.estimate_bytes > job.memory_limit for info in mine)
            kind: NoteKind = "profile-too-large" if dear else "profile-not-stored"
            notes.append(note(kind, profile=profile.name))
    return notes


def failures(comparison: ComparisonInfo) -> list[str]:
    """Returns one line for each failure; empty if the comparison passed."""
    lines = [_line(problem) for problem in problems(comparison.points)]
    lines += [one.text for one in comparison.notes if one.fails]
    for check in comparison.checks:
        if not check.passed:
            at = sizes_text(check.sizes)
            lines.append(f"{check.name} of {check.run}{f' ({at})' if at else ''}: {check.text}")
    return lines


def _line(problem: Problem) -> str:
    info, result, more = problem.point, problem.result, problem.points - 1
    rest = f" and {more} more size{'s' if more > 1 else ''}" if more else ""
    reference, run = result.pair
    at = f"{info.label} ({sizes_text(info.sizes)}){rest}"
    return f"{result.output} of {run} against {reference} at {at}: {result.text}"


def profile_of(point: Point, profiles: Sequence[Profile]) -> int | None:
    """Returns the number of the first profile that allows the sizes; None if none does."""
    return next((n for n, p in enumerate(profiles) if p.allows(point.sizes)), None)
