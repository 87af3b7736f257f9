"""Conversions in half precision: their files, and their findings without a GPU."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from helpers import refinish
from on_gpu import save_net

from pipeline.artifact.artifact import Artifact
from pipeline.convert.driver import Report, run, run_build, run_export, run_rewrite, run_verify
from pipeline.convert.options import Verify
from pipeline.errors import CompareError
from pipeline.spec.config import Config
from pipeline.spec.model import Tolerance
from pipeline.spec.tensors import Precision

WIDE = Tolerance(1e-2, 1e-2, "fp16 rounding")


def converted(
    folder: Path, tolerance: Tolerance | None = None, precision: Precision = "fp16"
) -> Report:
    """`save_net`'s net, converted for the installed TensorRT."""
    dims = ("b=1:2:3", "h=8:12:16", "w=8:12:16")
    return run(
        Config(
            str(folder / "net.onnx"), out=folder / "net", dims=dims, precision=precision,
            engine_tolerance=tolerance,
        )
    )  # fmt: skip


@pytest.fixture
def net(tmp_path: Path) -> Path:
    save_net(tmp_path / "net.onnx")
    return tmp_path


def test_what_was_built_is_kept_and_compared(net: Path) -> None:
    report = converted(net, WIDE)
    assert report.ok
    assert "half.onnx" in report.manifest.files
    assert report.manifest.comparison is not None
    for point in report.manifest.comparison.points:
        held = {result.pair: result for result in point.results}
        assert ("exported", "half") in held
        assert held["exported", "half"].max_abs > 0  # type: ignore[operator]


def test_without_a_tolerance_of_its_own_it_is_held_to_that_of_fp32(net: Path) -> None:
    with pytest.raises(
        CompareError,
        match=r"half against .* No tolerance is stated for fp16.* Over all sizes.*by up to \d",
    ):
        converted(net)


def test_an_overflow_shows_without_a_gpu(net: Path) -> None:
    text = """<ir_version: 8, opset_import: ["" : 17]>
        g (float[b,3,h,w] x) => (float[b,1,h,w] y)
        <float[1,3,1,1] k = {6e4, 6e4, 6e4}, float[1] tenth = {0.1}>
        { a = Conv(x, k) b = Relu(a) y = Mul(b, tenth) }"""
    onnx.save(onnx.parser.parse_model(text), net / "net.onnx")
    assert converted(net, precision="fp32").ok
    overflow = r"half has NaN .*\. First overflow in half precision: the "
    overflow += r"Conv node .*: a reaches 1\.\d+e\+05\. fp16 overflows beyond 65504"
    with pytest.raises(CompareError, match=overflow):
        converted(net, WIDE)


def test_it_is_compared_before_it_is_built(net: Path) -> None:
    dims = ("b=1:2:3", "h=8:12:16", "w=8:12:16")
    config = Config(
        str(net / "net.onnx"), out=net / "net", dims=dims, precision="fp16",
        target="tensorrt-8.6", engine_tolerance=WIDE,
    )  # fmt: skip
    run_export(config)
    run_rewrite(net / "net")
    report = run_verify(net / "net")
    assert report.ok
    assert report.manifest.comparison is not None
    (point, *_) = report.manifest.comparison.points
    assert ("exported", "half") in {result.pair for result in point.results}
    assert not run_verify(net / "net", Verify(engine_tolerance=Tolerance(1e-6, 1e-6, "narrow"))).ok


def test_what_got_worse_is_told_without_a_gpu(net: Path) -> None:
    old = converted(net, WIDE).path
    new = Path(shutil.copytree(old, net / "new"))
    assert run_verify(new, Verify(against=old)).ok
    half = onnx.load(new / "half.onnx")
    for tensor in half.graph.initializer:
        if tensor.name == "second/half":
            weights = onnx.numpy_helper.to_array(tensor) * np.float16(1.02)
            tensor.CopyFrom(onnx.numpy_helper.from_array(weights, tensor.name))
    onnx.save(half, new / "half.onnx")
    refinish(new)
    found = run_verify(new, Verify(against=old)).regressions
    assert found
    assert all(one.facts["run"] == "half" for one in found)
    assert {one.kind for one in found} <= {"error-too-large", "error-grew"}
    assert all(" of half at stored" in one.text for one in found)


def test_another_precision_takes_it_away(net: Path) -> None:
    report = converted(net, WIDE)
    run_build(report.path, precision="tf32")
    assert "half.onnx" not in Artifact.open(report.path).manifest.files
    assert not (report.path / "half.onnx").exists()
    run_build(report.path, precision="fp16")
    assert "half.onnx" in Artifact.open(report.path).manifest.files
