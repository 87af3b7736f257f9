"""The regression check: what got worse from one artifact to another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from pipeline.artifact.artifact import Artifact
from pipeline.artifact.manifest import Manifest
from pipeline.artifact.stored import StoredRuns, stored_runs
from pipeline.compare import run_names
from pipeline.compare import runners as compare
from pipeline.compare.engine_runs import opened, why_not_run, within_memory
from pipeline.compare.run_names import is_engine
from pipeline.compare.runners import Announce
from pipeline.compare.verdict import judge
from pipeline.errors import ArtifactError, InputError
from pipeline.graph.session import run_onnx
from pipeline.machine.resources import Stopwatch
from pipeline.machine.target import bind_polygraphy, find_target
from pipeline.spec.closeness import apart
from pipeline.spec.dims import shape_texts, solve_sizes
from pipeline.spec.file_names import HALF, MODEL
from pipeline.spec.profiles import Point
from pipeline.spec.tensors import Feed, Input, Output, Tolerance

# An error that is still within the tolerance is worse than the old one where it takes this part of
# the tolerance, and is so many times the old one: rounding in another order stays below it
_PART, _TIMES = 0.25, 4.0


@dataclass(frozen=True)
class Regression:
    """What came of the check, one line each.

    Args:
        worse: what got worse; nothing means nothing.
        notes: what was not compared; and if nothing got worse, what was.
    """

    worse: Sequence[str]
    notes: Sequence[str] = ()


@dataclass
class _EngineFound:
    """What the new engine does worse, and at how many of the old points it ran."""

    worse: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    ran: int = 0
    why: str = ""


@dataclass(frozen=True)
class _Old:
    """A stored point of the old artifact whose inputs the new one takes."""

    point: Point
    stored: StoredRuns


def regression(
    artifact: Artifact, old: Artifact, announce: Announce, plugins: Sequence[str] = ()
) -> Regression:
    """What got worse from `old` to `artifact`.

    The new model, its half.onnx in fp16, and the new engine where one runs here, run on the old
    one's stored inputs, wherever they are still taken. The model's outputs are held against the
    old model's stored ones, and the errors of all against the errors that the old ones had, of
    what the old ones were held against; all within the old tolerance. Inputs and outputs, the
    dims' ranges, the profiles and the tolerances are compared as well.

    Args:
        plugins: files that the new engine may load; see `pipeline.load`.
    """
    new, before = artifact.manifest, old.manifest
    lines = _declarations(new, before)
    if any(line.startswith("inputs:") for line in lines):
        return Regression(lines)  # nothing to feed
    usable, refused = _usable(new, old)
    lines += [f"an input of the old artifact is refused: {text}" for text in refused]
    bind_polygraphy(find_target(new.target.name))
    model = artifact.model if MODEL in new.files else artifact.exported
    results = run_onnx(model, [each.stored.feed for each in usable])
    points = [each.point for each in usable]
    outputs = compare.collect("new model", results, points, announce, Stopwatch())
    last = _last_run(old)
    for each, output in zip(usable, outputs, strict=True):
        wrong = judge("old", "new", each.stored.outputs[last], output, before.tolerances())
        lines += [f"{r.output} at {each.point}: {r.why}" for r in wrong if not r.passed]
        if not any(not r.passed for r in wrong):
            lines += _worse("the model", before, each, output, [last], before.tolerances())
    lines += _half(artifact, before, usable, announce)
    engine = _engine(artifact, before, usable, announce, plugins)
    lines += engine.worse
    if lines:
        return Regression(lines, engine.notes)
    count = "1 size" if len(usable) == 1 else f"{len(usable)} sizes"
    ran = f"engine {'compared' if engine.ran else 'not compared'}{engine.why and f': {engine.why}'}"
    return Regression(
        [], [*engine.notes, f"no regression against {old.path}: {count} compared, {ran}"]
    )


def _usable(new: Manifest, old: Artifact) -> tuple[list[_Old], list[str]]:
    """The old artifact's points that the new one takes, and why it does not take the others."""
    shapes = new.interface.input_shapes
    usable, refused = [], []
    for stored in stored_runs(old.path):
        if _last_run(old) not in stored.outputs:
            continue  # torch's outputs alone, of a size that was too large there
        try:
            sizes = solve_sizes(shapes, {k: v.shape for k, v in stored.feed.items()})
        except InputError as error:
            refused.append(str(error))
        else:
            usable.append(_Old(Point("stored", sizes), stored))
    if not usable and not refused:
        raise ArtifactError(f"{old.path}: no outputs are stored to compare with; verify it first")
    return usable, refused


