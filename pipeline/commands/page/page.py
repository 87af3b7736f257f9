"""The report of an artifact as one HTML file that loads nothing from elsewhere."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.artifact.artifact import Artifact
from pipeline.artifact.manifest import Manifest, PointInfo
from pipeline.commands.page.charts import Point, bars, size_map
from pipeline.compare.problems import problems, worst_of
from pipeline.convert.findings import comparison_failures
from pipeline.convert.report import compared_text, narrowed_text, notes_of
from pipeline.errors import InputError
from pipeline.spec.dims import size_text, sizes_text
from pipeline.spec.file_names import RECIPE, REPRODUCE, TUNING
from pipeline.spec.tensors import Tolerance

PAGE = "report.html"


def write_page(artifact: Artifact, out: Path | None = None, bench: Path | None = None) -> Path:
    """Writes the report of an artifact as HTML.

    Args:
        artifact: the artifact.
        out: the file; ``report.html`` in the current folder by default, beside no artifact's
            files, which a manifest lists.
        bench: a file that ``pipeline bench --out`` wrote, for the latencies.

    Returns:
        The file.

    Raises:
        InputError: `bench` is no such file, or `out` can't be written.
    """
    out = out or Path(f"{artifact.path.name}-{PAGE}")
    text = page(artifact, bench)
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"--out {out}: {error.strerror}") from error
    return out


def page(artifact: Artifact, bench: Path | None = None) -> str:
    """The report of an artifact as the text of an HTML file. See `write_page`."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("pipeline.commands.page", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html").render(_facts(artifact, bench))


def _engine_tolerances(manifest: Manifest) -> dict[str, Tolerance]:
    """The tolerance of an engine in its precision, for each output that has another one then."""
    plain = manifest.tolerances() if manifest.comparison else {}
    found = manifest.engine_tolerances() if manifest.comparison else {}
    return {name: found[name] for name in plain if found[name] != plain[name]}


def _facts(artifact: Artifact, bench: Path | None) -> dict[str, Any]:
    """What the template shows."""
    manifest = artifact.manifest
    comparison = manifest.comparison
    ranges = {d.name: (d.min, d.max) for d in manifest.interface.dims.values()}
    points = [_point(info) for info in comparison.points] if comparison else []
    rewrite = manifest.rewrite
    return {
        "m": manifest,
        "word": _word(manifest),
        "facts": _head(manifest),
        "failures": comparison_failures(comparison) if comparison else [],
        "notes": notes_of(manifest),
        "tensors": [
            (kind, t.name, t.dtype, ", ".join(size_text(s) for s in t.shape or ()))
            for kind, tensors in (
                ("input", manifest.interface.inputs),
                ("output", manifest.interface.outputs),
            )
            for t in tensors
        ],
        "map": size_map(points, ranges),
        "rows": [_row(info) for info in comparison.points] if comparison else [],
        "tolerances": manifest.tolerances() if comparison else {},
        "engine_tolerances": _engine_tolerances(manifest),
        "checks": [
            (check.name, check.run, sizes_text(check.sizes), check.text, check.passed)
            for check in (comparison.checks if comparison else ())
        ],
        "passes": [p for p in rewrite.passes if p.rewritten or p.skipped] if rewrite else [],
        "idle": sum(p.needed and not p.skipped and not p.rewritten for p in rewrite.passes)
        if rewrite
        else 0,
        "stages": bars({stage.name: stage.seconds for stage in manifest.stages}),
        "latency": _latency(artifact, bench),
        "reproduce": _text(artifact.path / REPRODUCE),
        "recipe": _text(artifact.path / RECIPE),
    }


def _word(manifest: Manifest) -> str:
    comparison = manifest.comparison
    if comparison is None:
        return "not compared"
    if comparison.passed and not any(r.compared for p in comparison.points for r in p.results):
        return "not compared"
    if not comparison.passed:
        return "failed"
    return "right" if manifest.engine_compared else "ONNX right, engine not compared"


