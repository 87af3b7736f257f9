"""More engines in one artifact, built for other GPUs and another TensorRT."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from helpers import perturb, refinish
from onnx import helper, numpy_helper

import pipeline
from pipeline.artifact.artifact import Artifact
from pipeline.artifact.engines import engine_folder, engine_places, why_not_of
from pipeline.build.build import Built
from pipeline.convert import driver, stages
from pipeline.convert.driver import run, run_build, run_rewrite, verify
from pipeline.errors import InputError, TargetMissing
from pipeline.machine.swap_folder import held
from pipeline.machine.target import TARGETS, installed_version
from pipeline.spec.config import Config
from pipeline.store.store import Store


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_names_of_engines() -> None:
    rtx, classic = TARGETS["rtx-1.7"], TARGETS["tensorrt-8.6"]
    assert engine_folder(rtx, (), "fp32") == "rtx-1.7"
    assert engine_folder(rtx, ((8, 6), (12, 0)), "fp32") == "rtx-1.7-sm86-sm120"
    assert engine_folder(classic, ((9, 0),), "fp16") == "tensorrt-8.6-sm90-fp16"


def test_an_engine_is_an_artifact_by_itself(artifact: Path) -> None:
    before = {path: digest(path) for path in artifact.rglob("*") if path.is_file()}
    report = run_build(artifact, gpus=("sm86", "sm120"))
    engine = artifact / "engines" / "rtx-1.7-sm86-sm120"
    assert report.path == engine
    assert engine_places(artifact) == [engine]
    # the artifact and its own engine stay as they were
    assert {path: digest(path) for path in before} == before
    assert Artifact.open(artifact).extra == ()
    made = Artifact.open(engine).manifest
    assert made.target.compute_capabilities == ("8.6", "12.0")
    assert made.comparison is None and not made.engine_compared
    assert [stage.name for stage in made.stages] == ["export", "rewrite", "build"]
    own = Artifact.open(artifact).manifest
    for name in ("exported.onnx", "model.onnx"):
        assert made.files[name] == own.files[name]


def test_each_engine_has_its_own_record_of_what_was_compared(artifact: Path) -> None:
    run_build(artifact, gpus=("sm86",))
    engine, manifest = artifact / "engines" / "rtx-1.7-sm86", digest(artifact / "manifest.json")
    report = verify(engine)
    assert report.ok
    assert report.manifest.comparison is not None
    # the stored outputs of torch came along
    assert {r.pair[0] for r in report.manifest.comparison.points[0].results} == {"torch"}
    assert digest(artifact / "manifest.json") == manifest
    verify(artifact)  # replaces the artifact's folder, and keeps its engines
    after = Artifact.open(engine).manifest
    assert after.comparison is not None and after.comparison.passed


def test_an_engine_is_replaced_by_one_for_the_same_gpus(artifact: Path) -> None:
    run_build(artifact, gpus=("sm86",))
    engine = artifact / "engines" / "rtx-1.7-sm86"
    verify(engine)
    run_build(artifact, gpus=("sm86",), profiles=("h=8:8:8",))
    made = Artifact.open(engine).manifest
    assert made.interface.profiles[0].ranges["h"] == (8, 8, 8)
    assert made.comparison is None
    assert Artifact.open(artifact).manifest.interface.profiles[0].ranges["h"] != (8, 8, 8)


def test_a_failed_build_leaves_all_as_it_was(artifact: Path) -> None:
    run_build(artifact, gpus=("sm86",))
    before = {path: digest(path) for path in artifact.rglob("*") if path.is_file()}
    with pytest.raises(InputError, match=r"gpu 9\.0: rtx-1\.7 builds for"):
        run_build(artifact, gpus=("sm90",))
    with pytest.raises(InputError, match="is an engine of"):
        run_build(artifact / "engines" / "rtx-1.7-sm86", gpus=("sm89",))
    assert {path: digest(path) for path in artifact.rglob("*") if path.is_file()} == before


@pytest.mark.usefixtures("zoo")
def test_a_conversion_keeps_the_engines_of_the_same_model(artifact: Path) -> None:
    run_build(artifact, gpus=("sm86",))
    said: list[str] = []
    run(Config("tiny", out=artifact, force=True), announce=said.append)
    assert [place.name for place in engine_places(artifact)] == ["rtx-1.7-sm86"]
    assert not any("removed" in text for text in said)

    changed = Config("tiny", out=artifact, force=True, options={"channels": 5})
    report = run(changed, announce=said.append)
    assert engine_places(artifact) == []
    place = artifact / "engines" / "rtx-1.7-sm86"
    why = f"{place}: it was built from another exported.onnx"
    assert f"removed {why}" in said
    assert report.removed == (why,)
    assert f"removed: {why}" in " ".join(str(report).split())
    # nothing but the export's seconds count if nothing else ran
    only = replace(report, ran=("export",))
    (export,) = [stage for stage in report.manifest.stages if stage.name == "export"]
    assert f", {export.seconds:.0f} s)" in str(only).splitlines()[0]


def test_nobody_replaces_the_artifact_around_an_engine(artifact: Path) -> None:
    run_build(artifact, gpus=("sm86",))
    with held(artifact), pytest.raises(InputError, match="another conversion is writing to it"):
        verify(artifact / "engines" / "rtx-1.7-sm86")
    with held(artifact), pytest.raises(InputError, match="another conversion is writing to it"):
        run_build(artifact, gpus=("sm89",))


def test_a_link_is_no_engine(artifact: Path, tmp_path: Path) -> None:
    run_build(artifact, gpus=("sm86",))
    shutil.move(artifact / "engines", tmp_path / "elsewhere")
    (artifact / "engines").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(pipeline.PipelineError, match="engines: is a link"):
        Artifact.open(artifact)


def test_another_target(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorRT 10 is not installed here, so its build is pretended. The rewrite is real."""
    target = TARGETS["tensorrt-10"]
    if installed_version(target) is None:
        with pytest.raises(TargetMissing, match="target tensorrt-10: tensorrt is not installed"):
            run_build(artifact, target="tensorrt-10")
    built: list[Path] = []

    def build(model: Path, plan: Path, *_: object) -> Built:
        built.append(model)
        plan.write_bytes(b"plan")
        return Built("10.0", 4, "", 1, [], {})

    monkeypatch.setattr(driver, "require", lambda _: "10.0")
    monkeypatch.setattr(stages.building, "build", build)
    report = run_build(artifact, target="tensorrt-10")
    own, made = Artifact.open(artifact).manifest, report.manifest
    assert report.path == artifact / "engines" / "tensorrt-10"
    assert (own.target.name, made.target.name, made.target.version) == (
        "rtx-1.7", "tensorrt-10", "10.0",
    )  # fmt: skip
    assert made.files["exported.onnx"] == own.files["exported.onnx"]
    assert made.rewrite is not None and own.rewrite is not None
    needed = [{p.name for p in m.rewrite.passes if p.needed} for m in (own, made) if m.rewrite]
    assert needed[0] != needed[1]
    assert built[0].name == "model.onnx"

    passes = own.rewrite.passes
    mine = passes[0].__class__("my_pass", True, "", (), ())
    refinish(artifact, rewrite=own.rewrite.__class__((*passes, mine), (), 1, 1))
    with pytest.raises(InputError, match="your own pass my_pass, which is not in the artifact"):
        run_build(artifact, target="tensorrt-10")