def _half(
    artifact: Artifact, before: Manifest, usable: Sequence[_Old], announce: Announce
) -> Iterator[str]:
    """What the new half.onnx does worse, where both are fp16."""
    if HALF not in artifact.manifest.files or before.precision != "fp16":
        return
    feeds, points = [each.stored.feed for each in usable], [each.point for each in usable]
    results = compare.run_half(artifact.path / HALF, feeds, plain=False)
    outputs = compare.collect("new half", results, points, announce, Stopwatch())
    tolerance = before.engine_tolerances()
    for each, output in zip(usable, outputs, strict=True):
        runs = [name for name in each.stored.outputs if name == run_names.HALF]
        yield from _worse(HALF, before, each, output, runs, tolerance)


def _engine(
    artifact: Artifact,
    before: Manifest,
    usable: Sequence[_Old],
    announce: Announce,
    plugins: Sequence[str],
) -> _EngineFound:
    """What the new engine does worse; nothing where it does not run here, or not within memory."""
    new = artifact.manifest
    target = find_target(new.target.name)
    found = _EngineFound(why=why_not_run(artifact.path, target, new))
    if found.why:
        return found
    tolerance = before.engine_tolerances()
    with opened(artifact.path, new, plugins) as engine:
        for number, profile in enumerate(engine.profiles):
            subject = engine.subject(number)
            mine = [each for each in usable if profile.allows(each.point.sizes)]
            points = [each.point for each in mine]
            name = f"new {subject.name}"
            run = within_memory(name, subject.run, found.notes)
            results = map(run, [each.stored.feed for each in mine], points)
            outputs = compare.collect(name, results, points, announce, Stopwatch())
            for each, output in zip(mine, outputs, strict=True):
                if not output:  # no room for it here; noted
                    continue
                found.ran += 1
                runs = [name for name in each.stored.outputs if is_engine(name)]
                what = f"the {subject.name}"
                found.worse += _worse(what, before, each, output, runs, tolerance)
    return found


def _worse(
    what: str,
    before: Manifest,
    each: _Old,
    output: Feed,
    runs: Sequence[str],
    tolerance: Mapping[str, Tolerance],
) -> Iterator[str]:
    """Outputs whose error, of what the old artifact was held against, is beyond the tolerance, or
    has grown.

    Args:
        what: was run.
        output: what it gave.
        runs: the old artifact's stored runs of the same; the worst of them counts.
    """
    reference = each.stored.outputs.get(before.reference)
    if reference is None or before.reference in runs:
        return
    for name, want in reference.items():
        far, part = _error(want, output.get(name), tolerance[name])
        old = [_error(want, each.stored.outputs[run].get(name), tolerance[name]) for run in runs]
        far_before, part_before = max(old, default=(0.0, 0.0))
        was = f", the old one by {far_before:.3g}" if old else ""
        where = f"{name} of {what} at {each.point}"
        if part > 1:
            yield f"{where}: off {before.reference} by up to {far:.3g}{was}"
        elif old and part > _PART and part > _TIMES * part_before:
            yield (
                f"{where}: its error grew from {far_before:.3g} to {far:.3g}, "
                f"{part:.0%} of the tolerance"
            )


