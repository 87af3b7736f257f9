"""``--precision auto`` and recipes, from the command line to the artifact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest
import tiny
from on_gpu import save_net

from pipeline.artifact.artifact import Artifact
from pipeline.commands.report import report_text
from pipeline.convert.driver import run, run_build, run_export, run_rewrite, verify
from pipeline.convert.report import Report
from pipeline.errors import ArtifactError, InputError
from pipeline.spec.config import Config
from pipeline.spec.model import ModelSpec, Output

DIMS = ("b=1:2:3", "h=8:12:16", "w=8:12:16")


def converted(folder: Path, **more: Any) -> Report:
    """`save_net`'s net, converted for the installed TensorRT."""
    if not (folder / "net.onnx").exists():
        save_net(folder / "net.onnx")
    return run(Config(str(folder / "net.onnx"), out=folder / "net", dims=DIMS, **more))


def float_nodes(place: Path) -> list[str]:
    """The ops of half.onnx that read or make a float32 weight or value, without the Casts."""
    model = onnx.load(place / "half.onnx")
    half = {n for node in model.graph.node for n in node.output if "/half" in n}
    return [
        node.op_type
        for node in model.graph.node
        if node.op_type not in ("Cast", "Constant", "Shape") and not half & set(node.output)
    ]


def loud(channels: int = 4) -> ModelSpec:
    """A net whose module `loud` has values far beyond 65504."""

    def build(_: Path | None) -> Any:
        import torch

        class Loud(torch.nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return (x * 1000) * 1000 * 1e-6

        class Net(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first = torch.nn.Conv2d(3, channels, 3, padding=1)
                self.loud = Loud()
                self.last = torch.nn.Conv2d(channels, channels, 3, padding=1)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.last(self.loud(torch.relu(self.first(x)))).softmax(1)

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return Net()

    h, w = tiny.dims()
    return ModelSpec(
        name="loud",
        build=build,
        inputs=(tiny.Input("x", (1, 3, h, w)),),
        outputs=(Output("y"),),
        tolerance=tiny.TOLERANCE,
    )


def test_an_overflow_is_mended_by_one_island(tmp_path: Path) -> None:
    report = run(Config(loud(), out=tmp_path / "a", precision="auto"))
    manifest = report.manifest
    assert report.ok and manifest.precision == "fp16"
    assert manifest.build is not None and manifest.build.half is not None
    (island,) = manifest.build.half.islands
    assert island.pattern.startswith("loud")
    assert "module loud at " in island.source and "test_recipe.py:" in island.source
    text = (tmp_path / "a" / "half.recipe").read_text()
    assert "* = fp16\n" in text and f"{island.pattern} = fp32\n" in text
    assert island.source in text
    assert "half.recipe" in manifest.files
    shown = report_text(report)
    assert f"float32: {island.pattern} ({island.text})" in shown
    assert "nodes in half precision" in shown and "% of the tolerance" in shown
    # the softmax is half too, which the rules would not do
    assert set(float_nodes(tmp_path / "a")) == {"Mul"}
    assert run(Config(loud(), out=tmp_path / "a", precision="auto")).ok


def test_where_half_precision_holds_the_recipe_is_empty(tmp_path: Path) -> None:
    report = converted(tmp_path, precision="auto")
    assert report.ok and float_nodes(report.path) == []
    build = report.manifest.build
    assert build is not None and build.half is not None and build.half.islands == ()
    lines = (report.path / "half.recipe").read_text().splitlines()
    assert [line for line in lines if not line.startswith("#")] == ["* = fp16"]
    assert any("no island of float32" in line for line in lines)
    assert "build" in {stage.name for stage in report.manifest.stages}
    # nothing changed, so no search
    assert converted(tmp_path, precision="auto").unchanged
    assert verify(report.path).ok


def test_a_recipe_is_applied_without_a_search(tmp_path: Path) -> None:
    place = converted(tmp_path, precision="auto").path
    edited = tmp_path / "mine.recipe"
    edited.write_text((place / "half.recipe").read_text() + "*second* = fp32\n*Mean* = fp32\n")
    model = onnx.load(place / "model.onnx")
    conv = next(n for n in model.graph.node if "second" in n.input)
    edited.write_text(f"* = fp16\n{conv.name or conv.output[0]} = fp32\n")
    report = run_build(place, recipe=edited)
    assert report.manifest.build is not None and report.manifest.build.half is not None
    half = report.manifest.build.half
    assert half.runs == 0 and half.share is None and [i.nodes for i in half.islands] == [1]
    assert float_nodes(place) == ["Conv"]
    # the artifact keeps it: another build applies it again
    again = run_build(place)
    assert again.manifest.build is not None and again.manifest.build.half == half
    assert again.manifest.precision == "fp16"
    assert verify(place).ok
    # also after another rewrite, and before the build
    run_rewrite(place)
    assert "half.recipe" in Artifact.open(place).manifest.files
    assert verify(place).ok
    run_build(place)
    assert float_nodes(place) == ["Conv"]
    # the rules are back if they are asked for
    rules = run_build(place, precision="fp16")
    assert rules.manifest.build is not None and rules.manifest.build.half is None
    assert "removed half.recipe, the artifact's recipe: --precision replaces" in report_text(rules)
    assert "half.recipe" not in Artifact.open(place).manifest.files
    # a whole conversion takes it too
    report = converted(tmp_path, recipe=edited)
    assert report.ok and float_nodes(place) == ["Conv"]
    assert converted(tmp_path, recipe=edited).unchanged
    edited.write_text("* = bf16\n")
    report = converted(tmp_path, recipe=edited)
    assert report.ok and report.manifest.precision == "bf16" and float_nodes(place) == []


def test_a_changed_recipe_in_the_artifact_is_refused_unless_you_pass_it(tmp_path: Path) -> None:
    place = converted(tmp_path, precision="auto").path
    recipe = place / "half.recipe"
    recipe.write_text("* = bf16\n")
    with pytest.raises(ArtifactError, match=r"half\.recipe: .* was changed\. Apply"):
        run_build(place)
    assert run_build(place, recipe=recipe).manifest.precision == "bf16"


def test_a_recipe_that_names_nothing_is_an_error(tmp_path: Path, cli: Any) -> None:
    place = converted(tmp_path, precision="auto").path
    before = Artifact.open(place).manifest
    (tmp_path / "mine").write_text("* = fp16\nencoder.norm = fp32\n")
    code, _, err = cli("build", place, "--recipe", tmp_path / "mine")
    assert code == 2
    assert "recipe: 'encoder.norm' is not the name of a node that could be in half" in err
    assert Artifact.open(place).manifest == before
    (tmp_path / "mine").write_text("* = fp16\nencoder.norm\n")
    code, _, err = cli("build", place, "--recipe", tmp_path / "mine")
    assert code == 2 and "line 2: 'encoder.norm' has no pattern" in err


def test_the_build_says_what_a_line_leaves_in_half_precision(tmp_path: Path, cli: Any) -> None:
    save_net(tmp_path / "net.onnx")
    model = onnx.load(tmp_path / "net.onnx")
    for number, node in enumerate(model.graph.node):
        node.name = f"layer{'.sub' if number else ''}/{number}"
    onnx.save(model, tmp_path / "net.onnx")
    place = converted(tmp_path, quick=True).path
    (tmp_path / "mine").write_text("* = fp16\nlayer = fp32\n")
    code, _, err = cli("build", place, "--recipe", tmp_path / "mine")
    said = "nodes of its submodules in half precision, which layer.* matches"
    assert code == 0 and "recipe: layer = fp32 leaves " in err and said in err
    lines = (place / "half.recipe").read_text().splitlines()
    above = lines[lines.index("layer = fp32") - 1]
    assert above.startswith("# leaves ") and above.endswith(said)


def test_a_recipe_states_the_precision(tmp_path: Path, cli: Any) -> None:
    place = converted(tmp_path, precision="fp32").path
    (tmp_path / "mine").write_text("* = fp16\n")
    code, _, err = cli("build", place, "--recipe", tmp_path / "mine", "--precision", "auto")
    assert code == 2 and "states fp16, not auto. Leave out --precision" in err
    with pytest.raises(InputError, match=r"states fp16, not bf16\. Leave out --precision"):
        converted(tmp_path, precision="bf16", recipe=tmp_path / "mine")
    code, _, err = cli("build", place, "--recipe", tmp_path / "mine", "--precision", "fp16")
    assert code == 0 and Artifact.open(place).manifest.precision == "fp16"


def test_the_export_alone_refuses_it(tmp_path: Path, cli: Any) -> None:
    save_net(tmp_path / "net.onnx")
    with pytest.raises(InputError, match="the build applies a recipe"):
        run_export(Config(str(tmp_path / "net.onnx"), out=tmp_path / "net", precision="auto"))
    code, _, err = cli("export", tmp_path / "net.onnx", "--precision", "auto")
    assert code == 2 and "auto" in err


def test_it_can_be_built_stage_by_stage(tmp_path: Path) -> None:
    save_net(tmp_path / "net.onnx")
    run_export(Config(str(tmp_path / "net.onnx"), out=tmp_path / "net", dims=DIMS))
    run_rewrite(tmp_path / "net")
    report = run_build(tmp_path / "net", precision="auto")
    assert report.manifest.precision == "fp16" and "half.recipe" in report.manifest.files
    assert verify(tmp_path / "net").ok
