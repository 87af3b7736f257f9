"""Dims that the export merged: profiles and sizes may still name them."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from pipeline.convert.driver import run_export
from pipeline.convert.plan import chosen_profiles, with_profiles
from pipeline.errors import InputError
from pipeline.source.find import find_source
from pipeline.spec.config import Config
from pipeline.spec.dims import Dim
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