def test_inspect_finds_a_damaged_engine(artifact: Path, cli: Any) -> None:
    assert cli("build", artifact, "--gpu", "sm86")[0] == 0
    (place,) = (artifact / "engines").iterdir()
    assert cli("inspect", artifact)[0] == 0
    assert "left out: 1 of its other engines" in cli("store", "push", artifact, "store")[1]
    with (place / "engine.plan").open("ab") as plan:
        plan.write(b"x")
    code, output, _ = cli("inspect", artifact)
    assert code == 2 and f"engine {place}: can't be used: " in output
    code, output, _ = cli("inspect", artifact, "--json")
    assert code == 2 and "engine.plan" in json.loads(output)["engines"][0]["error"]


def test_inspect_lists_the_engines(artifact: Path, cli: Any) -> None:
    assert json.loads(cli("inspect", artifact, "--json")[1])["engines"] == []
    code, out, err = cli("build", artifact, "--gpu", "sm86,sm89", "--gpu", "sm120")
    assert code == 0, err
    place = artifact / "engines" / "rtx-1.7-sm86-sm89-sm120"
    assert str(place) in out and "for compute capability 8.6, 8.9, 12.0 only" in out
    cli("build", artifact, "--target", "rtx-1.7", "--precision", "bf16")
    lines = [x for x in cli("inspect", artifact)[1].splitlines() if x.startswith("engine ")]
    version = installed_version(TARGETS["rtx-1.7"])
    assert lines == [
        f"engine {artifact}/engines/rtx-1.7-bf16: rtx-1.7 ({version}), portable, bf16, "
        "not compared yet",
        f"engine {place}: rtx-1.7 ({version}), compute capability 8.6, 8.9, 12.0, fp32, "
        "not compared yet",
    ]
    (first, second) = json.loads(cli("inspect", artifact, "--json")[1])["engines"]
    assert first["gpus"] == [] and second["gpus"] == ["8.6", "8.9", "12.0"]
    assert second["engine_compared"] is False and second["passed"] is None
    model = (place / "model.onnx").read_bytes()
    (place / "model.onnx").unlink()  # a link to the artifact's
    (place / "model.onnx").write_bytes(model)
    perturb(place)
    assert cli("verify", place)[0] == 1
    (line,) = [x for x in cli("inspect", artifact)[1].splitlines() if f"engine {place}" in x]
    assert "fp32, FAILED its comparison: y of rewritten differs from exported at " in line
    assert "driver" not in line


