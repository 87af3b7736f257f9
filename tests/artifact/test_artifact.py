"""The artifact: its manifest, changed files, reads during swaps, and the script."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from helpers import rehash
from onnx import TensorProto, helper

from pipeline.artifact.artifact import Artifact, finish, read_again
from pipeline.artifact.manifest import (
    BuildInfo,
    ComparisonInfo,
    DynamicInfo,
    ExportInfo,
    Manifest,
    ModelInfo,
    PointInfo,
    RewriteInfo,
    StageInfo,
    TargetInfo,
    Weights,
    now,
)
from pipeline.artifact.records import decode, encode
from pipeline.artifact.reproduce import StoredRun, reproduce_script
from pipeline.errors import ArtifactError
from pipeline.graph.change import Change
from pipeline.machine.files import FileInfo, hash_file
from pipeline.machine.swap_folder import replacing
from pipeline.rewrite.record import PassRecord
from pipeline.spec.dims import Dim, DimExpr
from pipeline.spec.file_names import EXPORTED, MANIFEST, MODEL, PLAN, REPRODUCE
from pipeline.spec.findings import Facts, note
from pipeline.spec.interface import Interface
from pipeline.spec.padding import Padding
from pipeline.spec.profiles import Profile
from pipeline.spec.recipe import HalfInfo, Island
from pipeline.spec.rules import AppliedRule
from pipeline.spec.tensors import Input, Output, Tolerance
from pipeline.spec.verdicts import Check, RowChange, Verdict

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SUPPORT = HERE.parent / "support"

BARE = Manifest(
    name="raft",
    created="2025-01-31T12:00:00+00:00",
    model=ModelInfo("raft", {}, Weights(None, None, 0), {}),
    interface=Interface(tolerance=Tolerance(1e-3, 1e-4, "measured")),
    target=TargetInfo("rtx-1.7", "tensorrt_rtx", None),
    precision="fp32",
)
H, W = Dim("h", 136, max=2160, multiple_of=8), Dim("w", 136, 1024, 3840, 8)
IMAGE = Input("image", (1, 3, H, W))
NAN: Facts = {"whose": "exported", "others": "rewritten"}
TOO_LARGE = note("too-large", need_bytes=3 << 30, limit_bytes=1 << 30)
MULTIPLE = AppliedRule(
    kind="multiple", dim="h", others=(), size_rule="", line="m.py:3 in f: g(x)",
    text="h must be a multiple of 8",
)  # fmt: skip
FULL = dataclasses.replace(
    BARE,
    model=ModelInfo(
        "module:factory",
        {"small": True, "updates": 12, "scale": 1.0, "kind": "ä"},
        Weights("w.safetensors", "ab" * 32, None),
        {"torchvision": "0.28.0"},
    ),
    interface=Interface(
        inputs=(IMAGE, Input("half", (H // 2, W + H), "int64", 0.0, 9.0)),
        outputs=(
            Output("flow", (1, 2, H, 8 * (W // 8)), dtype="float32"),
            Output("seen", (DimExpr("found"),), Tolerance(0.0, 0.0, "exact", 0.01), "int64"),
        ),
        rules=("h + w <= 5000",),
        padding=Padding({"h": 8}),
        profiles=(Profile("all", {"h": (136, 440, 2160)}),),
        tolerance=Tolerance(1e-3, 1e-4, "measured"),
        engine_tolerance={"fp16": Tolerance(1e-2, 1e-3, "measured on a GPU")},
    ),
    target=TargetInfo("tensorrt-8.6", "tensorrt", "8.6.0", ("9.0",)),
    export=ExportInfo(
        18, "torch.export", 12.5, (MULTIPLE,), {"h": DynamicInfo("x axis 2", (136, 144))}
    ),
    rewrite=RewriteInfo(
        (
            PassRecord(
                "lower_resize",
                True,
                "Resize by scales -> Resize by sizes",
                ("TensorRT below 10",),
                ("NVIDIA/TensorRT#3560",),
                rewritten=(Change("/up/Resize", "Resize", "to sizes"),),
                refused=(Change("/up2/Resize", "Resize", "antialias"),),
            ),
        ),
        ("a warning",),
        100,
        90,
    ),
    build=BuildInfo(
        3.0,
        1000,
        "(INVALID, 0)",
        80,
        (),
        ("foo.so",),
        None,
        2,
        "h200.cache, 0 bytes before",
        "NVIDIA H200",
        {"foo.so": "0" * 64},
        HalfInfo(70, (Island("norm", 2, "module norm at model.py:3"),), 9, 1.5, 0.4),
    ),
    comparison=ComparisonInfo(
        1 << 30,
        (
            PointInfo(
                "min",
                {"h": 136, "w": 144},
                1000,
                (
                    Verdict("agrees", ("torch", "exported"), "flow", 1e-6, 0.0),
                    Verdict("not-finite", ("exported", "rewritten"), "flow", facts=NAN),
                ),
            ),
            PointInfo("max", {"h": 2160, "w": 3840}, 3 << 30, (), TOO_LARGE),
        ),
        (
            note("source-is-onnx"),
            note(
                "weak-parts",
                output="y",
                count=6,
                of=9,
                axis=1,
                names=(1, 2, "..."),
                rms=0.5,
                atol=1.0,
            ),
        ),
        (
            Check("determinism", "engine", "bit-identical", {"h": 136}, {"runs": 3, "count": 1}),
            Check(
                "batch rows",
                "engine",
                "rows-as-in-model",
                {"h": 136},
                {},
                (RowChange("position", "flow", 0.5, 1, True),),
            ),
        ),
    ),
    engine_compared=True,
    engine_compared_why="compared on NVIDIA H200",
    engine_gpu="NVIDIA H200",
    stages=(StageInfo("export", 12.5, {"torch": 12.0}, None),),
    versions={"python": "3.11"},
    keys={"export": "cd" * 32},
)


def make(path: Path, mark: str = "one", manifest: Manifest = FULL) -> Manifest:
    with replacing(path, keep=False) as staging:
        (staging / PLAN).write_bytes(mark.encode() * 1000)
        (staging / MODEL).write_text(mark)
        (staging / EXPORTED).write_text(mark)
        (staging / "comparison").mkdir()
        (staging / "comparison" / "inputs.json").write_text("[]")
        return finish(staging, dataclasses.replace(manifest, name=mark))


@pytest.fixture
def place(tmp_path: Path) -> Path:
    path = tmp_path / "raft"
    make(path)
    return path


def refusal(path: Path) -> str:
    """The error of opening an artifact. It is always one line that ends with what to do."""
    with pytest.raises(ArtifactError) as caught:
        Artifact.open(path)
    said = str(caught.value)
    assert "\n" not in said
    assert said.startswith(str(path))
    return said


# manifest


@pytest.mark.parametrize("manifest", [BARE, FULL])
def test_round_trip(manifest: Manifest) -> None:
    text = manifest.to_json()
    assert Manifest.from_json(text) == manifest
    assert Manifest.from_json(text).to_json() == text


def test_the_keys_are_the_documented_ones() -> None:
    """Other programs read these keys. A change needs another schema number."""
    content = json.loads(FULL.to_json())
    stands = " ".join(content)
    assert stands == (
        "schema name created model interface reference target precision export rewrite build "
        "comparison engine_compared engine_compared_why engine_gpu stages versions keys files "
        "manifest_sha256"
    )
    declared = content["interface"]
    assert " ".join(declared) == (
        "dims inputs outputs rules padding profiles tolerance engine_tolerance"
    )
    assert [dim["name"] for dim in declared["dims"]] == ["h", "w"]
    assert declared["dims"][0] == {
        "name": "h",
        "min": 136,
        "opt": 536,
        "max": 2160,
        "multiple_of": 8,
        "offset": 0,
        "defaulted": ["opt"],
    }
    assert declared["inputs"][0] == {
        "name": "image", "shape": [1, 3, "h", "w"], "dtype": "float32", "low": -1.0, "high": 1.0,
        "pattern": "", "values": None,
    }  # fmt: skip
    assert declared["outputs"][0] == {
        "name": "flow", "shape": [1, 2, "h", "8 * (w // 8)"], "tolerance": None, "dtype": "float32",
        "metric": None,
    }  # fmt: skip
    assert declared["padding"] == {"multiples": {"h": 8}, "mode": "replicate", "align": "center"}
    assert declared["tolerance"] == {
        "rtol": 1e-3, "atol": 1e-4, "why": "measured", "differing": 0.0, "axis": None, "parts": [],
    }  # fmt: skip
    assert declared["profiles"] == [{"name": "all", "ranges": {"h": [136, 440, 2160]}}]


def test_what_is_not_finite_is_null() -> None:
    facts: Facts = {"whose": "a", "share": math.nan}
    verdict = Verdict("not-finite", ("a", "b"), "y", math.nan, math.inf, facts)
    point = PointInfo("min", {}, 0, (verdict,))
    text = dataclasses.replace(BARE, comparison=ComparisonInfo(0, (point,))).to_json()
    comparison = Manifest.from_json(text).comparison
    assert comparison is not None
    known: Facts = {"whose": "a", "share": None}
    assert comparison.points[0].results[0] == Verdict("not-finite", ("a", "b"), "y", facts=known)


def test_a_float_of_numpy_is_written_as_a_float() -> None:
    """A tolerance may be computed with numpy, and stands in the facts of notes and verdicts."""
    found = note("no-engine-tolerance", precision="fp16", atol=np.float64(1e-4))
    text = dataclasses.replace(FULL, comparison=ComparisonInfo(1, (), (found,))).to_json()
    read = Manifest.from_json(text).comparison
    assert read is not None
    assert read.notes[0].facts["atol"] == 1e-4


def test_a_stored_text_stays_as_it_was_written_and_decides_nothing() -> None:
    content = json.loads(FULL.to_json())
    findings = [content["comparison"]["notes"][0], content["comparison"]["checks"][0]]
    findings.append(content["comparison"]["points"][0]["results"][1])
    for finding in findings:
        finding["text"] = "an older sentence"
    del content["manifest_sha256"]
    comparison = decode(content["comparison"], ComparisonInfo, "manifest.json", "comparison")
    assert comparison.notes[0].text == comparison.checks[0].text == "an older sentence"
    assert comparison.points[0].results[1].text == "an older sentence"
    assert FULL.comparison is not None
    assert [check.passed for check in comparison.checks] == [True, True]
    assert comparison.passed is FULL.comparison.passed is False


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        (["points", 0, "results", 0, "kind"], "differs"),
        (["checks", 0, "kind"], "beyond-tolerance"),
        (["notes", 0, "kind"], "nothing-compared"),
    ],
)
def test_whether_a_comparison_passed_follows_from_the_kinds(
    path: list[str | int], kind: str
) -> None:
    assert FULL.comparison is not None
    (point, large) = FULL.comparison.points
    good = dataclasses.replace(point, results=point.results[:1])
    comparison = dataclasses.replace(FULL.comparison, points=(good, large))
    assert comparison.passed
    content = encode(comparison)
    at(content, path[:-1]).update({path[-1]: kind, "text": "a sentence"})
    with pytest.raises(ArtifactError, match="passed: is True, which contradicts other fields"):
        decode(content, ComparisonInfo, "manifest.json", "comparison")
    content["passed"] = False
    assert not decode(content, ComparisonInfo, "manifest.json", "comparison").passed


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"stages": (StageInfo("a", math.inf, {}, None),)},
            r"stages\[0\].seconds: expected a finite number",
        ),
        ({"precision": 16}, "precision: expected a string"),
        ({"engine_compared": 1}, "engine_compared: expected true or false"),
        ({"stages": (StageInfo("a", np.float32(1), {}, None),)}, r"stages\[0\].seconds: expected"),
        ({"versions": {1: "a"}}, "versions: expected an object"),
    ],
)
def test_a_wrong_value_is_not_written(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ArtifactError, match=said):
        dataclasses.replace(FULL, **changes).to_json()


def at(content: Any, path: list[str | int]) -> Any:
    for key in path:
        content = content[key]
    return content


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (
            ["comparison", "points", 1, "sizes"],
            [],
            "comparison.points[1].sizes: expected an object",
        ),
        (["comparison", "points", 0, "sizes", "h"], 1.0, "points[0].sizes.h: expected an integer"),
        (["comparison", "points", 1, "left_out"], 1, "points[1].left_out: expected an object"),
        (["comparison", "points", 1, "left_out", "kind"], "?", "left_out.kind: expected 'too-l"),
        (["comparison", "checks", 0, "kind"], "?", "checks[0].kind: expected 'bit-identical' or"),
        (["comparison", "notes", 1, "facts", "names"], [True], "facts.names[0]: expected an int"),
        (["comparison", "points", 0, "results", 0, "kind"], "differs", "results[0]: lacks 'index'"),
        (["comparison", "passed"], True, "passed: is True, which contradicts other fields"),
        (["comparison", "points"], {}, "comparison.points: expected a list"),
        (["comparison", "points", 0, "results", 0, "pair"], ["a"], "pair: expected a list of 2"),
        (["comparison", "memory_limit_bytes"], True, "memory_limit_bytes: expected an integer"),
        (
            ["interface", "inputs", 0, "shape", 2],
            1.5,
            "interface.inputs[0].shape[2]: expected an integer or a string",
        ),
        (["interface", "inputs", 0, "shape", 2], "h +", "interface.inputs[0].shape[2]: size expr"),
        (["interface", "inputs", 0, "shape", 2], "q", "inputs[0].shape[2]: no dim is called q"),
        (["interface", "inputs", 0, "shape", 0], 0, "interface.inputs[0]: image axis 0: size 0"),
        (["interface", "inputs", 0, "dtype"], "str5", "interface.inputs[0]: image: unknown dtype"),
        (["interface", "outputs", 0, "dtype"], "flat", "outputs[0]: output flow: unknown dtype"),
        (["interface", "outputs", 0, "dtype"], None, "interface.outputs[0].dtype: expected a s"),
        (["interface", "outputs", 0, "shape"], None, "interface.outputs[0].shape: expected a list"),
        (["interface", "dims", 1, "name"], "h", "interface.dims[1].name: two dims are called h"),
        (["interface", "dims", 0, "max"], 100, "interface.dims[0]: dim h: min=136 is greater"),
        (["interface", "dims", 0, "defaulted"], ["q"], "dims[0].defaulted[0]: expected 'min' or"),
        (["interface", "rules"], ["h + w"], "interface.rules[0]: size rule 'h + w': expected two"),
        (["interface", "rules"], ["h <= q"], "interface.rules[0]: no dim is called q"),
        (["interface", "padding", "multiples"], {"q": 8}, "padding.multiples: no dim is called q"),
        (["interface", "padding", "mode"], "odd", "interface.padding.mode: expected 'replicate'"),
        (
            ["interface", "profiles", 0, "ranges"],
            {"h": [136, 440, 9999]},
            "interface.profiles[0]: profile all: h=9999 is outside 136..2160",
        ),
        (["model", "options", "small"], None, "model.options.small: expected an integer or"),
        (["target", "flavour"], "tvm", "target.flavour: expected 'tensorrt' or 'tensorrt_rtx'"),
        (["target", "flavour"], [], "target.flavour: expected 'tensorrt' or 'tensorrt_rtx'"),
        (
            ["interface", "tolerance", "rtol"],
            "0.1",
            "interface.tolerance.rtol: expected a finite number",
        ),
        (["interface", "tolerance", "rtol"], -0.1, "interface.tolerance: tolerance rtol=-0.1"),
        (
            ["interface", "tolerance", "rtol"],
            10**400,
            "interface.tolerance.rtol: expected a finite number",
        ),
        (["interface", "dims", 0, "min"], "136", "interface.dims[0].min: expected an integer"),
        (["export"], 3, "export: expected an object"),
        (["schema"], "1", "schema: expected an integer"),
        (["schema"], 2, "schema 2 is not supported; this version reads 12"),
        (["name"], "other", "was changed after it was written"),
        (["manifest_sha256"], "0" * 64, "was changed after it was written"),
        (["manifest_sha256"], None, "manifest_sha256: is missing"),
    ],
)
def test_a_wrong_field_is_named(path: list[str | int], value: Any, said: str) -> None:
    content = json.loads(FULL.to_json())
    at(content, path[:-1])[path[-1]] = value
    with pytest.raises(ArtifactError) as caught:
        Manifest.from_json(json.dumps(content))
    assert str(caught.value).startswith("manifest.json: ")
    assert said in str(caught.value)


def test_an_artifact_of_an_older_schema_has_to_be_converted_again(place: Path) -> None:
    content = json.loads((place / MANIFEST).read_text())
    content["schema"] = 2
    del content["engine_gpu"]
    (place / MANIFEST).write_text(json.dumps(content))
    assert refusal(place).endswith(
        "schema 2 is not supported; this version reads 12; convert again"
    )


def test_missing_and_unknown_fields_are_named() -> None:
    content = json.loads(FULL.to_json())
    del content["comparison"]["points"][1]["left_out"]
    with pytest.raises(ArtifactError, match=r"comparison\.points\[1\]\.left_out: is missing"):
        Manifest.from_json(json.dumps(content))
    content["comparison"]["points"][1].update(left_out=None, because="")
    with pytest.raises(ArtifactError, match=r"comparison\.points\[1\]\.because: is unknown"):
        Manifest.from_json(json.dumps(content))


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "null", "[" * 10**5, "\ud800", b"\xff\xfe\xff"),
        *('{"a": NaN}', '{"a":1,"a":2}', "9" * 5000),
    ],
)
def test_no_json(text: str | bytes) -> None:
    with pytest.raises(ArtifactError, match=r"^manifest\.json: "):
        Manifest.from_json(text)


def test_infinity_in_json_is_no_number() -> None:
    text = FULL.to_json().replace('"rtol": 0.001', '"rtol": 1e999')
    with pytest.raises(ArtifactError, match=r"tolerance\.rtol: expected a finite number"):
        Manifest.from_json(text)


def test_now() -> None:
    assert len(now()) == len("2025-01-31T12:00:00+00:00")
    assert now().endswith("+00:00")


# artifact


def test_open(place: Path) -> None:
    artifact = Artifact.open(place)
    assert artifact.manifest.name == "one"
    assert list(artifact.manifest.files) == ["comparison/inputs.json", PLAN, EXPORTED, MODEL]
    assert artifact.manifest.files[PLAN] == hash_file(place / PLAN)
    assert artifact.plan.read_bytes() == artifact.read(PLAN) == b"one" * 1000
    assert (artifact.model, artifact.exported) == (place / MODEL, place / EXPORTED)
    assert artifact.comparison.is_dir()
    assert artifact.extra == ()


def test_what_finish_returns_is_what_is_read(tmp_path: Path) -> None:
    assert make(tmp_path / "raft") == Artifact.open(tmp_path / "raft").manifest


def test_a_partial_artifact_says_what_to_run(tmp_path: Path) -> None:
    with replacing(tmp_path / "raft", keep=False) as staging:
        (staging / EXPORTED).touch()
        finish(staging, BARE)
    artifact = Artifact.open(tmp_path / "raft")
    assert artifact.exported.stat().st_size == 0
    with pytest.raises(ArtifactError, match=r"has no engine\.plan yet; run the build stage"):
        _ = artifact.plan
    with pytest.raises(ArtifactError, match=r"the manifest does not list engine\.plan"):
        artifact.read(PLAN)


def test_the_next_stage_adds_to_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "raft"
    make(path, manifest=BARE)
    with replacing(path, keep=True) as staging:
        before = Artifact.open(staging).manifest
        (staging / REPRODUCE).write_text("#!/bin/sh\n")
        finish(staging, dataclasses.replace(before, engine_compared=True))
    after = Artifact.open(path).manifest
    assert after.files.keys() == before.files.keys() | {REPRODUCE}
    assert after.engine_compared


def test_extra_files_are_reported(place: Path) -> None:
    (place / "notes.txt").touch()
    (place / "comparison" / "more.json").touch()
    assert Artifact.open(place).extra == ("comparison/more.json", "notes.txt")


def test_odd_names(tmp_path: Path) -> None:
    with replacing(tmp_path / "raft", keep=False) as staging:
        for name in ("ü \n'\"", "-x", "..data", os.fsdecode(b"\xff")):
            (staging / name).write_text(name[:1], errors="surrogateescape")
        finish(staging, BARE)
    assert len(Artifact.open(tmp_path / "raft").manifest.files) == 4


@pytest.mark.parametrize("kind", ["link", "folder link", "pipe"])
def test_finish_takes_plain_files_only(tmp_path: Path, kind: str) -> None:
    if kind == "pipe":
        os.mkfifo(tmp_path / "odd")
    else:
        (tmp_path / "odd").symlink_to("/etc/passwd" if kind == "link" else "/usr")
    with pytest.raises(ArtifactError, match="odd: an artifact has plain files only"):
        finish(tmp_path, BARE)


# tampering

AGAIN = "copy it again, or `pipeline build {}`"


def test_no_such_folder(place: Path) -> None:
    assert ": no such folder" in refusal(place / "none")
    assert "is not a folder" in refusal(place / MODEL)
    assert "it has no manifest.json" in refusal(place / "comparison")


@pytest.mark.parametrize("name", [PLAN, MODEL, "comparison/inputs.json"])
def test_a_flipped_bit(place: Path, name: str) -> None:
    content = bytearray((place / name).read_bytes())
    for index in {0, len(content) // 2, len(content) - 1}:
        content[index] ^= 1
        (place / name).write_bytes(content)
        advice = "convert again" if name == MODEL else AGAIN.format(place)
        assert refusal(place) == (
            f"{place}/{name}: its content was changed after it was written; {advice}"
        )
        with pytest.raises(ArtifactError, match="its content was changed"):
            Artifact.open(place, check=False).read(name)
        content[index] ^= 1


def test_a_cut_plan(place: Path) -> None:
    os.truncate(place / PLAN, 10)
    said = f"{place}/{PLAN}: is cut short: it has 10 of 3000 bytes; {AGAIN.format(place)}"
    assert refusal(place) == said
    with pytest.raises(ArtifactError, match="is cut short: it has 10 of 3000"):
        Artifact.open(place, check=False).read(PLAN)


def test_a_grown_plan(place: Path) -> None:
    os.truncate(place / PLAN, 4000)
    assert "its content was changed" in refusal(place)


def test_a_missing_file(place: Path) -> None:
    (place / PLAN).unlink()
    assert refusal(place) == f"{place}/{PLAN}: is missing; {AGAIN.format(place)}"
    with pytest.raises(ArtifactError, match="can't be read: No such file"):
        Artifact.open(place, check=False).read(PLAN)


def test_something_else_than_a_file(place: Path) -> None:
    (place / PLAN).unlink()
    os.mkfifo(place / PLAN)
    assert "is not a plain file" in refusal(place)
    (place / PLAN).unlink()
    (place / PLAN).mkdir()
    assert "is not a plain file" in refusal(place)


def test_an_edited_manifest(place: Path) -> None:
    text = (place / MANIFEST).read_text()
    (place / MANIFEST).write_text(
        text.replace('"engine_compared": true', '"engine_compared": false')
    )
    assert refusal(place) == (
        f"{place}/manifest.json: was changed after it was written (its hash differs); convert again"
    )


def test_a_manifest_cut_anywhere(place: Path) -> None:
    content = (place / MANIFEST).read_bytes()
    assert len(content) > 3000
    for length in range(0, len(content) - 1, 50):
        (place / MANIFEST).write_bytes(content[:length])
        assert "is cut short or not JSON" in refusal(place)


def resign(place: Path, files: dict[str, FileInfo]) -> None:
    """Writes a manifest with a right hash, but with these files."""
    stated = {name: dataclasses.asdict(info) for name, info in files.items()}
    rehash(place / MANIFEST, lambda content: content.update(files=stated))


@pytest.mark.parametrize(
    "name",
    [
        *("../secret", "comparison/../../secret", "/etc/passwd", "comparison/.."),
        *("", ".", "./model.onnx", "a//b", "a/", "..\\secret", "C:secret", "a\0b"),
    ],
)
@pytest.mark.parametrize("check", [True, False])
def test_names_that_lead_out_of_the_folder(place: Path, name: str, check: bool) -> None:
    secret = place.parent / "secret"
    secret.write_text("secret")
    resign(place, {name: hash_file(secret)})
    with pytest.raises(ArtifactError, match=r"is not a plain relative name|contains "):
        Artifact.open(place, check=check)


@pytest.mark.parametrize("target", ["../secret", "loop"])
def test_links(place: Path, target: str) -> None:
    secret = place.parent / "secret"
    secret.write_text("secret")
    (place / "loop").symlink_to(target)
    resign(place, {"loop": hash_file(secret)})
    assert f"{place}/loop: is a link; an artifact has plain files only" in refusal(place)


def test_a_linked_folder_that_leads_out(place: Path) -> None:
    secret = place.parent / "outside" / "secret"
    secret.parent.mkdir()
    secret.write_text("secret")
    (place / "linked").symlink_to("../outside")
    resign(place, {"linked/secret": hash_file(secret)})
    assert f"{place}/linked: is a link; an artifact has plain files only" in refusal(place)


def test_an_artifact_behind_a_link(place: Path) -> None:
    latest = place.with_name("latest")
    latest.symlink_to("raft")
    assert Artifact.open(latest).manifest.name == "one"


# readers during swaps

WRITER = """
    import sys, time
    from pathlib import Path
    from pipeline.machine import swap_folder
    from test_artifact import make
    if sys.argv[2] == "no exchange":
        swap_folder._find_exchange = lambda: None
    for turn in range(150):
        make(Path(sys.argv[1]), f"turn {turn}")
        if turn == 0:
            print("ready", flush=True)
        time.sleep(0.005)
