"""The comparisons: torch against ONNX, ONNX against rewritten ONNX, ONNX against the engine.

Polygraphy runs and compares; this module decides where (sizes from the dims), leaves out what
does not fit into memory and says so, and refuses what Polygraphy lets pass: another name,
dtype or shape of an output, NaN, infinity, and a tolerance so wide that zeros would pass.

ONNX Runtime runs with its graph optimisations off, so that it can't hide what a pass did.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.dims import Size, shape_at
from pipeline.errors import CompareError, PipelineError
from pipeline.manifest import ComparisonInfo, PairResult, PointInfo
from pipeline.memory import Estimator
from pipeline.polygraphy_log import collected
from pipeline.profiles import Point, Profile
from pipeline.spec import Tolerance, padded_name
from pipeline.stored import Feed
from pipeline.timing import Stopwatch

if TYPE_CHECKING:
    import torch

Announce = Callable[[str], None]
# name of a run -> one {output: array} a point
Runs = dict[str, Sequence[Feed]]

_RANGE_HINT = "; if its inputs' values are to blame, give the Input a range: low=, high="
_MISSING = "torch's outputs are not stored for them; run torch again (--torch)"
TORCH, EXPORTED, REWRITTEN, ENGINE = "torch", "exported", "rewritten", "engine"


class RunFailed(CompareError):
    """A run that ended in an error.

    Args:
        run: its name.
        point: the number of the point that it failed at.
    """

    def __init__(self, message: str, *, run: str, point: int, detail: str = "") -> None:
        super().__init__(message, detail=detail)
        self.run, self.point = run, point


@dataclass(frozen=True)
class Job:
    """What is compared, and where.

    Args:
        inputs, outputs: shapes by name, in terms of the dims.
        tolerance: by output name.
        points: the sizes.
        memory_limit: bytes that a run may take by its estimate.
        padding: dim name to the multiple that the model inside is padded to.
        profiles: each has to be compared somewhere, if memory allows it.
    """

    inputs: Mapping[str, Sequence[Size | str]]
    outputs: Mapping[str, Sequence[Size | str]]
    tolerance: Mapping[str, Tolerance]
    points: Sequence[Point]
    memory_limit: int
    padding: Mapping[str, int] = field(default_factory=dict)
    profiles: Sequence[Profile] = ()

    def symbols(self, point: Point) -> dict[str, int]:
        """The sizes of all names in the ONNX file: the dims, and the dims as padded."""
        padded = {padded_name(n): -(-point.sizes[n] // m) * m for n, m in self.padding.items()}
        return {**point.sizes, **padded}

    def shapes(self, point: Point) -> dict[str, tuple[int, ...]]:
        return {name: shape_at(shape, point.sizes) for name, shape in self.inputs.items()}


@dataclass
class Plan:
    """Which points are run, and why the others are not; made before anything runs."""

    run: list[Point] = field(default_factory=list)
    infos: list[PointInfo] = field(default_factory=list)
    shapes: list[dict[str, tuple[int, ...]]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def plan_points(job: Job, model: Path) -> Plan:
    """Sorts the points into those that fit into memory and those that don't.

    The shapes that ONNX's shape inference finds for the outputs are held against the declared
    ones at every point, also at those too large to run.
    """
    estimator = Estimator(model)
    plan = Plan()
    for point in job.points:
        plan.shapes.append(job.shapes(point))
        estimate = estimator.at(plan.shapes[-1], job.symbols(point))
        wrong = []
        if estimate.failure:
            plan.notes.append(f"{point}: output sizes not checked ahead: {estimate.failure}")
        if estimate.unknown:
            plan.notes.append(
                f"{point}: the memory of {estimate.unknown} tensors of unknown size is not counted"
            )
        for name, shape in job.outputs.items():
            want, got = shape_at(shape, point.sizes), estimate.output_shapes.get(name, ("?",))
            if want != got and all(isinstance(size, int) for size in got):
                wrong.append(failed((TORCH, "shape inference"), name, f"shape {got}, not {want}"))
        fits = estimate.peak_bytes <= job.memory_limit
        need, limit = _readable(estimate.peak_bytes), _readable(job.memory_limit)
        why = "" if fits else f"needs about {need}, the limit is {limit}"
        if fits:
            plan.run.append(point)
        plan.infos.append(
            PointInfo(point.label, dict(point.sizes), fits, why, estimate.peak_bytes, tuple(wrong))
        )
    return plan


def run_torch(
    module: torch.nn.Module, names: Sequence[str], feeds: Sequence[Feed]
) -> Iterator[dict[str, np.ndarray]]:
    """The module's outputs by name, one point after the other, in eval mode without gradients."""
    import torch

    with torch.inference_mode():
        for feed in feeds:
            result = module(*(torch.from_numpy(array) for array in feed.values()))
            flat = result if isinstance(result, (tuple, list)) else (result,)
            if len(flat) != len(names) or not all(isinstance(t, torch.Tensor) for t in flat):
                raise CompareError(
                    f"the model returns {type(result).__name__} where the spec names the outputs "
                    f"{', '.join(names)}: return a tensor, or a tuple of that many tensors"
                )
            arrays = [t.detach().cpu().contiguous().numpy() for t in flat]  # a crop is a view
            yield dict(zip(names, arrays, strict=True))


