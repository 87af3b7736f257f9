"""The evidence under docs/results: every record is complete, consistent and short."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks" / "engines"))

import engine_results  # noqa: E402
import verified_record  # noqa: E402
from compact_json import compact  # noqa: E402

RESULTS = ROOT / "docs" / "results"
VERIFIED = sorted((RESULTS / "verified").glob("*.json"))
MEASURED = sorted((RESULTS / "measured").glob("*.json"))
LINES, CHARACTERS = 2500, 1000
HASH = "0" * 64

Record = dict[str, Any]


def read(path: Path) -> Record:
    content = json.loads(path.read_text())
    assert isinstance(content, dict)
    return content


@pytest.fixture
def record() -> Record:
    return read(RESULTS / "verified" / "linear-fp32-tensorrt-8.6-h200.json")


def test_the_evidence_is_there_and_short() -> None:
    assert len(VERIFIED) >= 10 and MEASURED
    lines = [line for path in [*VERIFIED, *MEASURED] for line in path.read_text().splitlines()]
    assert len(lines) < LINES
    assert max(map(len, lines)) <= CHARACTERS


@pytest.mark.parametrize("path", VERIFIED, ids=lambda path: path.stem)
def test_a_verified_artifact_is_evidence(path: Path) -> None:
    record = read(path)
    assert verified_record.faults(record) == []
    assert record["name"] == path.stem
    assert path.read_text() == compact(record, verified_record.WIDTH)


@pytest.mark.parametrize("path", MEASURED, ids=lambda path: path.stem)
def test_measured_times_have_a_value_or_a_reason(path: Path) -> None:
    content = engine_results.read(path)
    assert path.read_text() == compact(content, engine_results.WIDTH)
    assert all(r.get("why") or r["median_ms"] > 0 for r in content["results"])
    assert all(r["p99_ms"] >= r["median_ms"] for r in content["results"] if "median_ms" in r)
    assert all(f["work"]["operations"] > 0 for f in content["floors"])


def change(*keys: str | int, to: object) -> Callable[[Record], None]:
    """Sets the value at a path of keys."""

    def apply(record: Record) -> None:
        inner: Any = record
        for key in keys[:-1]:
            inner = inner[key]
        inner[keys[-1]] = to

    return apply


def drop(*keys: str | int) -> Callable[[Record], None]:
    """Removes the value at a path of keys."""

    def apply(record: Record) -> None:
        inner: Any = record
        for key in keys[:-1]:
            inner = inner[key]
        del inner[keys[-1]]

    return apply


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (drop("checks"), "checks: missing, or of another type"),
        (drop("versions", "onnxruntime"), "versions: onnxruntime is missing"),
        (drop("versions", "torch"), "versions: torch is missing"),
        (change("target", "flavour", to="tensorrt_rtx"), "versions: tensorrt_rtx is missing"),
        (change("form", to=2), "form: 2 is unknown"),
        (change("engine_compared", to=False), "the engine was not compared on a GPU"),
        (change("gpu", to=""), "the engine was not compared on a GPU"),
        (change("passed", to=False), "passed: the comparison failed"),
        (change("command", to=""), "command: it does not run the pipeline"),
        (change("manifest", "sha256", to="abc"), "manifest: its sha256 is missing or malformed"),
        (change("manifest", "schema", to=1), "manifest: unknown schema"),
        (change("model", "weights", "seed", to=None), "neither a seed nor a sha256"),
        (change("target", "version", to="8.5.0"), "target: its version"),
        (change("dims", 0, "opt", to=65), "dims: batch: min, opt and max are out of order"),
        (change("dims", 0, "multiple_of", to=3), "dims: batch: 1 is not an allowed multiple"),
        (change("profiles", to={}), "profiles: there is none"),
        (change("profiles", "default", to={}), "profiles: default has other dims"),
        (change("profiles", "default", "batch", to=[1, 8, 65]), "profiles: default: batch is out"),
        (change("points", to=[]), "points: none was compared"),
        (change("points", 0, "sizes", to={}), "point min: has other dims"),
        (change("points", 0, "sizes", "batch", to=65), "point min: no profile has its sizes"),
        (change("points", 0, "not_compared", to="no memory"), "point min: not compared, but"),
        (drop("points", 0, "errors", "torch engine"), "the engine was not compared with torch"),
        (change("points", 0, "errors", "torch engine", to={}), "other outputs than the model's"),
        (change("points", 0, "errors", "torch engine", "y", to=[3e-6, 2e-5]), "is beyond the tol"),
        (change("points", 0, "errors", "torch engine", "y", to=[None, None]), "is beyond the tol"),
        (change("points", 0, "failed", to={"torch engine y": "off"}), "torch engine y failed"),
        (change("tolerance", to=None), "is beyond the tolerance"),
        (change("tolerance", to={"atol": 1e-9, "rtol": 1e-9}), "is beyond the tolerance"),
        (change("largest", "torch engine", "y", to=[0.0, 0.0]), "largest: not the largest"),
        (change("checks", 2, "passed", to=False), "check determinism of engine: failed"),
        (change("checks", 2, "detail", to=""), "check determinism of engine: failed, or has no"),
        (drop("checks", 2), "check determinism of engine: missing"),
        (drop("checks", 5), "check batch rows of engine: missing, and no note says why"),
        (drop("files", "engine.plan"), "files: engine.plan is missing"),
        (change("files", "model.onnx", "sha256", to=HASH[1:]), "files: model.onnx: sha256 or"),
        (change("files", "model.onnx", "bytes", to=0), "files: model.onnx: sha256 or size"),
        (change("build", "plan_bytes", to=1), "files: engine.plan is not as large"),
        (change("build", "gpu", to="NVIDIA L4"), "build: on another GPU"),
    ],
)  # fmt: skip
def test_a_spoilt_record_is_noticed(
    record: Record, spoil: Callable[[Record], None], message: str
) -> None:
    spoil(record)
    assert any(message in fault for fault in verified_record.faults(record))


def test_an_error_may_be_within_either_part_of_the_tolerance(record: Record) -> None:
    record["points"][0]["errors"]["torch engine"]["y"] = [1e-3, 9e-6]  # of a value near 110
    record["largest"] = verified_record.largest(record["points"])
    assert verified_record.faults(record) == []


def manifest() -> Record:
    """A small manifest with one rewritten node, one failed check and one point left out."""
    results = [
        {"pair": ["torch", "engine"], "output": "y", "max_abs": 0.1234567890123, "max_rel": None,
         "passed": False, "why": "off"},
    ]  # fmt: skip
    one_pass = {"needed": True, "evidence": "e", "refused": [], "skipped": False, "rewritten": []}
    return {
        "schema": 4, "name": "m", "created": "today", "precision": "fp16", "reference": "torch",
        "model": {"source": "m.py:make", "options": {"deep": True, "kind": "a b"},
                  "inputs": ["x:n"], "dims": [],
                  "weights": {"file": "w.pt", "sha256": HASH, "seed": None}},
        "dims": [], "inputs": [], "outputs": [], "rules": [], "padding": None,
        "tolerance": {"rtol": 1e-3, "atol": 1e-4, "why": "given with --tolerance"},
        "engine_tolerance": {"fp16": {"rtol": 0.01, "atol": 0.2, "differing": 0.001,
                                      "why": "given with --engine-tolerance"}},
        "target": {"name": "t", "version": "1"}, "engine_gpu": "NVIDIA GeForce RTX 4090",
        "engine_compared": True, "versions": {}, "stages": [{"name": "build", "seconds": 1.23}],
        "profiles": [{"name": "profile0", "ranges": {"n": [1, 2, 3]}}],
        "export": {"opset": 18, "seconds": 1.0},
        "rewrite": {"nodes_before": 3, "nodes_after": 4, "warnings": [], "passes": [
            {**one_pass, "name": "a", "rewritten": [{"node": "n", "op": "Add", "detail": "d"}]},
            {**one_pass, "name": "b"}, {**one_pass, "name": "c", "needed": False}]},
        "build": {"seconds": 2.04, "plan_bytes": 5, "warnings": ["in FP16: , , , , ,", "no cache"],
                  "optimization_level": 2, "plugins": ["p"], "timing_cache": "none: no cache"},
        "comparison": {"passed": False, "memory_limit_bytes": 50 * 2**30, "checks": [], "notes": [],
                       "points": [
            {"label": "min", "sizes": {"n": 1}, "compared": True, "why": "", "results": results},
            {"label": "max", "sizes": {"n": 3}, "compared": False, "why": "big", "results": []}]},
        "files": {}, "manifest_sha256": HASH,
    }  # fmt: skip


def test_a_record_keeps_what_proves_something() -> None:
    found = verified_record.record_of(manifest())
    assert found["name"] == "m-fp16-t-4090"
    assert found["command"] == (
        "pipeline convert m.py:make --option deep=true --option 'kind=a b' --input x:n "
        "--weights w.pt --target t --precision fp16 --profile n=1:2:3 --tolerance 0.001,0.0001 "
        "--engine-tolerance 0.01,0.2,0.001 --optimization-level 2 --plugin p --memory-limit 50GiB"
    )
    assert found["points"] == [
        {"label": "min", "sizes": {"n": 1}, "errors": {"torch engine": {"y": [0.123457, None]}},
         "failed": {"torch engine y": "off"}},
        {"label": "max", "sizes": {"n": 3}, "not_compared": "big", "errors": {}},
    ]  # fmt: skip
    assert found["rewrite"] == {
        "nodes_before": 3, "nodes_after": 4, "rewritten": {"a": 1}, "idle": ["b"],
    }  # fmt: skip
    assert found["build"]["warnings"] == ["in FP16: , ...", "no cache"]
    assert found["manifest"]["schema"] == 4
    own = verified_record.record_of(manifest(), "pipeline verify m")
    assert own["command"] == "pipeline verify m"


def test_the_same_facts_of_schema_5_make_the_same_record() -> None:
    """In schema 5, declared values are in ``interface``."""
    older = manifest()
    moved = (
        "dims", "inputs", "outputs", "rules", "padding", "profiles", "tolerance",
        "engine_tolerance",
    )  # fmt: skip
    newer = {key: value for key, value in older.items() if key not in moved}
    newer |= {"schema": 5, "interface": {key: older[key] for key in moved}}
    record = verified_record.record_of(newer)
    assert record["manifest"].pop("schema") == 5
    want = verified_record.record_of(older)
    want["manifest"].pop("schema")
    assert record == want


def written(place: Path, content: Record) -> Path:
    place.write_text(json.dumps(content))
    return place


def test_a_manifest_that_is_no_evidence_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    edited = written(tmp_path / "edited.json", manifest())
    older = written(tmp_path / "older.json", {**manifest(), "schema": 2})
    half = copy.deepcopy(manifest()) | {"comparison": None}
    half["manifest_sha256"] = verified_record.hash_of(half)
    half_done = written(tmp_path / "half.json", half)
    failed = manifest()
    failed["manifest_sha256"] = verified_record.hash_of(failed)
    bad = written(tmp_path / "failed.json", failed)
    out = tmp_path / "out"
    words = [str(path) for path in (edited, older, half_done, bad, tmp_path / "none.json")]
    monkeypatch.setattr(sys, "argv", ["verified_record.py", *words, "--out", str(out)])
    assert verified_record.main() == 1
    said = capsys.readouterr().err
    assert f"{edited}: was changed after it was written" in said
    assert f"{older}: not a manifest of schema 3, 4, 5, 6" in said
    assert "m: not done yet: comparison" in said
    assert "passed: the comparison failed" in said
    assert "none.json: cannot be read as JSON" in said
    assert not out.exists()


@pytest.mark.parametrize("width", [40, 200, 1000])
def test_compact_json_is_the_same_json(record: Record, width: int) -> None:
    content = {**record, "empty": {}, "none": [], "words": ["a" * 30] * 9, "x": [[1, [2.5]]] * 20}
    text = compact(content, width)
    assert json.loads(text) == content
    assert list(json.loads(text)) == list(content)
    longest = max(len(json.dumps(word)) for word in _words(content))
    assert max(map(len, text.splitlines())) <= max(width, 2 * longest + 10)


def _words(value: object) -> list[object]:
    """All keys and values that can't be broken into lines."""
    if isinstance(value, dict):
        return [word for key, item in value.items() for word in [key, *_words(item)]]
    if isinstance(value, list):
        return [word for item in value for word in _words(item)]
    return [value]


def test_an_engine_is_held_to_its_measured_tolerance() -> None:
    record = read(RESULTS / "verified" / "hf_bert-fp16-tensorrt-8.6-h100.json")
    assert verified_record.faults(record) == []
    del record["measured_tolerance"]
    assert any("is beyond the tolerance" in fault for fault in verified_record.faults(record))
