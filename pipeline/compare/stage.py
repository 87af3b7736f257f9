"""The comparison as a stage: compares the models and the engine of an artifact."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.artifact.manifest import ComparisonInfo, Manifest
from pipeline.artifact.reproduce import StoredRun, reproduce_script
from pipeline.artifact.stored import StoredPoint, copy_run, store_run, stored_feeds, stored_points
from pipeline.artifact.values import filled
from pipeline.compare import explain, run_names
from pipeline.compare import runners as compare
from pipeline.compare.engine_runs import engine_name, opened, run_engine, why_not_run
from pipeline.compare.input_notes import equal_rows, input_notes
from pipeline.compare.model_runs import ModelRuns
from pipeline.compare.plan import CompareOptions, ComparisonPlan, Job, job_of, plan_points
from pipeline.compare.rows import (
    Batch,
    Part,
    cheap_sizes,
    check_models,
    find_batch,
    why_no_rows,
)
from pipeline.compare.runners import Ground, Runs, module_of, profile_of
from pipeline.compare.shape_oracle import check_sizes
from pipeline.errors import ArtifactError, InputError
from pipeline.graph.session import OnnxRunner
from pipeline.machine.files import fresh, hash_file
from pipeline.machine.gpu import Gpu, find_gpu
from pipeline.machine.libraries import versions
from pipeline.machine.progress import Announce
from pipeline.machine.resources import Stopwatch
from pipeline.machine.target import bind_polygraphy, find_target
from pipeline.spec.file_names import (
    COMPARISON,
    EXPORTED,
    LATER,
    MODEL,
    OUTSIDE,
    PLAN,
    REPRODUCE,
)
from pipeline.spec.findings import Facts, Note, note
from pipeline.spec.profiles import Point, Profile, points
from pipeline.spec.runner import Runner
from pipeline.spec.tensors import Feed
from pipeline.spec.verdicts import Check

_NEEDS = {  # what computes other outputs than the stored ones
    run_names.TORCH: "torch model. Pass --torch too",
    run_names.REFERENCE: "reference file. Convert again with these sizes (--shape)",
}


@dataclass(frozen=True)
class Compared:
    """The result of a comparison.

    Args:
        info: The verdicts at all sizes, the checks and the notes.
        ran_at: Dim name to the sizes that ran.
        engine_missing: Why the engine was not compared; empty if it was.
        gpu: The name of the GPU that ran the engine; empty if none did.
        versions: The versions of the libraries that ran the ONNX files and compared.
        library_seconds: Seconds by the name of the run or step.
    """

    info: ComparisonInfo
    ran_at: Mapping[str, tuple[int, ...]]
    engine_missing: str
    gpu: str
    versions: Mapping[str, str]
    library_seconds: Mapping[str, float]


def compare_artifact(
    folder: Path,
    manifest: Manifest,
    reference: Runner | None,
    options: CompareOptions,
    announce: Announce,
    place: Path | None = None,
) -> Compared:
    """Compares torch, exported.onnx, model.onnx, half.onnx, and the engine if a GPU runs it.

    Args:
        folder: The artifact's folder; it gets the inputs and outputs.
        manifest: The artifact's manifest.
        reference: Runs the torch module with its padding, or the reference file. None uses the
            stored outputs of either, at all stored sizes, or exported.onnx if that is the source.
        options: The sizes, the memory limit and the seed.
        announce: Called with each step that begins.
        place: The path for error messages, if `folder` is a copy.

    Raises:
        ArtifactError: There is no exported.onnx, or no stored output to compare with.
        InputError: Further sizes are given without the reference.
        CompareError: A run failed. Runs that differ raise no error; the result has the failures.
    """
    if not (folder / EXPORTED).is_file():
        raise ArtifactError("the artifact has no exported.onnx. Run `pipeline export` first")
    base = manifest.reference
    own = base == run_names.EXPORTED
    only_stored = reference is None and not own
    if only_stored and options.shapes:
        raise InputError(f"other sizes than the stored ones need the {_NEEDS[base]}")
    manifest = filled(manifest, folder)
    target = find_target(manifest.target.name)
    bind_polygraphy(target)
    stored = stored_points(folder, base, place) if only_stored else []
    # for an ONNX source, only the sizes count: the values are made again
    again = stored_feeds(folder) if own else [point.feed for point in stored]
    job = job_of(manifest, options, again)
    plan = plan_points(job, folder / EXPORTED)
    watch = Stopwatch()
    if (folder / MODEL).is_file():
        announce("compare sizes with TensorRT's shape inference")
        with watch("tensorrt parse"):
            plan.notes += check_sizes(folder / MODEL, target, job, plan, options.memory)
    runs: Runs = {}
    feeds: list[Feed]
    later: list[StoredPoint] = []
    if only_stored:
        plan, feeds, runs[base], later = _stored(stored, plan, base)
    else:
        feeds = [manifest.interface.sample(point.sizes, options.seed) for point in plan.run]
    ground = Ground(plan.run, feeds, announce, watch)
    models = ModelRuns(folder, manifest, reference, options.seed, options.memory)
    pairs, notes = models.run(ground, runs)
    job, found = models.measure(job, plan, ground, runs, _quick(job, options, plan))
    notes += [*input_notes(manifest.interface), *found]
    with watch("batch rows"):
        batch, checks, forgiven, unasked = _rows_of_models(
            folder, manifest, plan, job, reference, options.seed
        )
    engine_why = why_not_run(folder, target, manifest)
    if not engine_why:
        with opened(folder, manifest, options.plugins, options.host_code) as engine:
            ran = run_engine(engine, ground, job, batch, forgiven)
        runs.update(ran.runs)
        checks, notes = [*checks, *ran.checks], [*notes, *ran.notes]
        references = dict.fromkeys([run_names.REWRITTEN, base])
        pairs += [(reference, name) for name in ran.runs for reference in references]
        engine_why = ran.missing
    with watch("polygraphy compare"):
        info = compare.conclude(plan, runs, pairs, job, [*unasked, *notes])
    if not info.passed:
        info = explain.disagreement(info, folder, manifest, module_of(reference), feeds, announce)
    with watch("polygraphy store"):
        left = _store(folder, manifest, job, plan.run, feeds, runs, later)
    info = replace(
        info, checks=(*checks, *models.check_edges(job, ground)), notes=(*info.notes, *left)
    )
    return Compared(
        info,
        _ran_at(manifest, plan.run),
        engine_why,
        "" if engine_why else _gpu_name(),
        versions(
            ("onnxruntime", "polygraphy", "numpy")
        ),  # this machine may not be the one of the export
        dict(watch.seconds),
    )


def _quick(job: Job, options: CompareOptions, plan: ComparisonPlan) -> list[Note]:
    """Returns a note if only few sizes are compared: the options say so, or a quick comparison
    stored the reference's outputs. Then those of the few sizes are stored, and others are not."""
    own = job.interface
    few = points(own.dims, own.profiles, rules=own.rules, few=True)
    missing = [i.sizes for i in plan.infos if i.left_out and i.left_out.kind == "not-stored"]
    stored = bool(missing) and not any(point.sizes in missing for point in few)
    return [note("quick")] if options.quick or stored else []