def run_onnx(model: Path, feeds: Sequence[Feed]) -> Iterator[dict[str, np.ndarray]]:
    """The ONNX model's outputs by name in ONNX Runtime on the CPU, unoptimised."""
    import onnxruntime
    from polygraphy.backend.onnxrt import OnnxrtRunner

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.enable_cpu_mem_arena = False  # memory goes back after each point
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
    with OnnxrtRunner(session, name=model.stem) as runner:
        for feed in feeds:
            yield {name: np.asarray(v) for name, v in runner.infer(dict(feed)).items()}


def run_engine(plan: Path, feeds: Sequence[Feed], profile: int) -> Iterator[dict[str, np.ndarray]]:
    """The engine's outputs by name; Polygraphy is bound to the engine's TensorRT beforehand."""
    from polygraphy.backend.trt import EngineFromBytes, TrtRunner

    engine = EngineFromBytes(plan.read_bytes())
    with TrtRunner(engine, optimization_profile=profile) as runner:
        metadata = runner.get_input_metadata(use_numpy_dtypes=True)
        for feed in feeds:
            # TensorRT up to 9 has no int64: its engines take int32
            cast = {name: v.astype(metadata[name].dtype) for name, v in feed.items()}
            outputs = runner.infer(cast)
            yield {name: np.array(value) for name, value in outputs.items()}


def collect(
    name: str,
    results: Iterator[dict[str, np.ndarray]],
    points: Sequence[Point],
    announce: Announce,
    watch: Stopwatch,
) -> list[dict[str, np.ndarray]]:
    """Runs through `results`, announcing each point before it and timing it under `name`.

    Raises:
        RunFailed: the run failed at a point; names the run and the sizes.
    """
    done = []
    for point in points:
        announce(f"{name} at {point}")
        try:
            with watch(name), collected() as messages:
                done.append(next(results))
        except PipelineError:
            raise
        except Exception as error:  # every library has its own; the point is to name the sizes
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            text = "\n".join([*messages.errors, str(error)])
            hint = _RANGE_HINT if name == TORCH else ""
            message = f"{name} fails at {point}: {first}{hint}"
            raise RunFailed(message, run=name, point=len(done), detail=text) from error
    return done


def judge(
    first: str,
    second: str,
    left: Mapping[str, np.ndarray],
    right: Mapping[str, np.ndarray],
    tolerances: Tolerance | Mapping[str, Tolerance],
) -> list[PairResult]:
    """Compares two runs at one point, output by output; `right` is held against `left`.

    Floating point within the output's tolerance (one for all, or by name); integers and booleans
    have to be equal.
    """
    pair = (first, second)
    results = []
    for name in dict.fromkeys([*left, *right]):
        if name not in left or name not in right:
            results.append(failed(pair, name, f"only {first if name in left else second} has it"))
            continue
        a, b = left[name], right[name]
        tolerance = tolerances if isinstance(tolerances, Tolerance) else tolerances[name]
        if a.shape != b.shape:
            results.append(failed(pair, name, f"shape {b.shape}, not {a.shape}"))
        elif a.dtype != b.dtype and not _narrowed(a.dtype, b.dtype):
            results.append(failed(pair, name, f"dtype {b.dtype}, not {a.dtype}"))
        elif not (np.isfinite(a).all() and np.isfinite(b).all()):
            which = first if not np.isfinite(a).all() else second
            hint = _RANGE_HINT if which == TORCH else ""
            results.append(failed(pair, name, f"{which} has NaN or infinity{hint}"))
        elif a.size and a.dtype.kind == "f" and not (np.abs(a) > tolerance.atol).any():
            results.append(
                failed(pair, name, f"says nothing: all of {first} is below atol={tolerance.atol}")
            )
        elif a.dtype.kind == "f":
            results.append(_numbers(pair, name, a, b, tolerance))
        else:
            results.append(_equal(pair, name, a, b))
    return results


