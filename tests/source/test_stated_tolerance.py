"""Tolerances of single outputs, stated on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest

from pipeline.commands.parser import command_parser
from pipeline.commands.source_options import config_fields
from pipeline.convert.driver import run_export
from pipeline.convert.keys import stage_keys, weights_info
from pipeline.convert.options import stage_options
from pipeline.errors import InputError
from pipeline.machine.target import find_target
from pipeline.source.find import find_source
from pipeline.spec.config import Config
from pipeline.spec.tensors import Output, Tolerance

FILE = """
import torch

class Detector(torch.nn.Module):
    def forward(self, x):
        return {"boxes": 640 * x.sigmoid(), "scores": x.softmax(-1), "best": x.argmax(-1)}
"""
OWN = Tolerance(1e-3, 0.05, "given with --tolerance")


def config_of(*words: str, source: str = "detector.py:Detector", **more: Any) -> Config:
    inputs = ["--input", "x:{b}x7", "--dim", "b=1:2:4"] if ".py" in source else []
    arguments = command_parser().parse_args(["export", source, *inputs, *words])
    return Config(**{**config_fields(arguments), **more})


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "detector.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_one_output_is_stated_and_the_others_are_measured(folder: Path) -> None:
    report = run_export(config_of("--tolerance", "boxes=1e-3,0.05", out=folder / "a"))
    found = report.manifest.tolerances()
    assert found["boxes"] == OWN
    assert found["scores"].why.startswith("measured: ") and found["scores"].atol < 1e-4
    assert found["best"].atol == 0


def test_one_output_beside_a_tolerance_for_all(folder: Path) -> None:
    words = ["--tolerance", "1e-4,1e-6", "--tolerance", "best=0,0,0.01"]
    found = run_export(config_of(*words, out=folder / "a")).manifest.tolerances()
    assert found["best"].differing == 0.01 and found["best"].atol == 0
    assert found["boxes"] == found["scores"] == Tolerance(1e-4, 1e-6, "given with --tolerance")


def test_an_output_that_cannot_be_measured_may_be_stated(folder: Path) -> None:
    """The advice of the error works."""
    chaos = "640 * x.sigmoid()", "(1e6 * (x.sum(-1) + 1e4)).sin()"
    (folder / "detector.py").write_text(FILE.replace(*chaos))
    with pytest.raises(InputError, match="output boxes: float32 rounding alone moves it"):
        run_export(config_of(out=folder / "a"))
    report = run_export(config_of("--tolerance", "boxes=0.1,2", out=folder / "a"))
    assert report.manifest.tolerances()["scores"].why.startswith("measured: ")


def test_the_distance_of_integers_has_no_effect(folder: Path) -> None:
    """Integers are compared exactly. The advice of the error works."""
    with pytest.raises(InputError, match=r"output is int64, .* exactly: 0,1 .*best=0,0,0\.001"):
        run_export(config_of("--tolerance", "best=0,1", out=folder / "a"))
    report = run_export(config_of("--tolerance", "best=0,0,0.001", out=folder / "a"))
    assert report.manifest.tolerances()["best"].differing == 0.001


def test_the_distance_of_integers_of_an_onnx_file(tmp_path: Path) -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 18]> g (float[n,4] x) => (int64[n,1] y)'
        "{ y = ArgMax<axis = 1>(x) }"
    )
    onnx.save(model, tmp_path / "m.onnx")
    with pytest.raises(InputError, match="the output is int64, and integers"):
        words = ["--tolerance", "y=1e-3,1", "--tolerance", "1e-3,1"]
        more = {"source": str(tmp_path / "m.onnx"), "dims": ("n=1:2:4",), "out": tmp_path / "a"}
        run_export(config_of(*words, **more))


def test_an_onnx_file(tmp_path: Path) -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 18]> g (float[n,4] x) => (float[n,4] y, float[n,4] z)'
        "{ y = Relu(x)  z = Exp(x) }"
    )
    onnx.save(model, tmp_path / "m.onnx")
    source = str(tmp_path / "m.onnx")
    more: dict[str, Any] = {"dims": ("n=1:2:4",), "out": tmp_path / "a"}
    config = config_of("--tolerance", "z=1e-3,0.05", source=source, **more)
    found = run_export(config).manifest.tolerances()
    assert found["z"] == OWN and found["y"].why.startswith("measured: ")
    with pytest.raises(InputError, match="tolerance boxes: no such output; the outputs are y, z"):
        find_source(config_of("--tolerance", "boxes=1e-3,0.05", source=source, **more))


def test_an_unknown_output_is_named(folder: Path) -> None:
    with pytest.raises(InputError) as caught:
        run_export(config_of("--tolerance", "box=1e-3,0.05", out=folder / "a"))
    assert "tolerance box: no such output; the outputs are boxes, scores, best" in str(caught.value)


def test_it_does_not_replace_what_a_source_states() -> None:
    with pytest.raises(InputError, match="model linear states the tolerance of output y; leave"):
        find_source(Config("linear", output_tolerances={"y": OWN}))


@pytest.mark.usefixtures("folder")
def test_a_spec_without_outputs_may_name_them() -> None:
    spec = find_source(config_of())
    with pytest.raises(InputError, match="Set the tolerance of each Output"):
        type(spec)("m", spec.build, spec.inputs, (Output("y"),), output_tolerances={"y": OWN})


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["boxes=1e-3"], "'1e-3' is not RTOL,ATOL"),
        (["=1e-3,1e-3"], "'=1e-3,1e-3' names no output"),
        (["boxes=2,1"], "tolerance rtol=2.0: 1 or more would pass anything"),
        (["boxes=1e-3,1", "boxes=1e-4,1"], "--tolerance: output boxes has two tolerances"),
        (["1e-3,1", "1e-4,1"], "--tolerance: all outputs have two tolerances"),
    ],
)
def test_wrong_texts(words: list[str], said: str) -> None:
    with pytest.raises(InputError) as caught:
        config_of(*(part for word in words for part in ("--tolerance", word)))
    assert said in str(caught.value)


@pytest.mark.usefixtures("folder")
def test_another_tolerance_is_another_conversion() -> None:
    keys = []
    for text in ("boxes=1e-3,0.05", "boxes=1e-3,0.06"):
        config = config_of("--tolerance", text)
        options = stage_options(config, find_target("rtx-1.7"))
        spec = find_source(config)
        keys.append(stage_keys(config, spec, options, weights_info(config, spec))["compare"])
    assert keys[0] != keys[1]