def _rows_of_models(
    folder: Path,
    manifest: Manifest,
    plan: ComparisonPlan,
    job: Job,
    reference: Runner | None,
    seed: int,
) -> tuple[Batch | None, list[Check], frozenset[Part], list[Note]]:
    """Checks the rows of the ONNX files at the sizes with the least memory.

    Returns:
        The batch, if there is one; the checks; how rows depend on each other in the model; and a
        note if there are no checks.
    """
    batch = find_batch(manifest.interface)
    found = batch and cheap_sizes(batch, plan.infos, job.memory_limit)
    if not batch or not found:
        return batch, [], frozenset(), [why_no_rows(batch, plan.infos)]
    exported, model = folder / EXPORTED, folder / MODEL
    models = [OnnxRunner(exported, run_names.EXPORTED)]
    if model.is_file() and hash_file(model) != hash_file(exported):
        models.append(OnnxRunner(model, run_names.REWRITTEN))
    checks, forgiven = check_models(batch, found, models, reference, manifest.tolerances(), seed)
    return batch, checks, forgiven, equal_rows(batch, found, seed)


def _groups(
    profiles: Sequence[Profile], run: Sequence[Point]
) -> Iterator[tuple[str, int | None, list[int]]]:
    """Yields (folder name, profile number, point indices) for each profile with points."""
    numbers = [profile_of(point, profiles) for point in run]
    for number in [*range(len(profiles)), None]:
        mine = [n for n, own in enumerate(numbers) if own == number]
        if mine:
            yield (OUTSIDE if number is None else profiles[number].name), number, mine