def _head(manifest: Manifest) -> list[tuple[str, str]]:
    dims = [str(dim) for dim in manifest.interface.dims.values()]
    sizes = ", ".join([*dims, *manifest.interface.rules]) or "all fixed"
    gpu = manifest.engine_gpu or manifest.engine_compared_why
    rows = [
        ("Source", manifest.model.source),
        ("Target", " ".join(filter(None, (manifest.target.name, manifest.target.version)))),
        ("Precision", manifest.precision),
        ("Sizes", sizes),
        ("Narrowed", "".join(narrowed_text(manifest))),
        ("Compared", compared_text(manifest)),
        ("Engine compared", ("on " if manifest.engine_compared else "no: ") + gpu),
        ("Made", manifest.created),
    ]
    return [(name, text) for name, text in rows if text]


def _point(info: PointInfo) -> Point:
    label = f"{info.label}: {sizes_text(info.sizes)}"
    if info.left_out is not None:
        return Point(info.sizes, None, False, f"{label}: not compared: {info.left_out.text}", True)
    worst = worst_of(info.results)
    error = worst.max_rel if worst is not None else None
    bad = len(problems([info]))
    said = f"{bad} failed" if bad else _agreed(info)
    if error is not None:
        said += f", largest error {error:.1e}"
    elif worst is not None and bad:
        said += f": {worst.output}: {worst.what}"
    return Point(info.sizes, error, bool(bad), f"{label}: {said}")


def _agreed(info: PointInfo) -> str:
    return "agrees" if any(r.compared for r in info.results) else "nothing to compare"


def _row(info: PointInfo) -> dict[str, Any]:
    if info.left_out is not None:
        return {"info": info, "sizes": sizes_text(info.sizes), "said": info.left_out.text,
                "kind": "left-out", "error": None, "absolute": None}  # fmt: skip
    bad, worst = len(problems([info])), worst_of(info.results)
    return {
        "info": info,
        "sizes": sizes_text(info.sizes),
        "said": f"{bad} failed" if bad else _agreed(info),
        "kind": "failed" if bad else "right",
        "error": worst.max_rel if worst is not None else None,
        "absolute": worst.max_abs if worst is not None else None,
    }


def _latency(artifact: Artifact, bench: Path | None) -> list[dict[str, Any]]:
    """Tables of times: of the candidates that `tune` tried, and of `bench`."""
    found = []
    stored = artifact.path / TUNING
    if stored.is_file():
        found.append(_of_tuning(_read(stored, "tuning.json")))
    if bench is not None:
        found.append(_of_bench(_read(bench, f"--bench {bench}")))
    return found


def _of_tuning(content: Mapping[str, Any]) -> dict[str, Any]:
    times: dict[str, dict[str, float]] = {}
    for trial in content["trials"]:
        for time in trial["times"]:
            times.setdefault(sizes_text(time["sizes"]), {})[trial["name"]] = time["ms"]
    refused = [(trial["name"], trial["why"]) for trial in content["trials"] if trial["why"]]
    return {
        "title": f"Candidates of tune, on {content['gpu']}",
        "kept": content["kept"],
        "sizes": [(sizes, bars(by_name)) for sizes, by_name in times.items()],
        "refused": refused,
    }


def _of_bench(content: Mapping[str, Any]) -> dict[str, Any]:
    try:
        sizes = [(sizes_text(point["sizes"]), bars(_medians(point))) for point in content["points"]]
        title = f"bench, on {content['gpu']}"
    except (KeyError, TypeError) as error:
        raise InputError(
            f"--bench: the file is not one of `pipeline bench --out`: {error}"
        ) from error
    return {"title": title, "kept": "", "sizes": sizes, "refused": []}


def _medians(point: Mapping[str, Any]) -> dict[str, float]:
    names = {"plain": "without a CUDA graph", "graph": "with a CUDA graph"}
    return {text: point[name]["median_ms"] for name, text in names.items() if point[name]}


def _read(file: Path, what: str) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{what}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise InputError(f"{what}: cannot be read as JSON: {error}") from error


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8") if file.is_file() else ""
