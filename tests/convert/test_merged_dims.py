"""Dims that the export merged: profiles and sizes may still name them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from onnx import TensorProto, helper

from pipeline.convert.driver import run, run_export
from pipeline.convert.plan import chosen_profiles, with_profiles
from pipeline.convert.report import Report
from pipeline.errors import InputError
from pipeline.source.find import find_source
from pipeline.spec.config import Config
from pipeline.spec.dims import Dim
from pipeline.spec.model import Input, ModelSpec, Output, Tolerance
from pipeline.spec.profiles import parse_sizes
from pipeline.spec.rules import AppliedRule, merged_dims

N, M = Dim("n", 1, 4, 8), Dim("m", 1, 4, 8)


def equal(text: str) -> AppliedRule:
    return AppliedRule("equal", "n", (), text, "", "")


@pytest.fixture
def add(tmp_path: Path) -> Path:
    """Two inputs with a dim each, which must be equal."""
    values = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [3, dim])
        for name, dim in (("x", "h"), ("y", "w"), ("z", "h"))
    ]
    node = helper.make_node("Add", ["x", "y"], ["z"])
    graph = helper.make_graph([node], "add", values[:2], values[2:])
    opsets = [helper.make_opsetid("", 18)]
    path = tmp_path / "add.onnx"
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), path)
    return path


def test_a_profile_may_name_both_dims(add: Path, tmp_path: Path) -> None:
    config = Config(
        str(add),
        out=tmp_path / "artifact",
        dims=("h=2:4:8", "w=2:4:8"),
        profiles=("h=2:4:8,w=2:4:6",),
    )
    manifest = run_export(config).manifest
    assert list(manifest.interface.dims) == ["h"]
    assert manifest.merged == {"w": "h"}
    interface = with_profiles(manifest, chosen_profiles(config, find_source(config)))
    assert interface.profiles == manifest.interface.profiles
    assert interface.profiles[0].resolve(interface.dims).ranges == {"h": (2, 4, 6)}


def test_sizes_may_name_both_dims() -> None:
    dims = {"n": N}
    assert parse_sizes("n=2,m=2", dims, {"m": "n"}) == {"n": 2}
    assert parse_sizes("m=2", dims, {"m": "n"}) == {"n": 2}
    with pytest.raises(InputError, match="m must equal the other names of n"):
        parse_sizes("n=2,m=3", dims, {"m": "n"})
    with pytest.raises(InputError, match="no dim 'm'"):
        parse_sizes("m=2", dims)


def test_merged_dims() -> None:
    chain = [equal("n == m"), equal("k == l"), equal("m == l")]
    assert merged_dims(chain, {"n": N}) == {"m": "n", "k": "n", "l": "n"}
    assert merged_dims([equal("n == m")], {"n": N, "m": M}) == {}  # it stays a rule
    others = [equal("n <= m"), equal("n == 2*m"), equal("")]
    assert merged_dims(others, {"n": N}) == {}


# --- whole conversions

TEXT = (
    '<ir_version: 8, opset_import: ["" : 18]> g (float[1, h] x, float[1, w] z) => '
    "(float[1, n] y) { y = Add(x, z) }"
)


class Sum(torch.nn.Module):
    def forward(self, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        return x + z


def torch_model(_: Path) -> dict[str, Any]:
    h, w = Dim("h", 16, 24, 40, auto=True), Dim("w", 16, 24, 40, auto=True)
    inputs = (Input("x", (1, h)), Input("z", (1, w)))
    spec = ModelSpec("sum", lambda _: Sum(), inputs, (Output("y"),), Tolerance(0, 0, "a test"))
    return {"model": replace(spec, key="sum")}


def onnx_file(folder: Path) -> dict[str, Any]:
    onnx.save(onnx.parser.parse_model(TEXT), folder / "sum.onnx")
    return {"model": str(folder / "sum.onnx"), "dims": ("h=16:24:40", "w=16:24:40")}


def checked(report: Report, sizes: tuple[int, int, int], point: int) -> None:
    manifest = report.manifest
    assert [dict(p.ranges) for p in manifest.interface.profiles] == [{"h": sizes}]
    assert manifest.comparison is not None and manifest.comparison.passed
    assert {"h": point} in [dict(p.sizes) for p in manifest.comparison.points]


@pytest.mark.parametrize("source", [torch_model, onnx_file])
def test_profiles_and_shapes_name_the_dim_that_became_another(tmp_path: Path, source: Any) -> None:
    given = {**source(tmp_path), "out": tmp_path / "a"}
    first = run(Config(**given, profiles=("h=16:24:32,w=20:24:36",), shapes=("h=21,w=21",)))
    checked(first, (20, 24, 32), 21)
    stages = {stage.name: stage.seconds for stage in first.manifest.stages}
    # the export is used again
    again = run(Config(**given, profiles=("w=16:24:24",), shapes=("w=17",)))
    checked(again, (16, 24, 24), 17)
    assert {s.name: s.seconds for s in again.manifest.stages}["export"] == stages["export"]


def test_a_rule_names_the_dim_that_became_another(tmp_path: Path) -> None:
    spec = replace(torch_model(tmp_path)["model"], rules=("h + w <= 70", "w >= 17"))
    report = run(Config(spec, out=tmp_path / "a", profiles=("h=17:24:35,w=17:24:35",)))
    assert report.manifest.interface.rules == ("h + h <= 70", "h >= 17")
    checked(report, (17, 24, 35), 24)