"""


def start_writer(place: Path, how: str) -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(WRITER), str(place), how],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, HERE, SUPPORT)))},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    return child


@pytest.mark.skipif(sys.platform != "linux", reason="renameat2 is Linux's")
def test_a_reader_never_sees_a_half(place: Path) -> None:
    """`open` returns files that belong to their manifest, and never fails.

    This holds however often the folder is replaced meanwhile.
    """
    child = start_writer(place, "exchange")
    seen = set()
    while child.poll() is None:
        seen.add(Artifact.open(place).manifest.name)
    assert child.returncode == 0
    assert len(seen) > 10


def test_without_exchange_a_reader_finds_the_whole_or_nothing(place: Path) -> None:
    child = start_writer(place, "no exchange")
    seen = set()
    while child.poll() is None:
        try:
            seen.add(Artifact.open(place).manifest.name)
        except ArtifactError as error:
            assert ": no such folder" in str(error)
    assert child.returncode == 0
    assert len(seen) > 10


def test_a_handle_notices_that_the_folder_was_replaced(place: Path) -> None:
    artifact = Artifact.open(place)
    make(place, "two")
    with pytest.raises(ArtifactError, match="its content was changed"):
        artifact.read(PLAN)


def test_a_folder_that_is_always_replaced(place: Path) -> None:
    turns = iter(range(1000))

    def read() -> None:
        make(place, f"turn {next(turns)}")
        raise ArtifactError("a file of another turn")

    with pytest.raises(ArtifactError, match="conversions keep replacing it"):
        read_again(place, read)
    assert next(turns) < 100


# reproduce.sh


def save_model(path: Path, factor: float) -> None:
    node = helper.make_node("Mul", ["x", "k"], ["y"])
    shape: list[int | str] = [1, "h", "w"]
    graph = helper.make_graph(
        [node],
        "times",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
        [helper.make_tensor("k", TensorProto.FLOAT, [], [factor])],
    )
    opset = helper.make_opsetid("", 18)
    onnx.save(helper.make_model(graph, opset_imports=[opset], ir_version=9), path)


def save_runs(folder: Path, factor: float) -> list[StoredRun]:
    from polygraphy.comparator import RunResults
    from polygraphy.json import save_json

    random = np.random.default_rng(0)
    inputs = [
        {"x": random.random((1, h, w), dtype=np.float32)} for h, w in ((3, 4), (5, 7), (16, 9))
    ]
    results = RunResults()
    results.add([{"y": i["x"] * np.float32(factor)} for i in inputs], runner_name="torch")
    folder.mkdir()
    save_json(inputs, str(folder / "all inputs.json"))
    results.save(str(folder / "it's torch's.json"))
    return [StoredRun("comparison/all inputs.json", "comparison/it's torch's.json")]


def run_script(path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the script from another folder, with the polygraphy of this Python."""
    where = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["sh", str(path), *arguments],
        cwd="/",
        env={**os.environ, "PATH": where, "CDPATH": "/usr"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


SCRIPTS = (  # the factors of exported.onnx, of model.onnx and of what is stored; whether it passes
    (2.0, 2.0, 2.0, True),
    (2.1, 2.0, 2.0, False),
    (2.0, 2.1, 2.0, False),
    (2.0, 2.0, 2.1, False),
    (math.nan, math.nan, math.nan, False),
)


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> list[subprocess.CompletedProcess[str]]:
    """The results of all `SCRIPTS`, two at once, because each starts Python twice.

    They are written one by one, because Polygraphy's first use of an array is not thread-safe.
    """
    places = []
    for exported, model, stored, _ in SCRIPTS:
        folder = tmp_path_factory.mktemp("script") / "- an 'odd' $(name)"
        folder.mkdir()
        save_model(folder / EXPORTED, exported)
        save_model(folder / MODEL, model)
        runs = save_runs(folder / "comparison", stored)
        text = reproduce_script(runs, {"y": Tolerance(1e-4, 1e-5, "-")}, flavour="tensorrt_rtx")
        (folder / REPRODUCE).write_text(text)
        places.append(folder / REPRODUCE)
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run_script, places))