def _error(want: np.ndarray, got: np.ndarray | None, tolerance: Tolerance) -> tuple[float, float]:
    """The largest difference, and the largest as a part of what the tolerance allows there."""
    far, within = apart(want, got, tolerance)
    if got is None or not np.isfinite(far) or want.dtype.kind != "f":
        return far, 0.0 if within else float("inf")
    a, b = want.astype(np.float64), got.astype(np.float64)
    same = (a == b) | (np.isnan(a) & np.isnan(b))  # infinities, too: their difference is NaN
    with np.errstate(divide="ignore", invalid="ignore"):
        allowed = np.maximum(tolerance.atol, tolerance.rtol * np.abs(a))
        parts = np.where(same, 0.0, np.abs(a - b) / allowed)
    return far, float(parts.max(initial=0.0))


def _last_run(artifact: Artifact) -> str:
    """The stored run that speaks for an artifact: its rewritten model's, else the exported's."""
    return run_names.REWRITTEN if MODEL in artifact.manifest.files else run_names.EXPORTED


def _declarations(new: Manifest, old: Manifest) -> list[str]:
    lines = []
    declared, before = new.interface, old.interface
    for what, tensors, others in (
        ("inputs", declared.inputs, before.inputs),
        ("outputs", declared.outputs, before.outputs),
    ):
        mine, theirs = _types(tensors), _types(others)
        for name, was in theirs.items():
            if mine.get(name) != was:
                lines.append(f"{what}: {name} was {was}, is {mine.get(name)}")
    now_dims = declared.dims
    for name, dim in before.dims.items():
        if name not in now_dims:
            lines.append(f"dim {name} is gone")
        elif (
            (mine_ := now_dims[name]).min > dim.min
            or mine_.max < dim.max
            or (dim.multiple_of % mine_.multiple_of)
            or (dim.offset - mine_.offset) % mine_.multiple_of
        ):
            lines.append(f"dim narrowed: {dim} is now {mine_}")
    now_profiles = declared.profiles
    for profile in before.profiles:
        for which, word in enumerate(("min", "opt", "max")):
            sizes = profile.sizes(which)
            at = ",".join(f"{k}={v}" for k, v in sizes.items())
            if sizes.keys() == now_dims.keys() and not any(p.allows(sizes) for p in now_profiles):
                lines.append(f"profile {profile.name}: no profile allows its {word} {at} any more")
    lines += _coverage(new, old)
    lines += [f"rule added: {rule}" for rule in declared.rules if rule not in before.rules]
    return lines + _widened(new, old)


def _types(tensors: Sequence[Input | Output]) -> dict[str, tuple[str | None, object]]:
    """Dtype and shape by name."""
    return {t.name: (t.dtype, shape_texts(t.shape or ())) for t in tensors}


def _widened(new: Manifest, old: Manifest) -> list[str]:
    """Tolerances that are wider than they were."""
    pairs = [("", new.tolerances(), old.tolerances())]
    stated = old.interface.engine_tolerance or new.interface.engine_tolerance
    if old.precision == new.precision and stated:
        pairs.append((" of the engine", new.engine_tolerances(), old.engine_tolerances()))
    return [
        f"tolerance of {name}{whose} widened: rtol {b.rtol} to {a.rtol}, atol {b.atol} to {a.atol}"
        + (f", differing {b.differing} to {a.differing}" if a.differing > b.differing else "")
        for whose, now, before in pairs
        for name, b in before.items()
        if (a := now.get(name, b)).rtol > b.rtol or a.atol > b.atol or a.differing > b.differing
    ]


def _coverage(new: Manifest, old: Manifest) -> list[str]:
    """What was built or compared otherwise, or less."""
    lines = []
    if old.precision != new.precision:
        lines.append(f"precision was {old.precision}, is {new.precision}")
    done = [p.sizes for p in new.comparison.points if p.compared] if new.comparison else []
    for point in old.comparison.points if old.comparison else ():
        if point.compared and point.sizes not in done:
            at = ",".join(f"{k}={v}" for k, v in point.sizes.items())
            lines.append(f"{at} was compared, is not any more")
    if old.engine_compared and not new.engine_compared:
        lines.append(f"the engine was compared, is not any more: {new.engine_compared_why}")
    return lines
