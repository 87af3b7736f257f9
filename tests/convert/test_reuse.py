"""What a second run repeats, and what it reuses from the artifact."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from helpers import command, refinish

from pipeline.artifact.artifact import Artifact
from pipeline.artifact.manifest import ComparisonInfo, Manifest, StageInfo, TargetInfo
from pipeline.convert import plan as plan_module
from pipeline.convert import workspace
from pipeline.convert.driver import run, run_build, verify
from pipeline.convert.report import Report
from pipeline.errors import (
    ArtifactError,
    CompareError,
    InputError,
    TargetMissing,
)
from pipeline.graph.session import run_onnx
from pipeline.machine.progress import StageText
from pipeline.spec.config import Config
from pipeline.spec.dims import shape_texts


class Heard(list[str]):
    """An announcer that records. `stages` are the stages that ran, in order."""

    def __call__(self, text: str) -> None:
        self.append(text)

    @property
    def stages(self) -> list[str]:
        return [text.name for text in self if isinstance(text, StageText)]


def compared(manifest: Manifest) -> ComparisonInfo:
    assert manifest.comparison is not None
    return manifest.comparison


def children_seconds() -> float:
    """Processor seconds of this process's children that have ended. Others' work does not count."""
    times = os.times()
    return times.children_user + times.children_system


def test_second_run_is_unchanged_quick_and_without_torch(tmp_path: Path) -> None:
    start = children_seconds()
    first = command("convert", "tiny", "--out", tmp_path / "a")
    _, errors = first.communicate(timeout=100)
    assert first.returncode == 0, errors
    assert "torch was imported" in errors
    before = (tmp_path / "a" / "manifest.json").read_bytes()
    middle = children_seconds()
    second = command("convert", "tiny", "--out", tmp_path / "a", "--json")
    output, errors = second.communicate(timeout=100)
    end = children_seconds()
    assert second.returncode == 0, errors
    assert json.loads(output)["unchanged"] is True
    assert "torch was imported" not in errors
    assert end - middle < (middle - start) / 2
    assert (tmp_path / "a" / "manifest.json").read_bytes() == before


def again(place: Path, **changes: Any) -> tuple[Report, Heard]:
    heard = Heard()
    return run(Config(**{"model": "tiny", "out": place, **changes}), heard), heard


@pytest.mark.usefixtures("zoo")
class TestReuse:
    """What runs again after a change, on a copy of a finished artifact."""

    def test_a_whole_comparison_stays_where_a_quick_one_is_asked_for(self, artifact: Path) -> None:
        report, heard = again(artifact, quick=True)
        assert report.unchanged and heard.stages == []
        report, heard = again(artifact, quick=True, seed=1)
        assert heard.stages == ["compare"]
        assert "quick" in {note.kind for note in compared(report.manifest).notes}

    def test_nothing_changed(self, artifact: Path) -> None:
        report, heard = again(artifact)
        assert report.unchanged
        assert not heard

    def test_force(self, artifact: Path) -> None:
        report, heard = again(artifact, force=True)
        assert not report.unchanged
        assert heard.stages == ["export", "rewrite", "build", "compare"]

    def test_a_stage_says_its_seconds_in_the_last_conversion(self, artifact: Path) -> None:
        took = {"export": 12.4, "rewrite": 0.4, "build": 117.0}
        refinish(artifact, stages=tuple(StageInfo(*one, {}, None) for one in took.items()))
        _, heard = again(artifact, options={"channels": 2})
        assert {"export (last time 12 s)", "rewrite", "build (last time 117 s)"} <= set(heard)
        assert "compare" in heard

    @pytest.mark.parametrize("other", ["source", "target", "damaged"])
    def test_a_stage_says_no_seconds_of_another_conversion(
        self, artifact: Path, other: str
    ) -> None:
        manifest = refinish(artifact, stages=(StageInfo("build", 117.0, {}, None),))
        if other == "source":
            refinish(artifact, model=dataclasses.replace(manifest.model, source="skewed"))
        elif other == "target":
            refinish(artifact, target=TargetInfo("tensorrt-8.6", "tensorrt", None))
        else:
            (artifact / "manifest.json").write_text("{}")
        _, heard = again(artifact, force=True)
        assert "build" in heard

    def test_option(self, artifact: Path) -> None:
        report, heard = again(artifact, options={"channels": 2})
        assert heard.stages == ["export", "rewrite", "build", "compare"]
        (output,) = report.manifest.interface.outputs
        assert shape_texts(output.shape) == (1, 2, "h", "w")
        assert report.manifest.model.options == {"channels": 2}

    def test_weights(self, artifact: Path, tmp_path: Path) -> None:
        import torch

        state = tiny.conv().build(None).state_dict()
        torch.save({key: value * 2 for key, value in state.items()}, tmp_path / "w.pth")
        report, heard = again(artifact, weights=tmp_path / "w.pth")
        assert heard.stages == ["export", "rewrite", "build", "compare"]
        assert report.manifest.model.weights.file == "w.pth"
        assert again(artifact, weights=tmp_path / "w.pth")[0].unchanged
        torch.save({key: value * 3 for key, value in state.items()}, tmp_path / "w.pth")
        assert not again(artifact, weights=tmp_path / "w.pth")[0].unchanged

    def test_profile(self, artifact: Path) -> None:
        exported = (artifact / "exported.onnx").read_bytes()
        report, heard = again(artifact, profiles=("h=8:16:24",))
        assert heard.stages == ["build", "compare"]
        assert (artifact / "exported.onnx").read_bytes() == exported
        (profile,) = report.manifest.interface.profiles
        assert profile.ranges == {"h": (8, 16, 24), "w": (5, 22, 40)}
        assert {p.sizes["h"] for p in compared(report.manifest).points} <= set(range(8, 25))
        assert [s.name for s in report.manifest.stages] == ["export", "rewrite", "build", "compare"]
        stored = [f for f in report.manifest.files if f.startswith("comparison/")]
        assert {f.split("/")[1] for f in stored} == {"profile0"}

    def test_precision(self, artifact: Path) -> None:
        report, heard = again(artifact, precision="tf32")
        assert heard.stages == ["build", "compare"]
        assert report.manifest.precision == "tf32"

    def test_shape(self, artifact: Path) -> None:
        plan = (artifact / "engine.plan").read_bytes()
        report, heard = again(artifact, shapes=("h=11,w=33",))
        assert heard.stages == ["compare"]
        assert (artifact / "engine.plan").read_bytes() == plan
        asked = [p for p in compared(report.manifest).points if p.label == "asked for"]
        assert [p.sizes for p in asked] == [{"h": 11, "w": 33}]
        assert asked[0].compared

    def test_tolerance(self, artifact: Path) -> None:
        report, heard = again(artifact, model="loose")
        assert heard.stages == ["compare"]
        assert report.manifest.interface.tolerance.rtol == 1e-3
        assert report.manifest.interface.tolerance.why == "wider"

    def test_target(self, artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(plan_module, "require", lambda _: "8.6.0")
        heard = Heard()
        with pytest.raises(TargetMissing):
            run(Config("tiny", out=artifact, target="tensorrt-8.6"), heard)
        assert heard.stages == ["rewrite", "build"]

    def test_what_is_damaged_is_made_again(self, artifact: Path) -> None:
        (artifact / "model.onnx").write_bytes(b"cut")
        report, heard = again(artifact)
        assert heard.stages == ["export", "rewrite", "build", "compare"]
        assert Artifact.open(artifact).manifest == report.manifest

    def test_a_changed_model_between_build_calls_does_not_pass(self, tmp_path: Path) -> None:
        # only the comparison runs again; it builds the torch model again, which must be the same
        made = 0

        def build(weights: Path | None) -> Any:
            nonlocal made
            made += 1
            net = tiny.conv().build(weights)
            with __import__("torch").no_grad():
                net.conv.bias += 0.01 * made
            return net

        spec = dataclasses.replace(tiny.conv(), name="moody", build=build, key="moody")
        place = tmp_path / "moody"
        run(Config(spec, out=place))
        before = (place / "manifest.json").read_bytes()
        why = r"y of exported differs from torch at .*first at min \(h=5,w=5\)"
        with pytest.raises(CompareError, match=why):
            run(Config(spec, out=place, shapes=("h=11",)))
        assert (place / "manifest.json").read_bytes() == before
        Artifact.open(place)

    def test_another_conversion_in_between_does_not_mix(
        self, artifact: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real = workspace.replacing

        def late(path: Path, *, keep: bool) -> Any:
            monkeypatch.setattr(workspace, "replacing", real)
            again(path, options={"channels": 2})
            return real(path, keep=keep)

        monkeypatch.setattr(workspace, "replacing", late)
        with pytest.raises(InputError, match=r"in the meantime\. Run the command again"):
            again(artifact, shapes=("h=11",))
        assert Artifact.open(artifact).manifest.model.options == {"channels": 2}


def test_a_changed_closure_is_never_taken_for_unchanged(tmp_path: Path) -> None:
    """Nothing shows what `build` reads, so a spec without a key is always new."""

    def made(scale: float, **more: Any) -> Any:
        spec = tiny.of(lambda x: x * scale, name="scaled")
        return dataclasses.replace(spec, **more)

    place = tmp_path / "scaled"
    assert not run(Config(made(2.0), out=place)).unchanged
    report = run(Config(made(3.0), out=place))
    assert not report.unchanged
    assert (
        next(run_onnx(report.path / "model.onnx", [{"x": np.ones((1, 3, 5, 5), "f4")}]))["y"].max()
        == 3.0
    )
    assert not run(Config(made(3.0, key="3"), out=place)).unchanged
    assert run(Config(made(3.0, key="3"), out=place)).unchanged
    assert not run(Config(made(4.0, key="4"), out=place)).unchanged


@pytest.mark.parametrize("damage", [lambda p: p.unlink(), lambda p: p.write_bytes(b"cut")])
def test_a_build_mends_a_damaged_plan(artifact: Path, damage: Any) -> None:
    damage(artifact / "engine.plan")
    with pytest.raises(ArtifactError, match=r"; copy it again, or `pipeline build .*tiny`$"):
        Artifact.open(artifact)
    run_build(artifact)
    assert Artifact.open(artifact).plan.stat().st_size > 1000
    assert verify(artifact).ok


@pytest.mark.parametrize("name", ["inputs", "torch"])
def test_a_build_vouches_for_no_damaged_comparison(artifact: Path, name: str) -> None:
    """Otherwise a damaged file would count as torch's values."""
    path = artifact / "comparison" / "default" / f"{name}.json"
    path.write_text(path.read_text().replace("1", "2", 1))
    said = Heard()
    run_build(artifact, announce=said)
    assert "removed comparison/default: the file was changed or damaged" in said
    assert not Artifact.open(artifact).comparison.joinpath("default").exists()
    with pytest.raises(ArtifactError, match=r"no outputs of torch are stored .* pass --torch"):
        verify(artifact)


def test_a_build_keeps_torchs_outputs_beside_a_damaged_run(artifact: Path) -> None:
    path = artifact / "comparison" / "default" / "rewritten.json"
    path.write_text(path.read_text().replace("1", "2", 1))
    run_build(artifact)
    assert verify(artifact).ok


@pytest.mark.parametrize("name", ["model.onnx", "exported.onnx"])
def test_a_build_needs_what_comes_before_it(artifact: Path, name: str) -> None:
    (artifact / name).unlink()
    (artifact / "engine.plan").unlink()
    with pytest.raises(ArtifactError, match=rf"{name}: is missing; convert again"):
        run_build(artifact)