def test_convert_for_some_gpus(cli: Any, tmp_path: Path) -> None:
    code, _, err = cli("convert", "tiny", "--out", "a", "--gpu", "sm89", "--quick")
    assert code == 0, err
    made = Artifact.open(tmp_path / "a").manifest
    assert made.target.compute_capabilities == ("8.9",)
    assert "Nothing changed" in cli("convert", "tiny", "--out", "a", "--gpu", "8.9", "--quick")[1]
    assert cli("convert", "tiny", "--out", "a", "--gpu", "sm1", "--quick")[0] == 2


def test_a_pull_keeps_the_engines_of_the_same_model(artifact: Path, tmp_path: Path) -> None:
    store = Store.open(str(tmp_path / "store"))
    entry = store.push(Artifact.open(artifact))
    run_build(artifact, gpus=("sm86",))
    store.pull(entry, artifact)
    assert [place.name for place in engine_places(artifact)] == ["rtx-1.7-sm86"]
    (artifact / "engines" / "rtx-1.7-sm86" / "exported.onnx").write_bytes(b"another model")
    refinish(artifact / "engines" / "rtx-1.7-sm86")
    said: list[str] = []
    store.pull(entry, artifact, announce=said.append)
    assert engine_places(artifact) == []
    assert any("it was built from another exported.onnx" in text for text in said)


def test_a_new_rewrite_or_export_leaves_the_old_engines_out(artifact: Path) -> None:
    run_build(artifact, gpus=("sm86",))
    own = Artifact.open(artifact).manifest
    engine = Artifact.open(artifact / "engines" / "rtx-1.7-sm86").manifest
    assert why_not_of(engine, own) == ""
    assert why_not_of(engine, replace(own, keys={**own.keys, "export": "0" * 64})).startswith(
        "the model was exported again"
    )
    assert why_not_of(engine, replace(own, keys={})) == ""  # after `pipeline build`
    model = own.files["model.onnx"]
    files = {**own.files, "model.onnx": replace(model, bytes=model.bytes + 1)}
    assert why_not_of(engine, replace(own, files=files)) == "it was built from another model.onnx"
    other = replace(engine, target=replace(engine.target, name="tensorrt-10", flavour="tensorrt"))
    assert why_not_of(other, own) == ""
    assert own.rewrite is not None
    mine = replace(own.rewrite.passes[0], name="my_pass")
    rewritten = replace(own, rewrite=replace(own.rewrite, passes=(*own.rewrite.passes, mine)))
    assert "rewritten again with other passes" in why_not_of(other, rewritten)


def test_damaged_outputs_of_the_reference_are_left_out(artifact: Path) -> None:
    stored = artifact / "comparison" / "default"
    (stored / "torch.json").write_text("{}")
    said: list[str] = []
    run_build(artifact, gpus=("sm86",), announce=said.append)
    assert any(text.startswith("left out comparison/default: ") for text in said)
    assert not (artifact / "engines" / "rtx-1.7-sm86" / "comparison" / "default").exists()
    shutil.rmtree(stored)
    run_build(artifact, gpus=("sm89",))


def test_a_build_of_the_same_artifact_is_for_the_same_gpus(artifact: Path) -> None:
    run_build(artifact, gpus=("sm89", "sm86"))
    engine = artifact / "engines" / "rtx-1.7-sm86-sm89"
    assert run_build(engine).manifest.target.compute_capabilities == ("8.6", "8.9")
    assert run_build(artifact).manifest.target.compute_capabilities == ()


def test_weights_in_a_file_of_their_own(tmp_path: Path) -> None:
    """onnx reads no weights from a file with several names, so that file is copied."""
    weight = numpy_helper.from_array(np.ones((600, 600), np.float32), "w")
    x, y = (helper.make_tensor_value_info(n, 1, ["b", 600]) for n in "xy")
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "g", [x], [y])
    graph.initializer.append(weight)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    source, place = tmp_path / "net.onnx", tmp_path / "net"
    onnx.save(model, source, save_as_external_data=True, location="net.onnx.data")
    run(Config(str(source), dims=("b=1:2:4",), out=place, quick=True))
    data = sorted(place.glob("*.data"))
    for gpus in (("sm86",), ("sm89",)):
        engine = run_build(place, gpus=gpus).path
        assert verify(engine).ok
    run_rewrite(place)
    assert verify(place).ok
    assert all(file.stat().st_nlink == 1 for file in (*data, *engine.glob("*.data")))