def _equal(pair: tuple[str, str], name: str, a: np.ndarray, b: np.ndarray) -> PairResult:
    apart = int((a != b).sum())
    far = float(np.abs(a.astype(np.float64) - b.astype(np.float64)).max()) if a.size else 0.0
    why = f"{apart} of {a.size} {a.dtype} values differ" if apart else ""
    return PairResult(pair, name, far, None, not apart, why)


def _narrowed(a: np.dtype[Any], b: np.dtype[Any]) -> bool:
    """True for int64 that came back as int32, as TensorRT up to 9 does (values are compared)."""
    return a == np.int64 and b == np.int32


def _numbers(
    pair: tuple[str, str], name: str, a: np.ndarray, b: np.ndarray, tolerance: Tolerance
) -> PairResult:
    from polygraphy.comparator import Comparator, RunResults, SimpleCompareFunc
    from polygraphy.comparator.struct import IterationResult

    runs = RunResults()
    for runner, array in ((pair[1], b), (pair[0], a)):
        whole = np.ascontiguousarray(array).reshape(array.shape)
        runs.append((runner, [IterationResult({name: whole}, runner_name=runner)]))
    func = SimpleCompareFunc(
        rtol=tolerance.rtol, atol=tolerance.atol, check_error_stat="elemwise", check_shapes=True
    )
    # for its report Polygraphy divides by zero, and averages what is empty
    with collected(), np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (accuracy,) = Comparator.compare_accuracy(runs, compare_func=func)
    ((_, [iteration]),) = accuracy.items()
    verdict = iteration[name]
    scale = float(np.abs(a).max()) if a.size else 0.0
    max_abs = float(verdict.max_absdiff) if a.size else 0.0
    passed = bool(verdict)
    why = "" if passed else f"off by up to {max_abs:.3g}; the largest value is {scale:.3g}"
    return PairResult(pair, name, max_abs, max_abs / scale if scale else None, passed, why)


def failed(pair: tuple[str, str], name: str, why: str) -> PairResult:
    """The result of a comparison that could not come to numbers."""
    return PairResult(pair, name, None, None, False, why)


def conclude(
    plan: Plan, runs: Runs, pairs: Sequence[tuple[str, str]], job: Job, notes: Sequence[str] = ()
) -> ComparisonInfo:
    """Judges every pair of runs at every point that was run."""
    infos = []
    index = 0
    for info in plan.infos:
        results = list(info.results)
        if info.compared:
            for first, second in pairs:
                left, right = runs[first][index], runs[second][index]
                if left and right:  # an engine's profile does not cover every point
                    results += judge(first, second, left, right, job.tolerance)
            index += 1
        infos.append(replace(info, results=tuple(results)))
    notes = [*plan.notes, *notes, *_uncompared(infos, job)]
    comparison = ComparisonInfo(job.memory_limit, tuple(infos), True, tuple(notes))
    return replace(comparison, passed=not failures(comparison))


def _uncompared(infos: Sequence[PointInfo], job: Job) -> list[str]:
    """What is missing, one line for each profile of which no size was compared."""
    lines = []
    for profile in job.profiles:
        mine = [info for info in infos if profile.allows(info.sizes)]
        if not any(info.compared for info in mine):
            dear = all(info.estimate_bytes > job.memory_limit for info in mine)
            what = "all need more memory than the limit" if dear else _MISSING
            lines.append(f"profile {profile.name}: none of its sizes was compared: {what}")
    return lines


def failures(comparison: ComparisonInfo) -> list[str]:
    """What failed, one line each."""
    lines = [
        f"{result.output} of {result.pair[1]} against {result.pair[0]} at {info.label} "
        f"({','.join(f'{k}={v}' for k, v in info.sizes.items())}): {result.why}"
        for info in comparison.points
        for result in info.results
        if not result.passed
    ]
    if not any(info.compared for info in comparison.points):
        lines.append("nothing was compared: every point is over the memory limit")
    lines += [note for note in comparison.notes if note.endswith(_MISSING)]
    return lines


def profile_of(point: Point, profiles: Sequence[Profile]) -> int | None:
    """The first profile that allows the point's sizes; None if none does."""
    return next((n for n, p in enumerate(profiles) if p.allows(point.sizes)), None)


def _readable(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 / 10 else f"{size / 2**20:.1f} MiB"
