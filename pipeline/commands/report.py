"""The printed report of a conversion, as tables or as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from pipeline.artifact.artifact import Artifact
from pipeline.artifact.engines import engine_places
from pipeline.artifact.manifest import ComparisonInfo, Manifest, PointInfo
from pipeline.artifact.records import encode
from pipeline.commands.table import table
from pipeline.compare.problems import problems, worst_of
from pipeline.compare.runners import failures
from pipeline.convert.findings import comparison_failures
from pipeline.convert.report import verdict
from pipeline.errors import ArtifactError
from pipeline.spec.dims import size_text, sizes_text
from pipeline.spec.metrics import METRICS, Metric, metric_text
from pipeline.spec.metrics import worst as worst_metric
from pipeline.spec.model import ModelSpec, Tolerance
from pipeline.spec.recipe import HalfInfo
from pipeline.spec.verdicts import Check

if TYPE_CHECKING:
    from pipeline.convert.report import Report


def report_json(report: Report, engines: Sequence[Mapping[str, Any]] | None = None) -> str:
    """Returns the report as JSON: the manifest, and the facts that the manifest lacks."""
    content = {
        "path": str(report.path),
        "ok": report.ok,
        "unchanged": report.unchanged,
        "regressions": [encode(note) for note in report.regressions],
        "notes": [encode(note) for note in report.notes],
        "removed": list(report.removed),
        "engines": other_engines(report.path) if engines is None else engines,
        "store": None if report.store is None else asdict(report.store),
        "manifest": json.loads(report.manifest.to_json()),
    }
    return json.dumps(content, indent=2)


def report_text(report: Report, engines: Sequence[Mapping[str, Any]] | None = None) -> str:
    """Returns the report as short tables. `engines` are the `other_engines`, if they are known."""
    manifest = report.manifest
    if report.unchanged:
        own = manifest.model.source
        pulled = report.store is not None and report.store.pulled
        why = (
            "The store has the artifact, so no stage ran"
            if pulled
            else ("Nothing changed, so nothing was done")
        )
        parts = [f"{why}. Use --force to convert again."]
        if ":" in own or "/" in own:
            parts.append(f"Changes in files that {own} reads by itself are not noticed.")
        return "\n".join([*parts, verdict(report, whole=True)])
    parts = [_head(report)]
    parts += [_stages(manifest), _dims(manifest), _passes(manifest), _comparison(manifest)]
    engines = other_engines(report.path) if engines is None else engines
    parts += ["\n".join(map(_engine_line, engines))]
    parts += [f"removed {text}" for text in report.removed]
    parts += [note.text for note in report.notes]
    parts += [f"REGRESSION {note.text}" for note in report.regressions]
    parts += [_verdict(manifest), _narrowed(manifest)]
    if manifest.build is not None and manifest.comparison is None:
        parts.append(f"next: `pipeline verify {quote(str(report.path))}`")
    return "\n\n".join(part for part in parts if part)


def other_engines(place: Path, *, check: bool = False) -> list[dict[str, Any]]:
    """Returns the facts of each engine beside the artifact's own; see `pipeline.artifact.engines`.

    An engine that can't be used has its path and the `error` only. `gpus` are compute
    capabilities; none for every GPU that the target supports.

    Args:
        place: The artifact's folder.
        check: Whether to check the files of each engine, too.
    """
    found: list[dict[str, Any]] = []
    for engine in engine_places(place):
        try:
            manifest = Artifact.open(engine, check=check).manifest
        except ArtifactError as error:
            found.append({"path": str(engine), "error": str(error)})
            continue
        compared = manifest.comparison
        found.append(
            {
                "path": str(engine),
                "target": manifest.target.name,
                "version": manifest.target.version,
                "gpus": list(manifest.target.compute_capabilities),
                "precision": manifest.precision,
                "flags": list(manifest.flags.names),
                "passed": None if compared is None else compared.passed,
                "failures": [one.what for one in comparison_failures(compared)] if compared else [],
                "engine_compared": manifest.engine_compared,
                "engine_gpu": manifest.engine_gpu,
                "engine_compared_why": manifest.engine_compared_why,
            }
        )
    return found


def _engine_line(engine: Mapping[str, Any]) -> str:
    if "error" in engine:
        return f"engine {engine['path']}: can't be used: {engine['error']}"
    where = f"compute capability {', '.join(engine['gpus'])}" if engine["gpus"] else "portable"
    where = ", ".join([where, *engine["flags"]])
    compared = engine["engine_compared_why"]
    if not engine["engine_compared"] and not compared.startswith("not compared"):
        compared = f"not compared: {compared}"
    if found := engine["failures"]:
        more = f" (and {len(found) - 1} more)" if found[1:] else ""
        compared = f"FAILED its comparison: {found[0]}{more}"
    return (
        f"engine {engine['path']}: {engine['target']} ({engine['version']}), {where}, "
        f"{engine['precision']}, {compared}"
    )


def _verdict(manifest: Manifest) -> str:
    """Returns the last line of a failed comparison; empty if the comparison passed."""
    comparison = manifest.comparison
    if comparison is None or comparison.passed:
        return ""
    count = len(failures(comparison))
    return f"the comparison FAILED: {count} problem{'' if count == 1 else 's'}"


def _narrowed(manifest: Manifest) -> str:
    """Returns a last line on the sizes that the model does not take; empty if it takes all."""
    dims, left = manifest.interface.dims, []
    for rule in manifest.export.refinements if manifest.export is not None else ():
        name = rule.dim.removesuffix("_padded")
        left.append(str(dims[name]) if name in dims and not rule.size_rule else rule.size_rule)
    words = ", ".join(dict.fromkeys(filter(None, left)))
    return f"fewer sizes than you asked for: {words} (see `narrowed` above)" if words else ""


def _head(report: Report) -> str:
    manifest = report.manifest
    weights = manifest.model.weights
    own = manifest.model.source
    made = f"from {own}" if ":" in own or "/" in own else "random"
    seed = f", seed {weights.seed}" if weights.seed is not None else ""
    source = weights.file or f"{made}{seed}"
    version = f" ({manifest.target.flavour} {manifest.target.version})" if manifest.build else ""
    return (
        f"{report.path}: {manifest.name}, weights {source}, "
        f"target {manifest.target.name}{version}, {manifest.precision}"
    )


def _stages(manifest: Manifest) -> str:
    rows = [("stage", "seconds", "of these in libraries", "peak memory")]
    for stage in manifest.stages:
        libraries = ", ".join(f"{n} {s:.1f}" for n, s in stage.library_seconds.items())
        peak = "-" if stage.peak_bytes is None else f"{stage.peak_bytes / 2**30:.2f} GiB"
        rows.append((stage.name, f"{stage.seconds:.1f}", libraries or "-", peak))
    return table(rows)


def _dims(manifest: Manifest) -> str:
    lines = []
    declared = manifest.interface
    for profile in declared.profiles:
        ranges = ", ".join(f"{k} {a}..{b}..{c}" for k, (a, b, c) in profile.ranges.items())
        lines.append(f"profile {profile.name}: {ranges or 'all sizes fixed'}")
    for dim in declared.dims.values():
        for word in dim.defaulted:
            lines.append(f"{dim.name}: {word}={getattr(dim, word)} is the default")
    lines += [f"rule on sizes: {rule}" for rule in declared.rules]
    if manifest.export is not None:
        lines += [f"dynamic {name}: {how.text}" for name, how in manifest.export.dynamic.items()]
        for rule in manifest.export.refinements:
            lines.append(f"narrowed: {rule.text}{f' ({rule.line})' if rule.line else ''}")
        lines += [f"note: {text}" for text in manifest.export.notes]
    for tensor in declared.tensors:
        sizes = ", ".join(size_text(size) for size in tensor.shape or ())
        lines.append(f"{tensor.name}: {tensor.dtype} [{sizes}]")
    return "\n".join(lines)


def _passes(manifest: Manifest) -> str:
    if manifest.rewrite is None:
        return ""
    lines = []
    for done in manifest.rewrite.passes:
        if done.skipped:
            lines.append(
                f"pass {done.name}: SKIPPED on request, although the target needs this pass"
            )
        elif done.rewritten:
            lines.append(f"pass {done.name}: {len(done.rewritten)} nodes rewritten")
    passes = manifest.rewrite.passes
    idle = sum(p.needed and not p.skipped and not p.rewritten for p in passes)
    other = sum(not p.needed for p in passes)
    more = " more" if lines else ""
    lines.append(
        f"{idle}{more} passes found nothing to rewrite, {other} are not needed by "
        f"{manifest.target.name}"
    )
    lines += [f"warning: {text}" for text in manifest.rewrite.warnings]
    if manifest.build is not None:
        built = manifest.build
        lines.append(
            f"engine: {built.plan_bytes / 2**20:.1f} MiB, {built.layers} layers before fusion, "
            f"{built.validity}"
        )
        lines += _half(built.half)
        gpus = ", ".join(manifest.target.compute_capabilities)
        where = f"on {built.gpu} ({gpus})" if built.gpu else ""
        where = f"for compute capability {gpus} only" if gpus and not built.gpu else where
        level = built.optimization_level
        effort = [where] if where else []
        effort += [] if level is None else [f"at optimisation level {level}"]
        effort += [] if built.timing_cache == "none" else [f"timing cache {built.timing_cache}"]
        effort += built.flags.names
        lines += [f"built {', '.join(effort)}"] if effort else []
        if built.refitted_from:
            lines.append(f"its weights were replaced in the plan {built.refitted_from[:16]}...")
        lines += [f"load plugin {name} before you load the engine" for name in built.plugins]
    return "\n".join(lines)


def _half(half: HalfInfo | None) -> list[str]:
    if half is None:
        return []
    islands = [f"float32: {island.pattern} ({island.text})" for island in half.islands]
    return [f"recipe: {half.text}", *islands]


def _comparison(manifest: Manifest) -> str:
    comparison = manifest.comparison
    if comparison is None:
        return "nothing compared yet"
    head = ("compared at", "sizes", "largest error", "of the largest value", "")
    rows: list[tuple[str, ...]] = [head]
    rows += [_point_row(info) for info in comparison.points]
    engine = "compared" if manifest.engine_compared else "NOT compared"
    lines = [
        table(rows),
        *_errors(manifest.reference, comparison),
        *_metrics(manifest.reference, comparison),
        *_tolerances(manifest),
        *(note.text for note in comparison.notes if not note.fails),
        *(_check_line(check) for check in comparison.checks if check.passed),
        f"engine: {engine}: {manifest.engine_compared_why}",
        *(f"FAILED {line}" for line in failures(comparison)),
    ]
    return "\n".join(lines)


def _errors(reference: str, comparison: ComparisonInfo) -> list[str]:
    """Returns one line a run: the largest error against the reference, to choose a tolerance.

    That of an output that failed comes before larger errors of others.
    """
    worst: dict[str, tuple[tuple[bool, float], str]] = {}
    for info in comparison.points:
        for result in info.results:
            first, run = result.pair
            if first != reference or result.max_abs is None:
                continue
            part = "" if result.max_rel is None else f", {result.max_rel:.2e} of the largest value"
            text = f"{result.max_abs:.2e}{part} ({result.output} at {sizes_text(info.sizes)})"
            found = (not result.passed, result.max_abs), text
            worst[run] = max(worst.get(run, found), found)
    return [f"error of {run} against {reference}: {text}" for run, (_, text) in worst.items()]


def _metrics(reference: str, comparison: ComparisonInfo) -> list[str]:
    """Returns one line for each run and output with a metric: its worst value over all sizes."""
    values: dict[tuple[str, str, Metric], list[float]] = {}
    for info in comparison.points:
        for result in info.results:
            metric, value = result.facts.get("metric"), result.facts.get("measured")
            if result.pair[0] == reference and metric in METRICS and isinstance(value, float):
                key = result.output, result.pair[1], metric
                values.setdefault(key, []).append(value)
    return [
        f"{output} of {run} against {reference}: {metric_text(metric, worst_metric(metric, found))}"
        f"{' at worst' if len(found) > 1 else ''}"
        for (output, run, metric), found in values.items()
    ]


def _check_line(check: Check) -> str:
    at = f" at {sizes_text(check.sizes)}" if check.sizes else ""
    return f"{check.name} of {check.run}{at}: {check.text}"


def _tolerances(manifest: Manifest) -> list[str]:
    """Returns one line for each tolerance. Several tolerances are listed with their outputs."""
    lines = _tolerance_lines("tolerance", manifest.tolerances())
    engine, own = "tolerance of the engine", manifest.interface.engine_tolerance
    if manifest.precision in own:
        lines.append(f"{engine}: {own[manifest.precision]}")
    elif manifest.comparison is not None:
        lines += _tolerance_lines(engine, manifest.comparison.engine_tolerances)
    return lines


def _tolerance_lines(head: str, tolerances: Mapping[str, Tolerance]) -> list[str]:
    outputs: dict[Tolerance, list[str]] = {}
    for name, tolerance in tolerances.items():
        outputs.setdefault(tolerance, []).append(name)
    lines = []
    for t, names in outputs.items():
        whose = f" of {names[0]}" + (f" and {len(names) - 1} more" if names[1:] else "")
        whose = whose if len(outputs) > 1 else ""
        lines.append(f"{head}{whose}: {t}")
    return lines


def _point_row(info: PointInfo) -> tuple[str, ...]:
    sizes = sizes_text(info.sizes)
    if info.left_out is not None:
        return (info.label, sizes, "-", "-", f"not compared: {info.left_out.text}")
    bad, compared = len(problems([info])), any(result.compared for result in info.results)
    worst = worst_of(info.results)
    absolute, relative = (worst.max_abs, worst.max_rel) if worst is not None else (None, None)
    return (
        info.label,
        sizes,
        "-" if absolute is None else f"{absolute:.2e}",
        "-" if relative is None else f"{relative:.2e}",
        f"{bad} FAILED" if bad else "ok" if compared else "nothing to compare",
    )


def spec_facts(spec: ModelSpec) -> dict[str, Any]:
    """Returns a spec as plain data."""
    return {
        "inputs": {i.name: [size_text(s) for s in i.shape] for i in spec.inputs},
        "outputs": [o.name for o in spec.outputs],
        "dims": {name: str(dim) for name, dim in spec.dims.items()},
        "options": dict(spec.options),
    }


def models_table(specs: Mapping[str, ModelSpec]) -> str:
    """Returns the models that come with pipeline as a table."""
    rows = [("model", "dims", "options")]
    for name, spec in specs.items():
        dims = ", ".join(str(dim) for dim in spec.dims.values())
        options = ", ".join(f"{key}={value}" for key, value in spec.options.items())
        rows.append((name, dims, options))
    return table(rows)
