"""The regression check: finds what got worse from one artifact to another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from shlex import quote
from typing import cast

import numpy as np

from pipeline.artifact.artifact import Artifact
from pipeline.artifact.manifest import Manifest
from pipeline.artifact.stored import StoredRuns, stored_runs
from pipeline.compare import run_names
from pipeline.compare import runners as compare
from pipeline.compare.engine_runs import WithinMemory, opened, why_not_run
from pipeline.compare.half_runner import HalfRunner
from pipeline.compare.run_names import is_engine
from pipeline.compare.verdict import judge
from pipeline.errors import ArtifactError, InputError
from pipeline.graph.session import OnnxRunner
from pipeline.machine.progress import Announce
from pipeline.machine.resources import Stopwatch
from pipeline.machine.target import bind_polygraphy, find_target
from pipeline.spec.closeness import apart
from pipeline.spec.dims import shape_texts, solve_sizes
from pipeline.spec.file_names import HALF, MODEL
from pipeline.spec.findings import Facts, Note, NoteKind, note
from pipeline.spec.precision import ROUNDED
from pipeline.spec.profiles import Point
from pipeline.spec.tensors import Feed, Input, Output, Precision, Tolerance
from pipeline.spec.verdicts import Verdict

# An error within the tolerance is worse if it is above this share of the tolerance, and this many
# times the old error. Rounding in another order stays below these limits.
_PART, _TIMES = 0.25, 4.0


@dataclass(frozen=True)
class Regression:
    """The result of the check.

    Args:
        worse: What got worse; empty if nothing did.
        notes: What was not compared; and what was compared if nothing got worse.
    """

    worse: Sequence[Note]
    notes: Sequence[Note] = ()


@dataclass
class _EngineFound:
    """What got worse in the new engine, and the number of old points at which it ran."""

    worse: list[Note] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    ran: int = 0
    why: str = ""


@dataclass(frozen=True)
class _Old:
    """A stored point of the old artifact whose inputs the new model accepts."""

    point: Point
    stored: StoredRuns


def regression(
    artifact: Artifact,
    old: Artifact,
    announce: Announce,
    plugins: Sequence[str] = (),
    host_code: bool = False,
) -> Regression:
    """Finds what got worse from `old` to `artifact`.

    The new model, half.onnx (in fp16 and bf16) and the new engine (if it runs here) run on the old
    stored inputs that the new model accepts. The new outputs are compared with the stored ones. The
    error of each run against the old reference is compared with the old error. All comparisons use
    the old tolerance. Inputs, outputs, dims, profiles and tolerances are compared too.

    Args:
        artifact: The new artifact.
        old: The old artifact.
        announce: Called with each step that begins.
        plugins, host_code: The code that the new engine may run; see `pipeline.load`.

    Raises:
        ArtifactError: The old artifact stores no outputs.
    """
    new, before = artifact.manifest, old.manifest
    worse = _declarations(new, before)
    if any(one.kind == "input-changed" for one in worse):
        return Regression(worse)  # the old inputs do not fit
    usable, refused = _usable(new, old)
    worse += [note("input-refused", reason=text) for text in refused]
    bind_polygraphy(find_target(new.target.name))
    model = artifact.model if MODEL in new.files else artifact.exported
    feeds, points = [each.stored.feed for each in usable], [each.point for each in usable]
    runner = OnnxRunner(model, "new model")
    outputs = compare.collect(runner, feeds, points, announce, Stopwatch())
    last = _last_run(old)
    for each, output in zip(usable, outputs, strict=True):
        verdicts = judge("old", "new", each.stored.outputs[last], output, before.tolerances())
        # inconclusive: within the tolerance, and the old comparison passed at other sizes
        bad = [v for v in verdicts if not v.passed and v.kind != "inconclusive"]
        wrong = [_differs(verdict, each.point) for verdict in bad]
        worse += wrong or _worse(last, before, each, output, [last], before.tolerances())
    worse += _half(artifact, before, usable, announce)
    engine = _engine(artifact, before, usable, announce, plugins, host_code)
    worse += engine.worse
    if worse:
        return Regression(worse, engine.notes)
    facts: Facts = {"path": str(old.path), "count": len(usable)}
    if engine.ran:
        return Regression([], [*engine.notes, Note("no-regression", facts)])
    reason = engine.why or "the engine ran at no stored size"
    without = Note("no-regression-without-engine", {**facts, "reason": reason})
    return Regression([], [*engine.notes, without])


def _differs(verdict: Verdict, point: Point) -> Note:
    """Returns the note for a failed verdict."""
    return note(
        "output-differs",
        output=verdict.output,
        label=point.label,
        sizes=dict(point.sizes),
        verdict=verdict.kind,
        max_abs=verdict.max_abs,
        reason=verdict.text,
    )


def _usable(new: Manifest, old: Artifact) -> tuple[list[_Old], list[str]]:
    """Returns the old points that the new model accepts, and the reasons of the refused ones."""
    shapes = new.interface.input_shapes
    usable, refused = [], []
    for stored in stored_runs(old.path):
        if _last_run(old) not in stored.outputs:
            continue  # only torch's outputs: this size was too large there
        try:
            sizes = solve_sizes(shapes, {k: v.shape for k, v in stored.feed.items()})
        except InputError as error:
            refused.append(str(error))
        else:
            usable.append(_Old(Point("stored", sizes), stored))
    if not usable and not refused:
        raise ArtifactError(
            f"{old.path} stores no outputs. Run `pipeline verify {quote(str(old.path))}` first"
        )
    return usable, refused


def _half(
    artifact: Artifact, before: Manifest, usable: Sequence[_Old], announce: Announce
) -> Iterator[Note]:
    """Yields what got worse in half.onnx, if both artifacts have the same half precision."""
    precision = artifact.manifest.precision
    if HALF not in artifact.manifest.files or before.precision != precision:
        return
    feeds, points = [each.stored.feed for each in usable], [each.point for each in usable]
    runner = HalfRunner(artifact.path / HALF, cast(Precision, precision), name="new half")
    outputs = compare.collect(runner, feeds, points, announce, Stopwatch())
    tolerance = before.engine_tolerances()
    for each, output in zip(usable, outputs, strict=True):
        runs = [name for name in each.stored.outputs if name == run_names.HALF]
        yield from _worse(run_names.HALF, before, each, output, runs, tolerance)


def _engine(
    artifact: Artifact,
    before: Manifest,
    usable: Sequence[_Old],
    announce: Announce,
    plugins: Sequence[str],
    host_code: bool,
) -> _EngineFound:
    """Returns what got worse in the new engine; empty if the engine cannot run here."""
    new = artifact.manifest
    target = find_target(new.target.name)
    found = _EngineFound(why=why_not_run(artifact.path, target, new))
    if found.why:
        return found
    tolerance = before.engine_tolerances()
    with opened(artifact.path, new, plugins, host_code) as engine:
        for number, profile in enumerate(engine.profiles):
            plain = engine.runner(number)
            mine = [each for each in usable if profile.allows(each.point.sizes)]
            points = [each.point for each in mine]
            runner = WithinMemory(plain, points, found.notes, f"new {plain.name}")
            feeds = [each.stored.feed for each in mine]
            outputs = compare.collect(runner, feeds, points, announce, Stopwatch())
            for each, output in zip(mine, outputs, strict=True):
                if not output:  # too little GPU memory, which is noted
                    continue
                found.ran += 1
                runs = [name for name in each.stored.outputs if is_engine(name)]
                found.worse += _worse(plain.name, before, each, output, runs, tolerance)
    return found


def _worse(
    run: str,
    before: Manifest,
    each: _Old,
    output: Feed,
    runs: Sequence[str],
    tolerance: Mapping[str, Tolerance],
) -> Iterator[Note]:
    """Yields outputs whose error against the old reference is above the tolerance, or grew.

    Args:
        run: The new run's name.
        before: The old manifest.
        each: The old point.
        output: The outputs of the new run.
        runs: The stored runs of the old artifact to compare with; the worst of them counts.
        tolerance: The old tolerance by output name.
    """
    reference = each.stored.outputs.get(before.reference)
    if reference is None or before.reference in runs:
        return
    for name, want in reference.items():
        far, part = _error(want, output.get(name), tolerance[name])
        old = [_error(want, each.stored.outputs[r].get(name), tolerance[name]) for r in runs]
        far_before, part_before = max(old, default=(0.0, 0.0))
        facts: Facts = {
            "output": name,
            "run": run,
            "label": each.point.label,
            "sizes": dict(each.point.sizes),
            "reference": before.reference,
            "error": float(far),
            "before": float(far_before) if old else None,
        }
        if part > 1:
            yield Note("error-too-large", facts)
        elif old and part > _PART and part > _TIMES * part_before:
            yield Note("error-grew", {**facts, "part_share": part})


def _error(want: np.ndarray, got: np.ndarray | None, tolerance: Tolerance) -> tuple[float, float]:
    """Returns the largest difference, and the largest share of the allowed difference."""
    far, within = apart(want, got, tolerance)
    if got is None or not np.isfinite(far) or want.dtype.kind != "f":
        return far, 0.0 if within else float("inf")
    a, b = want.astype(np.float64), got.astype(np.float64)
    same = (a == b) | (np.isnan(a) & np.isnan(b))  # also infinities, whose difference is NaN
    with np.errstate(divide="ignore", invalid="ignore"):
        allowed = np.maximum(tolerance.atol_at(a.shape), tolerance.rtol * np.abs(a))
        parts = np.where(same, 0.0, np.abs(a - b) / allowed)
    return far, float(parts.max(initial=0.0))


def _last_run(artifact: Artifact) -> str:
    """Returns the stored run that stands for an artifact: rewritten if any, else exported."""
    return run_names.REWRITTEN if MODEL in artifact.manifest.files else run_names.EXPORTED


def _declarations(new: Manifest, old: Manifest) -> list[Note]:
    declared, before = new.interface, old.interface
    notes = _changed("input-changed", declared.inputs, before.inputs)
    notes += _changed("output-changed", declared.outputs, before.outputs)
    now_dims = declared.dims
    for name, dim in before.dims.items():
        if name not in now_dims:
            notes.append(note("dim-removed", name=name))
        elif (
            (mine_ := now_dims[name]).min > dim.min
            or mine_.max < dim.max
            or (dim.multiple_of % mine_.multiple_of)
            or (dim.offset - mine_.offset) % mine_.multiple_of
        ):
            notes.append(note("dim-narrowed", name=name, was=str(dim), now=str(mine_)))
    now_profiles = declared.profiles
    for profile in before.profiles:
        for which, word in enumerate(("min", "opt", "max")):
            sizes = profile.sizes(which)
            if sizes.keys() == now_dims.keys() and not any(p.allows(sizes) for p in now_profiles):
                facts: Facts = {"profile": profile.name, "which": word, "sizes": dict(sizes)}
                notes.append(Note("profile-narrowed", facts))
    notes += _coverage(new, old)
    notes += [note("rule-added", rule=r) for r in declared.rules if r not in before.rules]
    return notes + _widened(new, old)


def _changed(
    kind: NoteKind, now: Sequence[Input | Output], before: Sequence[Input | Output]
) -> list[Note]:
    """Returns tensors that are missing, or have another type or shape."""
    mine = {tensor.name: _declared(tensor) for tensor in now}
    return [
        note(kind, name=tensor.name, was=was, now=mine.get(tensor.name, "missing"))
        for tensor in before
        if mine.get(tensor.name) != (was := _declared(tensor))
    ]


def _declared(tensor: Input | Output) -> str:
    return f"{tensor.dtype} [{', '.join(map(str, shape_texts(tensor.shape or ())))}]"


def _widened(new: Manifest, old: Manifest) -> list[Note]:
    """Returns tolerances that became wider."""
    pairs: list[tuple[NoteKind, Mapping[str, Tolerance], Mapping[str, Tolerance]]] = []
    pairs.append(("tolerance-widened", new.tolerances(), old.tolerances()))
    stated = old.interface.engine_tolerance or new.interface.engine_tolerance
    # before it was measured, an engine had the tolerance of fp32
    plain = old.precision in ROUNDED and not (old.comparison and old.comparison.engine_tolerances)
    if old.precision == new.precision and (stated or plain):
        engines = new.engine_tolerances(), old.engine_tolerances()
        pairs.append(("engine-tolerance-widened", *engines))
    return [
        note(kind, output=name, was=_limits(b), now=_limits(a))
        for kind, now, before in pairs
        for name, b in before.items()
        if (a := now.get(name, b)).is_wider_than(b)
    ]


def _limits(tolerance: Tolerance) -> str:
    differing = f", differing {tolerance.differing:g}" if tolerance.differing else ""
    parts = f", of parts from {min(tolerance.parts):g}" if tolerance.parts else ""
    return f"rtol {tolerance.rtol:g}, atol {tolerance.atol:g}{parts}{differing}"


def _coverage(new: Manifest, old: Manifest) -> list[Note]:
    """Returns what was built with another precision, or is no longer compared."""
    notes = []
    if old.precision != new.precision:
        notes.append(note("precision-changed", was=old.precision, now=new.precision))
    done = [p.sizes for p in new.comparison.points if p.compared] if new.comparison else []
    for point in old.comparison.points if old.comparison else ():
        if point.compared and point.sizes not in done:
            notes.append(note("size-not-compared", sizes=dict(point.sizes)))
    if old.engine_compared and not new.engine_compared:
        notes.append(note("engine-not-compared", reason=new.engine_compared_why))
    return notes