@pytest.mark.parametrize("number", range(len(SCRIPTS)), ids=lambda n: str(SCRIPTS[n]))
def test_the_script_repeats_the_comparison(
    ended: list[subprocess.CompletedProcess[str]], number: int
) -> None:
    exported, model, stored, passes = SCRIPTS[number]
    done = ended[number]
    assert done.returncode == (0 if passes else 1), done.stdout + done.stderr
    # both models ran, even if the first one failed
    outputs = done.stdout.split("] RUNNING |")[1:]
    assert ["Passed: 3/3" in output for output in outputs] == [exported == stored, model == stored]


def test_the_script_fails_where_a_file_is_missing(tmp_path: Path) -> None:
    runs = [StoredRun("comparison/inputs.json", "comparison/torch.json")]
    (tmp_path / REPRODUCE).write_text(
        reproduce_script(runs, {"y": Tolerance(0.0, 0.0, "-")}, flavour="tensorrt", models=[MODEL])
    )
    assert run_script(tmp_path / REPRODUCE).returncode == 1


def commands(text: str, recorder: Path, *arguments: str) -> list[list[str]]:
    """The polygraphy commands of a script, each with the flavour's switch first."""
    program = recorder / "polygraphy"
    program.write_text(
        '#!/bin/sh\nprintf "%s\\n" "${POLYGRAPHY_USE_TENSORRT_RTX-unset}" "$@" end\n'
    )
    program.chmod(0o755)
    (recorder / REPRODUCE).write_text(text)
    ended = subprocess.run(
        ["sh", str(recorder / REPRODUCE), *arguments],
        env={"PATH": f"{recorder}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
    )
    return [part.splitlines() for part in ended.stdout.split("\nend\n") if part]


@pytest.mark.parametrize(("flavour", "switch"), [("tensorrt_rtx", "1"), ("tensorrt", "0")])
def test_the_engine_runs_only_when_asked_for(tmp_path: Path, flavour: Any, switch: str) -> None:
    runs = [
        StoredRun("comparison/a.json", "comparison/b.json", 0),
        StoredRun("comparison/c.json", "comparison/d.json", 1),
        StoredRun("comparison/e.json", "comparison/f.json", None),
    ]
    text = reproduce_script(runs, {"y": Tolerance(1e-3, 0, "-")}, flavour=flavour)
    plain = commands(text, tmp_path)
    assert [(c[0], c[2]) for c in plain] == [("unset", f"./{m}") for m in (EXPORTED, MODEL)] * 3
    engine = commands(text, tmp_path, "--engine")[len(plain) :]
    assert [(c[0], c[2], c[c.index("--optimization-profile") + 1]) for c in engine] == [
        (switch, f"./{PLAN}", "0"),
        (switch, f"./{PLAN}", "1"),
    ]
    without = reproduce_script(runs, {"y": Tolerance(1e-3, 0, "-")}, flavour=flavour, plan=None)
    assert len(commands(without, tmp_path, "--engine")) == len(plain)


def test_polygraphy_takes_the_engine_command(tmp_path: Path) -> None:
    """Without a GPU, Polygraphy only shows what it would run."""
    (tmp_path / PLAN).touch()
    run = StoredRun("comparison/a.json", "comparison/b.json", 1)
    text = reproduce_script(
        [run], {"y": Tolerance(1e-3, 0, "-")}, flavour="tensorrt_rtx", models=()
    )
    command = commands(text, tmp_path, "--engine")[0]
    ended = subprocess.run(
        [Path(sys.executable).with_name("polygraphy"), *command[1:], "--gen", "-"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "TrtRunner(" in ended.stdout
    assert "optimization_profile=1" in ended.stdout
    assert "rtol={'': 0.001}, atol={'': 0.0}" in ended.stdout


@pytest.mark.parametrize("change", [lambda t: t, lambda t: t.replace("CDPATH= ", "")])
def test_the_script_is_plain_sh(tmp_path: Path, change: Callable[[str], str]) -> None:
    text = reproduce_script([], {"y": Tolerance(0, 0, "-")}, flavour="tensorrt")
    (tmp_path / REPRODUCE).write_text(change(text))
    assert subprocess.run(["sh", "-n", str(tmp_path / REPRODUCE)], check=False).returncode == 0
