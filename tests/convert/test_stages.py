"""The results of each stage, the later results that it removes, and its measurements."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from types import SimpleNamespace

import onnx
import onnx.parser
import pytest
from helpers import files_under, refinish

from pipeline.artifact.artifact import Artifact
from pipeline.artifact.manifest import Manifest
from pipeline.build.settings import BuildOptions
from pipeline.compare.plan import CompareOptions
from pipeline.convert import stages
from pipeline.convert.driver import run_rewrite
from pipeline.convert.options import RewriteOptions
from pipeline.convert.recipe import Search
from pipeline.convert.report import Report
from pipeline.convert.reuse import forget
from pipeline.convert.workspace import Stage, Workspace
from pipeline.errors import ArtifactError, RewriteError
from pipeline.machine.gpu import Gpu
from pipeline.machine.progress import StageText, silent
from pipeline.machine.resources import Stopwatch, peak_memory, reset_peak_memory
from pipeline.machine.target import TARGETS
from pipeline.spec.dims import Dim

RTX = TARGETS["rtx-1.7"]


@pytest.mark.parametrize(
    ("since", "gone", "parts"),
    [
        (
            "export",
            {
                "model.onnx", "engine.plan", "reproduce.sh",
                "comparison/default/exported.json", "comparison/default/inputs.json",
                "comparison/default/rewritten.json", "comparison/default/torch.json",
            },
            ["rewrite", "build", "comparison"],
        ),
        (
            "rewrite",
            {
                "engine.plan", "reproduce.sh",
                "comparison/default/exported.json", "comparison/default/rewritten.json",
            },
            ["build", "comparison"],
        ),
        (
            "build",
            {
                "reproduce.sh",
                "comparison/default/exported.json", "comparison/default/rewritten.json",
            },
            ["comparison"],
        ),
    ],
)  # fmt: skip
def test_what_is_stale_goes(artifact: Path, since: str, gone: set[str], parts: list[str]) -> None:
    before = set(files_under(artifact))
    manifest = forget(artifact, Artifact.open(artifact).manifest, after=since)
    assert before - set(files_under(artifact)) == gone
    for part in ("rewrite", "build", "comparison"):
        assert (getattr(manifest, part) is None) is (part in parts)
    assert manifest.engine_compared_why == "not compared yet"
    names = {"comparison": "compare"}
    assert {names.get(part, part) for part in parts}.isdisjoint(s.name for s in manifest.stages)


def test_engine_of_an_older_comparison_is_not_claimed(artifact: Path) -> None:
    refinish(artifact, engine_compared=True, engine_compared_why="compared")
    manifest = run_rewrite(artifact).manifest
    assert manifest.engine_compared is False


def test_the_gpu_that_a_plan_is_for(monkeypatch: pytest.MonkeyPatch, artifact: Path) -> None:
    monkeypatch.setattr(stages, "find_gpu", lambda: Gpu("some GPU", (8, 9)))
    # TensorRT-RTX's plans are portable; other plans are for the GPU that built them
    plan = stages.Built("", 1, "", 1, [], {})
    assert stages._built_for(RTX, plan) == ("", ())
    some = dataclasses.replace(plan, gpus=((8, 6), (12, 0)))
    assert stages._built_for(RTX, some) == ("", ("8.6", "12.0"))
    assert stages._built_for(TARGETS["tensorrt-8.6"], plan) == ("some GPU", ("8.9",))
    manifest = Artifact.open(artifact).manifest
    assert manifest.target.compute_capabilities == ()
    assert manifest.build is not None and manifest.build.gpu == ""
    manifest = dataclasses.replace(
        manifest,
        engine_gpu="some GPU",
        target=dataclasses.replace(manifest.target, compute_capabilities=("8.9",)),
    )
    for since, left in (("build", ("8.9",)), ("rewrite", ())):
        manifest = forget(artifact, manifest, after=since)
        assert (manifest.engine_gpu, manifest.target.compute_capabilities) == ("", left)


def test_a_stage_needs_the_one_before(artifact: Path) -> None:
    manifest = Artifact.open(artifact).manifest
    (artifact / "model.onnx").unlink()
    with pytest.raises(ArtifactError, match=r"no model\.onnx\. Run `pipeline rewrite` first"):
        search = Search(manifest, CompareOptions(), silent)
        stages.build(artifact, search, BuildOptions(RTX))
    (artifact / "exported.onnx").unlink()
    with pytest.raises(ArtifactError, match=r"no exported\.onnx\. Run `pipeline export` first"):
        stages.rewrite(artifact, RewriteOptions(target=RTX))


def test_refused_nodes_stop_the_rewrite(artifact: Path) -> None:
    text = """<ir_version: 8, opset_import: ["" : 18]>
    g (float[1,3,h,w] x) => (float[1,3,h,w] y)
    <int64[2] axes = {4, 5}, float[3] s = {1, 1, 1}, float[3] b = {0, 0, 0}>
    { x6 = Unsqueeze(x, axes) y6 = InstanceNormalization(x6, s, b) y = Squeeze(y6, axes) }"""
    onnx.save(onnx.parser.parse_model(text), artifact / "exported.onnx")
    manifest = refinish(artifact)
    with pytest.raises(
        RewriteError,
        match=r"target tensorrt-8\.6 cannot run this graph correctly: Inst.*4 spatial axes",
    ):
        run_rewrite(artifact, "tensorrt-8.6")
    assert Artifact.open(artifact).manifest == manifest


def test_declared_is_what_the_spec_had(converted: Report) -> None:
    import tiny

    spec, manifest = tiny.conv(), converted.manifest
    assert manifest.interface.dims == spec.dims
    assert manifest.interface.inputs == spec.inputs
    assert set(manifest.tolerances().values()) == {spec.tolerance}
    (profile,) = manifest.interface.profiles
    assert profile.resolve(spec.dims) == profile


def test_integer_inputs_keep_their_range(converted: Report) -> None:
    manifest = converted.manifest
    declared = dataclasses.replace(manifest.interface.inputs[0], dtype="int64", low=0, high=9)
    interface = dataclasses.replace(manifest.interface, inputs=(declared,))
    text = dataclasses.replace(manifest, interface=interface).to_json()
    (back,) = Manifest.from_json(text).interface.inputs
    values = back.sample({"h": 8, "w": 8}, 0)
    assert values.dtype == "int64"
    assert values.min() >= 0
    assert values.max() == 8
    assert manifest.interface.dims["h"] == Dim("h", 5, 18, 40)


def test_stages_are_measured(converted: Report) -> None:
    manifest = converted.manifest

    def work(folder: Path) -> SimpleNamespace:
        assert folder == converted.path
        time.sleep(0.05)
        return SimpleNamespace(library_seconds={"library": 0.01})

    said: list[str] = []
    workspace = Workspace(converted.path, converted.path, manifest, said.append)
    workspace.do(Stage("compare", work, lambda before, _: before))  # removes nothing
    done = workspace.manifest
    (text,) = said
    assert isinstance(text, StageText) and text.name == "compare"
    info = done.stages[-1]
    assert [s.name for s in done.stages].count("compare") == 1
    assert info.name == "compare"
    assert 0.05 <= info.seconds < 5
    assert info.library_seconds == {"library": 0.01}


def test_library_time_is_part_of_a_stage(converted: Report) -> None:
    for stage in converted.manifest.stages:
        assert sum(stage.library_seconds.values()) <= stage.seconds
    build = converted.manifest.build
    assert build is not None
    assert 0 < build.seconds <= converted.manifest.stages[2].seconds


def test_stopwatch_adds_up_also_when_it_fails() -> None:
    watch = Stopwatch()
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), watch("a"):
            time.sleep(0.01)
            1 / 0  # noqa: B018
    assert 0.02 <= watch.seconds["a"] < 10


def test_peak_memory_is_of_the_stretch() -> None:
    if peak_memory() is None:
        pytest.skip("not known on this system")
    reset_peak_memory()
    before = peak_memory()
    block = bytearray(200 * 2**20)
    block[::4096] = b"x" * len(block[::4096])
    during = peak_memory()
    del block
    assert before is not None
    assert during is not None
    assert during - before > 150 * 2**20
    reset_peak_memory()
    after = peak_memory()
    assert after is not None
    assert after < during - 150 * 2**20
