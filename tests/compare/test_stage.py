"""verify: with the stored outputs, with torch, with another artifact, and with Polygraphy alone."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import tiny
from helpers import perturb, redeclare, refinish
from on_gpu import save_net

from pipeline.artifact.artifact import Artifact
from pipeline.artifact.manifest import ComparisonInfo, Manifest
from pipeline.artifact.stored import stored_points
from pipeline.commands.report import report_text
from pipeline.compare import runners as compare
from pipeline.compare.runners import failures
from pipeline.convert.driver import run, run_build, run_rewrite, verify
from pipeline.convert.options import Verify
from pipeline.convert.report import Report
from pipeline.errors import ArtifactError, CompareError, InputError
from pipeline.spec.config import Config
from pipeline.spec.dims import read_size
from pipeline.spec.tensors import Tolerance


def compared(manifest: Manifest) -> ComparisonInfo:
    assert manifest.comparison is not None
    return manifest.comparison


def sizes(report: Report) -> set[tuple[int, ...]]:
    return {tuple(p.sizes.values()) for p in compared(report.manifest).points if p.compared}


def test_fresh_artifact_passes_on_stored_outputs(artifact: Path, converted: Report) -> None:
    report = verify(artifact)
    assert report.ok
    assert report.manifest == Artifact.open(artifact).manifest
    assert sizes(report) == sizes(converted)
    assert len(sizes(report)) == 7
    assert report.manifest.keys == converted.manifest.keys


def test_perturbed_model_fails(artifact: Path) -> None:
    perturb(artifact)
    report = verify(artifact)
    assert not report.ok
    failed = compare.failures(compared(report.manifest))
    assert any(line.startswith("y of rewritten against torch at min (h=5,w=5)") for line in failed)
    assert not any("y of exported against torch" in line for line in failed)
    # the artifact stores the failure, and the next conversion does not accept it
    assert not compared(Artifact.open(artifact).manifest).passed
    assert report.manifest.keys == {}


def test_small_perturbation_fails_too(artifact: Path) -> None:
    perturb(artifact, by=3e-4)
    assert not verify(artifact).ok


def test_perturbed_export_fails_against_torch(artifact: Path) -> None:
    perturb(artifact, name="exported.onnx")
    failed = compare.failures(compared(verify(artifact).manifest))
    assert any(line.startswith("y of exported against torch") for line in failed)


def test_tampered_files_are_refused(artifact: Path) -> None:
    path = artifact / "comparison" / "default" / "torch.json"
    path.write_text(path.read_text().replace("1", "2", 1))
    with pytest.raises(ArtifactError, match=r"torch\.json: its content was changed"):
        verify(artifact)


def test_sizes_asked_for_are_repeated(tmp_path: Path) -> None:
    first = run(Config(tiny.conv(), out=tmp_path / "a", shapes=("h=11,w=33",)))
    report = verify(tmp_path / "a")
    assert (11, 33) in sizes(report)
    assert sizes(report) == sizes(first)


def test_sizes_asked_for_of_an_onnx_file_are_repeated(tmp_path: Path) -> None:
    config = Config(
        str(save_net(tmp_path / "net.onnx")), out=tmp_path / "a", shapes=("b=4,h=11,w=33",),
        dims=("b=1:3:5", "h=8:24:40", "w=8:24:40"),
    )  # fmt: skip
    asked = {tuple(p.sizes.values()) for p in compared(run(config).manifest).points}
    assert (4, 11, 33) in asked
    again = {tuple(p.sizes.values()) for p in compared(verify(tmp_path / "a").manifest).points}
    assert again == asked


def test_what_does_not_fit_here_is_kept_for_later(artifact: Path, converted: Report) -> None:
    estimates = {p.label: p.estimate_bytes for p in compared(converted.manifest).points}
    report = verify(artifact, Verify(memory_limit=estimates["opt"]))
    assert report.ok
    assert sizes(report) < sizes(converted)
    (left_out,) = [p for p in compared(report.manifest).points if p.label == "max"]
    assert left_out.left_out is not None and left_out.left_out.kind == "too-large"
    assert left_out.left_out.text.startswith("needs about ")
    # the artifact now has less evidence, so the next conversion compares again
    assert report.manifest.keys == {}
    assert sizes(verify(artifact)) == sizes(converted)
    assert not (artifact / "comparison" / "later").exists()


def test_nothing_compared_is_a_failure(artifact: Path) -> None:
    report = verify(artifact, Verify(memory_limit=10))
    assert not report.ok
    assert "nothing was compared" in compare.failures(compared(report.manifest))[0]


@pytest.mark.usefixtures("zoo")
def test_torch_runs_again(artifact: Path) -> None:
    shutil.rmtree(artifact / "comparison")
    refinish(artifact)
    said = f"{artifact}: no outputs of torch are stored to compare with; pass --torch to run it"
    with pytest.raises(ArtifactError, match=f"^{re.escape(said)}$"):  # not the name of a copy
        verify(artifact)
    report = verify(artifact, Verify(torch_model=True, trust=True, shapes=("h=7",)))
    assert report.ok
    assert (7, 22) in sizes(report)
    assert verify(artifact).ok
    perturb(artifact)
    assert not verify(artifact, Verify(torch_model=True, trust=True)).ok


@pytest.mark.usefixtures("zoo")
def test_torch_needs_the_same_weights(tmp_path: Path) -> None:
    import torch

    state = tiny.conv().build(None).state_dict()
    good, other = tmp_path / "good.pth", tmp_path / "other.pth"
    torch.save({key: value * 2 for key, value in state.items()}, good)
    torch.save(state, other)
    run(Config("tiny", out=tmp_path / "a", weights=good))
    assert verify(tmp_path / "a").ok
    assert verify(tmp_path / "a", Verify(torch_model=True, trust=True, weights=good)).ok
    with pytest.raises(
        InputError, match=r"made with the weights good\.pth\. Pass that file with --weights"
    ):
        verify(tmp_path / "a", Verify(torch_model=True, trust=True))
    with pytest.raises(InputError, match="the artifact was made with other weights"):
        verify(tmp_path / "a", Verify(torch_model=True, trust=True, weights=other))
    # all that is missing is named at once
    model = dataclasses.replace(Artifact.open(tmp_path / "a").manifest.model, source="net.py:net")
    refinish(tmp_path / "a", model=model)
    both = (
        r"--torch would run net.py:net.*add --trust .*\. Also, .*weights good\.pth.*with --weights"
    )
    with pytest.raises(InputError, match=both):
        verify(tmp_path / "a", Verify(torch_model=True))
    shutil.rmtree(tmp_path / "a" / "comparison")
    refinish(tmp_path / "a")
    with pytest.raises(ArtifactError, match="; pass --torch --trust --weights FILE to run it"):
        verify(tmp_path / "a")


def test_torch_needs_a_model_of_the_zoo(tmp_path: Path) -> None:
    run(Config(tiny.conv(), out=tmp_path / "a"))
    with pytest.raises(InputError, match="made from a spec object, spec:tiny"):
        verify(tmp_path / "a", Verify(torch_model=True, trust=True))


def test_sizes_need_torch_and_have_to_be_legal(artifact: Path) -> None:
    before = (artifact / "manifest.json").read_bytes()
    with pytest.raises(InputError, match="Pass --torch too"):
        verify(artifact, Verify(shapes=("h=6",)))
    with pytest.raises(InputError, match="h=41"):
        verify(artifact, Verify(torch_model=True, trust=True, shapes=("h=41",)))
    assert (artifact / "manifest.json").read_bytes() == before


def test_renamed_output_is_found(artifact: Path) -> None:
    for name in ("exported.onnx", "model.onnx"):
        model = onnx.load(artifact / name)
        output = model.graph.output[0]
        for node in model.graph.node:
            for index, value in enumerate(node.output):
                if value == output.name:
                    node.output[index] = "z"
        output.name = "z"
        onnx.save(model, artifact / name)
    before = refinish(artifact)
    with pytest.raises(InputError, match=r"exported\.onnx: its outputs are not those of the manif"):
        verify(artifact)
    assert Artifact.open(artifact).manifest == before


def test_model_that_does_not_run(artifact: Path) -> None:
    model = onnx.load(artifact / "model.onnx")
    wrong = onnx.numpy_helper.from_array(np.array([7, 11]), "wrong")
    model.graph.initializer.append(wrong)
    model.graph.node.append(onnx.helper.make_node("Reshape", ["x", "wrong"], ["unused"]))
    onnx.save(model, artifact / "model.onnx")
    before = refinish(artifact)
    with pytest.raises(CompareError, match=r"rewritten fails at min \(h=5,w=5\)") as caught:
        verify(artifact)
    assert "\n" not in str(caught.value)
    assert Artifact.open(artifact).manifest == before


class TestAgainst:
    """The regression check between two artifacts."""

    def test_same_artifact(self, artifact: Path, converted: Report) -> None:
        report = verify(artifact, Verify(against=converted.path))
        assert report.ok
        assert report.regressions == []
        start = f"no regression against {converted.path}. Sizes compared: 7. Engine: "
        assert report.notes[-1].kind.startswith("no-regression")
        assert report.notes[-1].text.startswith(start)

    def test_old_one_that_is_no_artifact(self, artifact: Path, tmp_path: Path) -> None:
        with pytest.raises(ArtifactError, match="no such folder"):
            verify(artifact, Verify(against=tmp_path / "none"))

    def test_perturbed_weights(self, artifact: Path, converted: Report) -> None:
        perturb(artifact, name="exported.onnx")
        perturb(artifact)
        found = verify(artifact, Verify(against=converted.path)).regressions
        assert found[0].text.startswith("y at stored (h=5,w=5): differs by up to 0.")
        assert [one.kind for one in found] == ["output-differs"] * 7
        assert found[0].facts["verdict"] == "differs"

    def test_another_model_that_is_right_in_itself(self, tmp_path: Path, converted: Report) -> None:
        import torch

        state = tiny.conv().build(None).state_dict()
        torch.save({key: value * 1.01 for key, value in state.items()}, tmp_path / "w.pth")
        run(Config(tiny.conv(), out=tmp_path / "a", weights=tmp_path / "w.pth"))
        report = verify(tmp_path / "a", Verify(against=converted.path))
        assert compared(report.manifest).passed
        assert not report.ok
        assert len(report.regressions) == 7

    def test_narrowed_dims(self, artifact: Path, converted: Report) -> None:
        declared = Artifact.open(artifact).manifest.interface
        narrow = {"h": dataclasses.replace(declared.dims["h"], max=30), "w": declared.dims["w"]}
        inputs = tuple(
            dataclasses.replace(i, shape=tuple(read_size(size, narrow) for size in i.shape))
            for i in declared.inputs
        )
        profiles = tuple(
            dataclasses.replace(p, ranges={**p.ranges, "h": (5, 18, 30)})
            for p in Artifact.open(artifact).manifest.interface.profiles
        )
        shutil.rmtree(artifact / "comparison")
        redeclare(artifact, inputs=inputs, profiles=profiles)
        with pytest.MonkeyPatch.context() as patch:
            from pipeline.models import MODELS

            patch.setitem(MODELS, "tiny", "tiny:conv")
            report = verify(artifact, Verify(against=converted.path, torch_model=True))
        assert compared(report.manifest).passed
        found = {one.kind: one.text for one in report.regressions}
        assert found["dim-narrowed"] == "dim narrowed: h in 5..40 is now h in 5..30"
        assert found["input-refused"].startswith("the new artifact refuses a stored input: ")
        assert any("h=40" in text for text in found.values())

    def test_narrower_profile(self, artifact: Path, converted: Report) -> None:
        profiles = tuple(
            dataclasses.replace(p, ranges={**p.ranges, "h": (5, 18, 30)})
            for p in Artifact.open(artifact).manifest.interface.profiles
        )
        redeclare(artifact, profiles=profiles)
        (found,) = verify(artifact, Verify(against=converted.path)).regressions
        assert found.kind == "profile-narrowed"
        assert found.text == "profile default: no profile allows its max h=40,w=40 any more"

    def test_renamed_output(self, tmp_path: Path, converted: Report) -> None:
        spec = tiny.conv()
        other = dataclasses.replace(spec.outputs[0], name="flow")
        run(Config(dataclasses.replace(spec, outputs=(other,)), out=tmp_path / "a"))
        found = verify(tmp_path / "a", Verify(against=converted.path)).regressions
        assert found[0].kind == "output-changed"
        assert found[0].text == "output y was float32 [1, 4, h, w], is missing"
        text = "y at stored (h=5,w=5): only old has this output"
        assert text in [one.text for one in found]

    def test_another_input(self, tmp_path: Path, converted: Report) -> None:
        spec = tiny.conv()
        other = dataclasses.replace(spec.inputs[0], name="image")
        run(Config(dataclasses.replace(spec, inputs=(other,)), out=tmp_path / "a"))
        found = verify(tmp_path / "a", Verify(against=converted.path)).regressions
        assert found[0].kind == "input-changed"
        assert found[0].text == "input x was float32 [1, 3, h, w], is missing"

    def test_widened_tolerance(self, artifact: Path, converted: Report) -> None:
        redeclare(artifact, tolerance=Tolerance(1e-2, 1e-5, "easier"))
        report = verify(artifact, Verify(against=converted.path))
        assert compared(report.manifest).passed
        (found,) = report.regressions
        assert found.kind == "tolerance-widened"
        assert found.text == (
            "tolerance of y widened from rtol 0.0001, atol 1e-05 to rtol 0.01, atol 1e-05"
        )

    def test_for_another_target(self, artifact: Path, converted: Report) -> None:
        run_rewrite(artifact, "tensorrt-8.6")
        report = verify(artifact, Verify(against=converted.path))
        assert report.ok


def reproduce(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        [str(folder / "reproduce.sh"), *words],
        capture_output=True,
        text=True,
        env={**os.environ, "PATH": path},
        cwd="/",
        timeout=100,
        check=False,
    )


def test_script_of_a_real_artifact(artifact: Path) -> None:
    assert shutil.which("polygraphy", path=str(Path(sys.executable).parent))
    done = reproduce(artifact)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("PASSED") >= 2
    perturb(artifact)
    done = reproduce(artifact)
    assert done.returncode == 1
    assert "FAILED" in done.stdout + done.stderr


def test_stored_points_are_those_of_the_spec(converted: Report) -> None:
    points = stored_points(converted.path, "torch")
    want = {tuple(p.sizes.values()) for p in compared(converted.manifest).points}
    assert {p.feed["x"].shape[2:] for p in points} == want
    for point in points:
        h, w = point.feed["x"].shape[2:]
        assert (point.feed["x"] == tiny.conv().sample({"h": h, "w": w}, 0)["x"]).all()
        assert point.outputs["y"].shape == (1, 4, h, w)


def test_a_profile_of_which_nothing_is_stored_does_not_pass(artifact: Path) -> None:
    run_build(artifact, profiles=["h=5:18:40,w=5:22:40", "h=30:33:36,w=7"])
    report = verify(artifact)
    assert not report.ok
    assert report.manifest.comparison is not None
    (line,) = failures(report.manifest.comparison)
    (note,) = [one for one in report.manifest.comparison.notes if one.fails]
    assert note.kind == "profile-not-stored" and note.facts == {"profile": "profile1"}
    assert line == note.text
    assert line.startswith("profile profile1: none of its sizes was compared, because the outputs")
    assert report_text(report).count(line) == 1


def test_a_profile_that_is_too_dear_is_noted_and_no_failure(tmp_path: Path) -> None:
    config = Config(tiny.conv(), out=tmp_path / "a", profiles=("h=5:6:7,w=5:6:7", "h=40,w=40"))
    first = run(config).manifest.comparison
    assert first is not None
    assert "profile-too-large" not in [note.kind for note in first.notes]
    costs = sorted(point.estimate_bytes for point in first.points)
    report = run(dataclasses.replace(config, memory_limit=costs[-1] - 1))
    assert report.ok and report.manifest.comparison is not None
    notes = report.manifest.comparison.notes
    (note,) = [one for one in notes if one.facts.get("profile") == "profile1"]
    assert note.kind == "profile-too-large" and not note.fails
    text = note.text
    assert text.startswith("profile profile1:") and text.endswith("need more memory than the limit")
    assert text in report_text(report)


class TestAgainstCoverage:
    def test_precision_and_lost_sizes(self, artifact: Path, converted: Report) -> None:
        old = verify(artifact)
        assert old.ok
        run_build(artifact, precision="tf32")
        (found,) = verify(artifact, Verify(against=converted.path)).regressions
        assert found.kind == "precision-changed"
        assert found.text == "precision was fp32, is tf32"


def test_a_quick_comparison_says_that_it_is_one(tmp_path: Path, zoo: None) -> None:  # noqa: ARG001
    report = run(Config("tiny", out=tmp_path / "a", quick=True))
    found = compared(report.manifest)
    assert [p.label for p in found.points] == ["min", "opt", "odd, above opt", "max"]
    assert [n.kind for n in found.notes if n.kind in ("quick", "random-sizes")] == ["quick"]
    assert "Before you use the engine, convert without --quick" in report_text(report)
    whole = run(Config("tiny", out=tmp_path / "a"))
    assert not whole.unchanged
    assert len(compared(whole.manifest).points) == 7
    # the export looks further than a quick one
    assert whole.manifest.keys["export"] != report.manifest.keys["export"]


def test_a_quick_comparison_stays_one_until_all_sizes_run(tmp_path: Path, zoo: None) -> None:  # noqa: ARG001
    """The stored outputs of torch are those of few sizes, also after another build."""

    def is_quick(report: Report) -> bool:
        return "quick" in [note.kind for note in compared(report.manifest).notes]

    place = tmp_path / "a"
    run(Config("tiny", out=place, quick=True, shapes=("h=13",)))
    assert is_quick(verify(place))
    built = run_build(place)
    assert built.manifest.comparison is None
    assert "because of --quick" not in report_text(built)
    again = verify(place)
    assert is_quick(again) and again.ok
    assert len([p for p in compared(again.manifest).points if p.compared]) == 5
    whole = verify(place, Verify(torch_model=True, trust=True))
    assert not is_quick(whole) and whole.ok
    assert not is_quick(verify(place))
    # other sizes than the stored ones are missing for another reason
    run_build(place, profiles=["h=7:16:29"])
    assert not is_quick(verify(place))
