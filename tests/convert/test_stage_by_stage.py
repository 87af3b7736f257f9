"""Each stage alone, on the result of the stage before."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import tiny
from helpers import files_under, perturb

from pipeline.artifact.artifact import Artifact
from pipeline.artifact.manifest import ComparisonInfo, Manifest
from pipeline.convert.driver import run_build, run_export, run_rewrite, verify
from pipeline.convert.options import Verify
from pipeline.convert.report import Report
from pipeline.errors import (
    ArtifactError,
    InputError,
    TargetMissing,
)
from pipeline.machine.target import TARGETS, installed_version
from pipeline.spec.config import Config
from pipeline.spec.model import Tolerance


def compared(manifest: Manifest) -> ComparisonInfo:
    assert manifest.comparison is not None
    return manifest.comparison


def without_times(manifest: Manifest) -> dict[str, Any]:
    facts = dataclasses.asdict(manifest)
    for name in ("created", "stages", "keys"):
        del facts[name]
    for name in ("export", "build"):
        del facts[name]["seconds"]
    facts["comparison"].pop("memory_limit_bytes")
    # the time of the conversion decides how many random sizes are compared
    notes = facts["comparison"]["notes"]
    facts["comparison"]["notes"] = [n for n in notes if n["kind"] != "random-sizes"]
    # Polygraphy stores the time of a run, and two builds differ in bytes
    facts["files"] = {
        name: info
        for name, info in facts["files"].items()
        if not name.startswith("comparison/") and name != "engine.plan"
    }
    for name in ("plan_bytes", "peak_bytes"):
        facts["build"].pop(name)
    return facts


@pytest.mark.usefixtures("zoo")
def test_stage_by_stage_is_the_same_as_run(converted: Report, tmp_path: Path) -> None:
    place = tmp_path / "a"
    report = run_export(Config("tiny", out=place))
    assert files_under(place) == ["exported.onnx", "manifest.json"]
    assert report.manifest.rewrite is None
    with pytest.raises(ArtifactError, match=r"has no model\.onnx\. Run `pipeline rewrite` first"):
        run_build(place)
    with pytest.raises(ArtifactError, match="no outputs of torch are stored"):
        verify(place)
    run_rewrite(place)
    run_build(place)
    report = verify(place, Verify(torch_model=True, trust=True))
    assert report.ok
    assert report.manifest == Artifact.open(place).manifest
    assert without_times(report.manifest) == without_times(converted.manifest)
    names = set(files_under(place))
    assert names == set(files_under(converted.path))


@pytest.mark.usefixtures("zoo")
def test_rewrite_for_a_target_that_is_not_installed(tmp_path: Path) -> None:
    if installed_version(TARGETS["tensorrt-8.6"]):
        pytest.skip("a TensorRT is installed here")
    place = tmp_path / "a"
    spec = tiny.of(
        lambda x: __import__("torch").nn.functional.instance_norm(x) * 3,
        tolerance=Tolerance(1e-3, 1e-4, "InstanceNorm"),
    )
    run_export(Config(spec, out=place))
    report = run_rewrite(place, "tensorrt-8.6")
    assert report.manifest.target.name == "tensorrt-8.6"
    assert report.manifest.rewrite is not None
    done = {p.name: len(p.rewritten) for p in report.manifest.rewrite.passes}
    assert done["decompose_instance_norm"] == 1
    with pytest.raises(
        TargetMissing, match=r"tensorrt is not installed here; pip install 'tensorr"
    ):
        run_build(place)
    assert Artifact.open(place).manifest == report.manifest
    # and back: the results for the other target are gone
    report = run_rewrite(place, "rtx-1.7")
    assert (place / "model.onnx").read_bytes() == (place / "exported.onnx").read_bytes()


@pytest.mark.usefixtures("zoo")
def test_rewriting_again_drops_what_came_of_the_old_model(artifact: Path) -> None:
    report = run_rewrite(artifact, "tensorrt-8.6")
    assert report.manifest.build is None
    assert report.manifest.comparison is None
    assert not (artifact / "engine.plan").exists()
    assert not report.manifest.engine_compared
    # torch's outputs are still valid, so another machine can verify without torch
    report = verify(artifact)
    assert report.ok
    assert report.manifest.engine_compared_why == "no engine was built"


def test_building_again_with_other_profiles(artifact: Path) -> None:
    report = run_build(artifact, profiles=["h=8:8:8", "h=9:20:30"])
    assert [p.name for p in report.manifest.interface.profiles] == ["profile0", "profile1"]
    assert report.manifest.comparison is None
    with pytest.raises(InputError, match="min=30 is greater than 20"):
        run_build(artifact, profiles=["h=30:25:20"])
    assert Artifact.open(artifact).manifest == report.manifest


@pytest.mark.usefixtures("zoo")
def test_tampering_between_stages_is_found(tmp_path: Path) -> None:
    place = tmp_path / "a"
    run_export(Config("tiny", out=place))
    run_rewrite(place)
    (place / "model.onnx").write_bytes((place / "model.onnx").read_bytes()[:-1])
    with pytest.raises(ArtifactError, match="is cut short"):
        run_build(place)
    run_rewrite(run_export(Config("tiny", out=place)).path)
    perturb(place)
    run_build(place)
    report = verify(place, Verify(torch_model=True, trust=True))
    assert not report.ok