def _store(
    folder: Path,
    manifest: Manifest,
    job: Job,
    run: Sequence[Point],
    feeds: Sequence[Feed],
    runs: Runs,
    later: Sequence[StoredPoint],
) -> list[Note]:
    """Stores inputs and outputs in Polygraphy's format, and the script that compares them again.

    Removes what was stored before. A run of a profile is not stored if some outputs are missing,
    because Polygraphy needs outputs for all inputs of a file.

    Returns:
        A note for every run that was not stored.
    """
    notes: list[Note] = []
    shutil.rmtree(folder / COMPARISON, ignore_errors=True)
    if later:
        waiting = [point.outputs for point in later]
        place = folder / COMPARISON / LATER
        store_run(place, [point.feed for point in later], manifest.reference, waiting)
    stored = []
    profiles = manifest.interface.profiles
    for name, number, mine in _groups(profiles, run):
        for runner, outputs in runs.items():
            missing = sum(not outputs[n] for n in mine)
            if missing:  # the engine's profile lacks these sizes, or too little memory
                if number is not None and runner == engine_name(profiles, number):
                    facts: Facts = {"run": runner, "profile": name}
                    counts: Facts = {"count": missing, "of": len(mine)}
                    notes.append(Note("outputs-not-stored", {**facts, **counts}))
                continue
            place = folder / COMPARISON / name
            if runner == run_names.REWRITTEN and outputs is runs[run_names.EXPORTED]:
                copy_run(place / f"{run_names.EXPORTED}.json", place / f"{runner}.json")
                continue
            store_run(place, [feeds[n] for n in mine], runner, [outputs[n] for n in mine])
        base = f"{COMPARISON}/{name}"
        stored.append(StoredRun(f"{base}/inputs.json", f"{base}/{manifest.reference}.json", number))
    text = reproduce_script(
        stored,
        manifest.tolerances(),
        flavour=manifest.target.flavour,
        models=[name for name in (EXPORTED, MODEL) if (folder / name).is_file()],
        plan=PLAN if (folder / PLAN).is_file() else None,
        engine_tolerances=job.tolerances(run_names.ENGINE),
    )
    script = fresh(folder / REPRODUCE)
    script.write_text(text, encoding="utf-8", newline="\n")  # a shell script, also on Windows
    script.chmod(0o755)
    return notes


def _stored(
    stored: Sequence[StoredPoint], plan: ComparisonPlan, base: str
) -> tuple[ComparisonPlan, list[Feed], list[Feed], list[StoredPoint]]:
    """Reduces the plan to the points with stored outputs of the reference `base`.

    Returns:
        The plan; the stored inputs and outputs of its points; and the stored points that do not fit
        into memory here.
    """
    found = {_shapes(point.feed): point for point in stored}
    new = ComparisonPlan(notes=plan.notes)
    feeds: list[Feed] = []
    outputs: list[Feed] = []
    later: list[StoredPoint] = []
    for info, shapes in zip(plan.infos, plan.shapes, strict=True):
        point = found.get(tuple(sorted(shapes.items())))
        left_out = info.left_out
        if point is not None and left_out is not None:
            later.append(point)
        elif point is not None:
            new.run.append(Point(info.label, info.sizes))
            feeds.append(point.feed)
            outputs.append(point.outputs)
        elif left_out is None:
            left_out = note("not-stored", run=base)
        new.infos.append(replace(info, left_out=left_out))
        new.shapes.append(shapes)
    return new, feeds, outputs, later


def _shapes(feed: Feed) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple(sorted((name, array.shape) for name, array in feed.items()))


def _ran_at(manifest: Manifest, run: Sequence[Point]) -> dict[str, tuple[int, ...]]:
    """Returns dim name to the sizes that ran, in order."""
    names = manifest.export.dynamic if manifest.export is not None else ()
    return {name: tuple(sorted({point.sizes[name] for point in run})) for name in names}


def _gpu_name() -> str:
    gpu = find_gpu()
    return gpu.name if isinstance(gpu, Gpu) else ""


def record(manifest: Manifest, done: Compared) -> Manifest:
    """Adds the comparison to the manifest, and the sizes at which each dynamic dim ran."""
    assert manifest.export is not None
    dynamic = {
        name: replace(shown, ran_at=done.ran_at[name])
        for name, shown in manifest.export.dynamic.items()
    }
    return replace(
        manifest,
        comparison=done.info,
        engine_compared=not done.engine_missing,
        engine_compared_why=done.engine_missing or f"compared on {done.gpu}",
        engine_gpu=done.gpu,
        export=replace(manifest.export, dynamic=dynamic),
        versions={**manifest.versions, **{f"compare:{k}": v for k, v in done.versions.items()}},
    )
