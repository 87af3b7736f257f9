"""Makes records of artifacts that were verified on a GPU: a manifest's evidence in few lines.

    python benchmarks/engines/verified_record.py artifacts/raft/manifest.json [MANIFEST ...]
        [--out docs/results/verified] [--command 'pipeline convert ...']

After `pipeline verify` on a GPU, the manifest of an artifact has the whole comparison. A record
keeps the evidence: versions, dims, sizes, errors, checks, and the hashes of the artifact's files.
It leaves out the nodes that each pass rewrote, the seconds of each library, and text that is the
same in every manifest.

The script reads the manifest as plain JSON, so it can also convert manifests of older versions. It
first checks the manifest's hash. It checks every record before writing it (see `faults`). Exit code
1 means that a manifest was refused.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from compact_json import compact

from pipeline.spec.verdicts import GOOD_CHECKS

FORM = 1  # the schema of a record; a new meaning of its keys needs a new number
# 4 added `differing` to tolerances, 5 `interface` and the kinds of findings, 11 inputs at edges,
# 12 a note on wide tolerances
SCHEMAS = (3, 4, 5, 6, 7, 8, 9, 10, 11, 12)  # of manifests
WIDTH = 480  # the most characters of a line
DIGITS = 6  # of an error
DEFAULT = Path("docs/results/verified")
_DEFAULT_MEMORY = 6 * 2**30  # a larger limit came from --memory-limit
_ENGINE = "engine"  # the run of an engine is called engine, or engine-PROFILE
_HALF = "half"  # the run of half.onnx
_SHA256 = re.compile(r"[0-9a-f]{64}")
# The checks that every run of an engine has; batch rows need a batch dimension
_CHECKS = ("determinism", "unwritten outputs", "shuffled order")
_FILES = ("engine.plan", "exported.onnx", "model.onnx")
_VERSIONS = ("python", "onnx", "onnxruntime", "polygraphy", "numpy")
_KEYS: dict[str, type | tuple[type, ...]] = {
    "form": int, "name": str, "manifest": dict, "command": str, "model": dict, "precision": str,
    "target": dict, "gpu": str, "engine_compared": bool, "versions": dict, "dims": list,
    "rules": list, "padding": (dict, type(None)), "inputs": list, "outputs": list,
    "profiles": dict, "reference": str, "tolerance": (dict, type(None)), "engine_tolerance": dict,
    "export": dict, "rewrite": dict, "build": dict, "seconds": dict, "passed": bool,
    "largest": dict, "points": list, "checks": list, "notes": list, "files": dict,
}  # fmt: skip

Record = dict[str, Any]


class Refused(Exception):
    """The error for a manifest that gives no record."""


def read_manifest(path: Path) -> Record:
    """Reads a manifest of any schema in `SCHEMAS`.

    Raises:
        Refused: The file is not a manifest, has an unknown schema, or was changed after it was
            written.
    """
    try:
        manifest = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise Refused(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(manifest, dict) or manifest.get("schema") not in SCHEMAS:
        known = ", ".join(map(str, SCHEMAS))
        raise Refused(f"{path}: not a manifest of schema {known}")
    if hash_of(manifest) != manifest.get("manifest_sha256"):
        raise Refused(f"{path}: was changed after it was written: its hash does not match")
    return manifest


def hash_of(manifest: Mapping[str, Any]) -> str:
    """The sha256 of all keys except `manifest_sha256`, computed as for a manifest."""
    content = {key: value for key, value in manifest.items() if key != "manifest_sha256"}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def record_of(manifest: Mapping[str, Any], command: str | None = None) -> Record:
    """Makes the record of a manifest.

    Args:
        manifest: A manifest from `read_manifest`.
        command: The command that made the artifact. If it is empty, `command_of` derives it.

    Raises:
        Refused: The manifest lacks a stage.
    """
    missing = [s for s in ("export", "rewrite", "build", "comparison") if not manifest.get(s)]
    if missing:
        raise Refused(f"{manifest['name']}: not done yet: {', '.join(missing)}")
    target, comparison, declared = manifest["target"], manifest["comparison"], _declared(manifest)
    points = [_point(point) for point in comparison["points"]]
    measured = comparison.get("engine_tolerances")
    return {
        "form": FORM,
        "name": "-".join([manifest["name"], manifest["precision"], target["name"], _gpu(manifest)]),
        "manifest": {
            "schema": manifest["schema"],
            "sha256": manifest["manifest_sha256"],
            "created": manifest["created"],
        },
        "command": command or command_of(manifest),
        "model": {key: value for key, value in manifest["model"].items() if value != []},
        "precision": manifest["precision"],
        "target": target,
        "gpu": manifest["engine_gpu"],
        "engine_compared": manifest["engine_compared"],
        "versions": manifest["versions"],
        "dims": declared["dims"],
        "rules": declared["rules"],
        "padding": declared["padding"],
        "inputs": declared["inputs"],
        "outputs": declared["outputs"],
        "profiles": {profile["name"]: profile["ranges"] for profile in declared["profiles"]},
        "reference": manifest["reference"],
        "tolerance": declared["tolerance"],
        "engine_tolerance": declared["engine_tolerance"],
        "export": {k: v for k, v in manifest["export"].items() if k != "seconds"},
        "rewrite": _rewrite(manifest["rewrite"]),
        "build": _build(manifest["build"]),
        "seconds": {stage["name"]: round(stage["seconds"], 1) for stage in manifest["stages"]},
        "passed": comparison["passed"],
        "largest": largest(points),
        "points": points,
        "checks": [_check(check) for check in comparison["checks"]],
        "memory_limit_bytes": comparison["memory_limit_bytes"],
        "notes": [_text(note) for note in comparison["notes"]],
        "files": manifest["files"],
        **({"measured_tolerance": measured} if measured else {}),
    }


def _declared(manifest: Mapping[str, Any]) -> Mapping[str, Any]:
    """The object with dims, inputs, profiles and tolerances: up to schema 4 the manifest itself."""
    found: Mapping[str, Any] = manifest.get("interface", manifest)
    return found


def _gpu(manifest: Mapping[str, Any]) -> str:
    """The GPU's name for the record's name: the last word before its memory, such as ``h200``."""
    name = re.sub(r" \d+ ?GB\b.*", "", str(manifest["engine_gpu"] or "no-gpu"))
    return re.sub(r"[^a-z0-9]+", "-", name.split()[-1].lower())


def _rewrite(rewrite: Mapping[str, Any]) -> Record:
    """The number of nodes that each pass rewrote. `idle` lists the passes that rewrote none."""
    passes = [one for one in rewrite["passes"] if one["needed"]]
    found: Record = {
        "nodes_before": rewrite["nodes_before"],
        "nodes_after": rewrite["nodes_after"],
        "rewritten": {p["name"]: len(p["rewritten"]) for p in passes if p["rewritten"]},
        "refused": {p["name"]: len(p["refused"]) for p in passes if p["refused"]},
        "skipped": [p["name"] for p in passes if p["skipped"]],
        "idle": [p["name"] for p in passes if not (p["rewritten"] or p["refused"] or p["skipped"])],
        "warnings": rewrite["warnings"],
    }
    return {key: value for key, value in found.items() if value not in ([], {})}


def _build(build: Mapping[str, Any]) -> Record:
    """The build without empty values. Each warning occurs once, without repeated commas."""
    warnings = [re.sub(r"(, ){2,},?", ", ...", text) for text in build["warnings"]]
    found = {**build, "seconds": round(build["seconds"], 1), "warnings": warnings}
    if any(text in found["timing_cache"] for text in warnings):
        del found["timing_cache"]
    return {key: value for key, value in found.items() if value not in ([], {}, None)}


def _check(check: Mapping[str, Any]) -> Record:
    """A check with its text and its result. Up to schema 4, the manifest has this form."""
    if "kind" not in check:
        return dict(check)
    kept = {key: check[key] for key in ("name", "run", "sizes")}
    return {**kept, "passed": check["kind"] in GOOD_CHECKS, "detail": check["text"]}


def _text(note: str | Mapping[str, str]) -> str:
    """The text of a note. Up to schema 4, the note is the text."""
    return note if isinstance(note, str) else note["text"]


def _left_out(point: Mapping[str, Any]) -> str:
    """The reason why a set of sizes was not compared; empty if it was compared."""
    if "compared" in point:  # up to schema 4
        return "" if point["compared"] else str(point["why"])
    return _text(point["left_out"]) if point["left_out"] is not None else ""


def _point(point: Mapping[str, Any]) -> Record:
    """One set of sizes: ``[max_abs, max_rel]`` by pair of runs and by output."""
    found: Record = {"label": point["label"], "sizes": point["sizes"]}
    if why := _left_out(point):
        found["not_compared"] = why
    errors: dict[str, dict[str, list[float | None]]] = {}
    for result in point["results"]:
        pair = " ".join(result["pair"])
        numbers = [_short(result[key]) for key in ("max_abs", "max_rel")]
        errors.setdefault(pair, {})[result["output"]] = numbers
    failed = {
        f"{' '.join(result['pair'])} {result['output']}": result.get("text") or result["why"]
        for result in point["results"]
        if not result.get("passed", result.get("kind") in ("agrees", "near-zero"))
    }
    found["errors"] = errors
    return {**found, "failed": failed} if failed else found


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.{DIGITS}g}")


def largest(points: list[Record]) -> dict[str, dict[str, list[float | None]]]:
    """The largest error of each pair and output over all points, absolute and relative."""
    found: dict[str, dict[str, list[float | None]]] = {}
    for point in points:
        for pair, outputs in point["errors"].items():
            for output, numbers in outputs.items():
                before = found.setdefault(pair, {}).setdefault(output, [None, None])
                for n, number in enumerate(numbers):
                    known = [value for value in (before[n], number) if value is not None]
                    before[n] = max(known, default=None)
    return found


def command_of(manifest: Mapping[str, Any]) -> str:
    """The single command that makes such an artifact, derived from the manifest.

    The stages may have run one by one, on several machines. Folders are left out.
    """
    model, build, declared = manifest["model"], manifest["build"], _declared(manifest)
    words = ["pipeline", "convert", model["source"]]

    def add(option: str, *values: str) -> None:
        words.extend(word for value in values for word in (option, value))

    options = model["options"].items()
    add("--option", *(f"{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in options))
    for option in ("input", "dim", "range"):
        add(f"--{option}", *model.get(f"{option}s", ()))
    if model["weights"]["file"]:
        add("--weights", model["weights"]["file"])
    add("--target", manifest["target"]["name"])
    if build.get("half"):
        add("--recipe", "half.recipe")
    else:
        add("--precision", manifest["precision"])
    for profile in declared["profiles"]:
        # a profile of the user, or one that `tune` made of it; the source has other names
        if re.fullmatch(r"profile\d+(-\d+)?", profile["name"]):
            ranges = profile["ranges"].items()
            add("--profile", ",".join(f"{dim}={':'.join(map(str, r))}" for dim, r in ranges))
    tolerances = {
        "--tolerance": declared["tolerance"],
        "--engine-tolerance": declared["engine_tolerance"].get(manifest["precision"]),
    }
    for option, stated in tolerances.items():
        if stated and stated["why"] == f"given with {option}":
            numbers = [stated["rtol"], stated["atol"], stated.get("differing", 0.0)]
            add(
                option,
                ",".join(f"{number:g}" for number in (numbers if numbers[2] else numbers[:2])),
            )
    if build["optimization_level"] is not None:
        add("--optimization-level", str(build["optimization_level"]))
    add("--plugin", *build["plugins"])
    limit = manifest["comparison"]["memory_limit_bytes"]
    if limit > _DEFAULT_MEMORY:
        add("--memory-limit", f"{limit // 2**30}GiB" if limit % 2**30 == 0 else str(limit))
    return shlex.join(words)


def faults(record: Mapping[str, Any]) -> list[str]:
    """The missing, contradictory or failed parts of a record; empty for a good record."""
    wrong = [
        f"{key}: missing, or of another type"
        for key, kind in _KEYS.items()
        if not isinstance(record.get(key), kind)
    ]
    if wrong:
        return wrong
    parts = (
        _about_origin, _about_sizes, _about_points, _about_errors, _about_checks, _about_files
    )  # fmt: skip
    return [fault for part in parts for fault in part(record)]


def _about_origin(record: Mapping[str, Any]) -> Iterator[str]:
    if record["form"] != FORM:
        yield f"form: {record['form']} is unknown"
    if record["manifest"].get("schema") not in SCHEMAS:
        yield "manifest: unknown schema"
    if not _SHA256.fullmatch(str(record["manifest"].get("sha256"))):
        yield "manifest: its sha256 is missing or malformed"
    if not record["command"].startswith("pipeline "):
        yield "command: it does not run the pipeline"
    if not record["engine_compared"] or not record["gpu"]:
        yield "engine_compared: the engine was not compared on a GPU"
    if not record["passed"]:
        yield "passed: the comparison failed"
    if not record["model"].get("source") or "options" not in record["model"]:
        yield "model: its source or its options are missing"
    weights = record["model"].get("weights", {})
    if weights.get("seed") is None and not _SHA256.fullmatch(str(weights.get("sha256"))):
        yield "model: its weights have neither a seed nor a sha256"
    flavour = str(record["target"].get("flavour"))  # tensorrt or tensorrt_rtx
    for name in sorted({*_VERSIONS, flavour, record["reference"]} - {"exported"}):
        if not record["versions"].get(name):
            yield f"versions: {name} is missing"
    if record["target"].get("version") != record["versions"].get(flavour):
        yield "target: its version is not the one that was used"
    if record["build"].get("gpu") not in (record["gpu"], None):
        yield "build: on another GPU than the comparison"


def _about_sizes(record: Mapping[str, Any]) -> Iterator[str]:
    dims = {dim["name"]: dim for dim in record["dims"]}
    for name, dim in dims.items():
        if not 0 <= dim["min"] <= dim["opt"] <= dim["max"]:
            yield f"dims: {name}: min, opt and max are out of order"
        for size in (dim["min"], dim["opt"], dim["max"]):
            if (size - dim["offset"]) % dim["multiple_of"]:
                yield f"dims: {name}: {size} is not an allowed multiple"
    if not record["profiles"]:
        yield "profiles: there is none"
    for profile, ranges in record["profiles"].items():
        if set(ranges) != set(dims):
            yield f"profiles: {profile} has other dims than the model"
            continue
        for name, (low, middle, high) in ranges.items():
            if not dims[name]["min"] <= low <= middle <= high <= dims[name]["max"]:
                yield f"profiles: {profile}: {name} is out of order, or outside of the dim"


def _about_points(record: Mapping[str, Any]) -> Iterator[str]:
    dims = {dim["name"]: dim for dim in record["dims"]}
    for point in record["points"]:
        sizes = point["sizes"]
        if set(sizes) != set(dims):
            yield f"point {point['label']}: has other dims than the model"
        elif not any(_within(sizes, ranges) for ranges in record["profiles"].values()):
            yield f"point {point['label']}: no profile has its sizes"
        elif any((size - dims[d]["offset"]) % dims[d]["multiple_of"] for d, size in sizes.items()):
            yield f"point {point['label']}: a size is not an allowed multiple"


def _within(sizes: Mapping[str, int], ranges: Mapping[str, Any]) -> bool:
    return all(low <= sizes[name] <= high for name, (low, _, high) in ranges.items())


def _about_errors(record: Mapping[str, Any]) -> Iterator[str]:
    names = [output["name"] for output in record["outputs"]]
    stated = {
        output["name"]: output["tolerance"] or record["tolerance"] for output in record["outputs"]
    }
    of_engine = record["engine_tolerance"].get(record["precision"])
    measured = record.get("measured_tolerance", {})
    compared = [point for point in record["points"] if "not_compared" not in point]
    if not compared:
        yield "points: none was compared"
    for point in record["points"]:
        where = f"point {point['label']}"
        if "not_compared" in point:
            if not point["not_compared"] or point["errors"]:
                yield f"{where}: not compared, but without a reason or with errors"
            continue
        judged = [pair.split() for pair in point["errors"]]
        if not any(a == record["reference"] and b.startswith(_ENGINE) for a, b in judged):
            yield f"{where}: the engine was not compared with {record['reference']}"
        for pair, outputs in point["errors"].items():
            second = pair.split()[1]
            in_precision = second == _HALF or second.startswith(_ENGINE)
            if list(outputs) != names:
                yield f"{where}: {pair}: other outputs than the model's"
                continue
            for name, numbers in outputs.items():
                tolerance = stated[name]
                if in_precision:
                    tolerance = measured.get(name) or of_engine or tolerance
                if f"{pair} {name}" in point.get("failed", {}):
                    yield f"{where}: {pair} {name} failed"
                elif tolerance is None or not _passes(numbers, tolerance):
                    yield f"{where}: {pair} {name}: {numbers} is beyond the tolerance"
    if record["largest"] != largest(record["points"]):
        yield "largest: not the largest error of the points"


def _passes(numbers: Sequence[float | None], tolerance: Mapping[str, Any]) -> bool:
    """False if no output within the tolerance can have this ``[max_abs, max_rel]``.

    If the largest difference is above ``atol``, its element passed by ``rtol``. The difference over
    the largest value is then below ``rtol``, too. Integers have no ``max_rel``.
    """
    max_abs, max_rel = numbers
    if max_abs is None or not math.isfinite(max_abs):
        return False
    if max_rel is None:
        return max_abs == 0 or bool(tolerance.get("differing"))
    return bool(0 <= max_abs <= tolerance["atol"] or 0 <= max_rel <= tolerance["rtol"])


def _about_checks(record: Mapping[str, Any]) -> Iterator[str]:
    done = {(check["name"], check["run"]) for check in record["checks"]}
    for check in record["checks"]:
        if not check["passed"] or not check["detail"]:
            yield f"check {check['name']} of {check['run']}: failed, or has no finding"
    runs = {pair.split()[1] for point in record["points"] for pair in point["errors"]}
    for run in sorted(run for run in runs if run.startswith(_ENGINE)):
        for name in _CHECKS:
            if (name, run) not in done:
                yield f"check {name} of {run}: missing"
        explained = any("batch rows" in note for note in record["notes"])
        if ("batch rows", run) not in done and not explained:
            yield f"check batch rows of {run}: missing, and no note says why"


def _about_files(record: Mapping[str, Any]) -> Iterator[str]:
    files = record["files"]
    for name in _FILES:
        if name not in files:
            yield f"files: {name} is missing"
    for name, file in files.items():
        if not _SHA256.fullmatch(str(file.get("sha256"))) or not file.get("bytes", 0) > 0:
            yield f"files: {name}: sha256 or size is missing or malformed"
    if files.get("engine.plan", {}).get("bytes") != record["build"].get("plan_bytes"):
        yield "files: engine.plan is not as large as the plan that was built"


def write(record: Mapping[str, Any], folder: Path) -> Path:
    """Writes a record as ``NAME.json`` into a folder, and returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    place = folder / f"{record['name']}.json"
    place.write_text(compact(record, WIDTH))
    return place


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("manifests", nargs="+", type=Path, metavar="MANIFEST")
    parser.add_argument("--out", type=Path, default=DEFAULT, help="default: %(default)s")
    parser.add_argument(
        "--command",
        help="the command that made the artifact (default: derived from the manifest)",
    )
    arguments = parser.parse_args()
    code = 0
    for path in arguments.manifests:
        try:
            record = record_of(read_manifest(path), arguments.command)
            wrong = faults(record)
            if wrong:
                raise Refused("\n  ".join([f"{path}: no evidence:", *wrong]))
        except Refused as error:
            print(f"error: {error}", file=sys.stderr)
            code = 1
        else:
            print(write(record, arguments.out))
    return code


if __name__ == "__main__":
    sys.exit(main())
