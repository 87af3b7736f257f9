"""Two dims that must be equal give the same result for a torch model and for a file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import onnx
import pytest
import torch

from pipeline.artifact.manifest import Manifest
from pipeline.compare.plan import CompareOptions
from pipeline.compare.runners import TorchRunner
from pipeline.compare.stage import compare_artifact, record
from pipeline.convert.options import ExportOptions
from pipeline.convert.plan import initial_manifest
from pipeline.convert.stages import export, record_export
from pipeline.errors import InputError
from pipeline.runtime.sizes import EngineSizes
from pipeline.source.onnx.spec import onnx_spec
from pipeline.spec.config import Config
from pipeline.spec.dims import Dim, size_text
from pipeline.spec.model import Input, ModelSpec, Output, Tolerance
from pipeline.spec.profiles import Profile

H, W = Dim("h", 16, 24, 40, auto=True), Dim("w", 8, 16, 32, auto=True)
PROFILES = (Profile.parse("h=16:24:32,w=8:24:28", "small"),)


class Sum(torch.nn.Module):
    def forward(self, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        return x + z


def torch_source(_: Path) -> ModelSpec:
    inputs = (Input("x", (1, H)), Input("z", (1, W)))
    return ModelSpec("sum", lambda _: Sum(), inputs, (Output("y"),), Tolerance(0, 0, "a test"))


def onnx_source(folder: Path) -> ModelSpec:
    text = '<ir_version: 8, opset_import: ["" : 18]> g (float[1, h] x, float[1, w] z) => '
    model = onnx.parser.parse_model(text + "(float[1, n] y) { y = Add(x, z) }")
    onnx.save(model, folder / "sum.onnx")
    dims = {"h": H, "w": W}
    return replace(onnx_spec(folder / "sum.onnx", dims), tolerance=Tolerance(0, 0, "a test"))


def converted(folder: Path, spec: ModelSpec) -> Manifest:
    """The manifest's entries from an export and a comparison."""
    config = Config(spec, out=folder / "a")
    place = folder / "a"
    place.mkdir()
    exported = export(place, replace(spec, profiles=PROFILES), ExportOptions())
    manifest = record_export(initial_manifest(config, spec), exported)
    options = CompareOptions(memory_limit=1 << 30)
    reference = None if exported.module is None else TorchRunner(exported.module, ["y"])
    done = compare_artifact(place, manifest, reference, options, lambda _: None)
    return record(manifest, done)


@pytest.mark.parametrize("source", [torch_source, onnx_source])
def test_one_dim_stands_for_both(tmp_path: Path, source: object) -> None:
    assert callable(source)
    manifest = converted(tmp_path, source(tmp_path))
    interface = manifest.interface
    assert [str(dim) for dim in interface.dims.values()] == ["h in 16..32"]
    assert [[str(size_text(size)) for size in i.shape] for i in interface.inputs] == [
        ["1", "h"]
    ] * 2
    assert [size_text(size) for size in interface.outputs[0].shape or ()] == ["1", "h"]
    assert interface.rules == ()
    assert [dict(p.ranges) for p in interface.profiles] == [{"h": (16, 24, 28)}]
    assert manifest.export is not None
    (rule,) = manifest.export.refinements
    assert (rule.kind, rule.dim, rule.others) == ("equal", "h", ("w",))
    assert rule.text.startswith("w must equal h: the model fails at h=")
    assert list(manifest.export.dynamic) == ["h"]
    assert manifest.export.dynamic["h"].where == "x axis 1, z axis 1"
    assert manifest.comparison is not None and manifest.comparison.passed
    assert all(list(point.sizes) == ["h"] for point in manifest.comparison.points)
    assert {p.sizes["h"] for p in manifest.comparison.points} >= {16, 24, 28}
    sizes = EngineSizes(interface)
    assert sizes.solve({"x": (1, 20), "z": (1, 20)}) == {"h": 20}
    with pytest.raises(InputError, match="z axis 1: h=21, but x axis 1 has h=20"):
        sizes.solve({"x": (1, 20), "z": (1, 21)})
    with pytest.raises(InputError, match=r"x axis 1: h=40 is outside 16\.\.32"):
        sizes.solve({"x": (1, 40), "z": (1, 40)})
    assert Manifest.from_json(manifest.to_json(), "a test") == manifest


def test_points_are_the_same_for_both_sources(tmp_path: Path) -> None:
    seen = []
    for source in (torch_source, onnx_source):
        folder = tmp_path / source.__name__
        folder.mkdir()
        comparison = converted(folder, source(folder)).comparison
        assert comparison is not None
        seen.append([dict(point.sizes) for point in comparison.points])
    assert seen[0] == seen[1]
    assert seen[0]
