"""An ONNX file that is compared with another one, such as a quantised file with its float one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import numpy_helper

from pipeline.commands.parser import command_parser
from pipeline.commands.source_options import config_fields
from pipeline.convert.driver import run, verify
from pipeline.convert.options import Verify
from pipeline.errors import CompareError, InputError
from pipeline.source.find import find_source
from pipeline.spec.config import Config

STEP = 0.01  # of the quantised values
FLOAT = "y = MatMul(x, w)"
QUANTISED = """
    q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z)
    p = QuantizeLinear(w, s, z) e = DequantizeLinear(p, s, z) y = MatMul(d, e)
"""


def save(path: Path, nodes: str, *, seed: int = 0, ends: str = "") -> Path:
    """A file with random weights in -1..1; the same seed gives the same weights."""
    ends = ends or "(float[n, 8] x) => (float[n, 4] y)"
    constants = f"<float[8, 4] w, float s = {{{STEP}}}, int8 z = {{0}}>"
    text = f'<ir_version: 8, opset_import: ["" : 18]> g {ends} {constants} {{ {nodes} }}'
    model = onnx.parser.parse_model(text)
    w = np.random.default_rng(seed).uniform(-1, 1, (8, 4)).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(w, "w"))
    onnx.save(model, path)
    return path


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "float.onnx", FLOAT)
    save(tmp_path / "quantised.onnx", QUANTISED)
    return tmp_path


def config_of(*words: str, source: str = "quantised.onnx", **more: Any) -> Config:
    line = ["convert", source, "--dim", "n=1:4:16", *words]
    return Config(**{"out": "a", **config_fields(command_parser().parse_args(line)), **more})


def test_the_other_file_is_the_reference(files: Path) -> None:
    config = config_of("--reference", "float.onnx", "--tolerance", "0,0.1")
    done = run(config)
    assert done.manifest.reference == "reference" and done.ok
    assert done.manifest.comparison is not None
    errors = [
        result.max_abs
        for point in done.manifest.comparison.points
        for result in point.results
        if result.pair == ("reference", "exported")
    ]
    assert len(errors) == len(done.manifest.comparison.points)
    # 8 products of numbers of at most 1, each within half a step
    assert all(error is not None and 1e-4 < error < 8 * STEP for error in errors)
    assert any("another file: float.onnx" in text for text in done.manifest.export.notes)
    assert run(config).unchanged
    save(files / "float.onnx", FLOAT, seed=1)
    with pytest.raises(
        CompareError, match=r"y of exported differs from reference at .* first at min"
    ):
        run(config)


def test_stored_outputs_of_the_reference_are_enough_for_a_later_comparison(files: Path) -> None:
    run(config_of("--reference", "float.onnx", "--tolerance", "0,0.1"))
    (files / "float.onnx").unlink()
    done = verify(files / "a")
    assert done.ok and done.manifest.comparison is not None
    assert {"reference"} == {
        result.pair[0]
        for point in done.manifest.comparison.points
        for result in point.results
        if result.pair[1] == "exported"
    }
    with pytest.raises(InputError, match=r"need the reference file\. Convert again"):
        verify(files / "a", Verify(shapes=("n=3",)))


@pytest.mark.usefixtures("files")
def test_a_reference_needs_a_tolerance() -> None:
    expected = r"with --tolerance RTOL,ATOL, .*At n=2 they differ in y by 0\.0\d+ \(its largest"
    with pytest.raises(InputError, match=expected):
        run(config_of("--reference", "float.onnx"))


@pytest.mark.usefixtures("files")
def test_quantisation_that_is_too_coarse_fails() -> None:
    """Without the reference the same file passes: it agrees with itself."""
    assert run(config_of()).ok
    with pytest.raises(CompareError, match="differs by up to 0"):
        run(config_of("--reference", "float.onnx", "--tolerance", "0,1e-3"))


@pytest.mark.parametrize(
    ("nodes", "ends", "text"),
    [
        ("y = MatMul(v, w)", "(float[n, 8] v) => (float[n, 4] y)", "its inputs are v float, but"),
        (
            "out = MatMul(x, w)",
            "(float[n, 8] x) => (float[n, 4] out)",
            "its outputs are out float, but",
        ),
        (
            "f = Cast<to=1>(x) y = MatMul(f, w)",
            "(double[n, 8] x) => (float[n, 4] y)",
            "its inputs are x double, but those of quantised.onnx are x float",
        ),
    ],
)
def test_another_interface_is_refused(files: Path, nodes: str, ends: str, text: str) -> None:
    save(files / "other.onnx", nodes, ends=ends)
    with pytest.raises(InputError, match=text):
        run(config_of("--reference", "other.onnx", "--tolerance", "0,0.1"))


@pytest.mark.usefixtures("files")
def test_a_torch_model_has_no_other_reference() -> None:
    with pytest.raises(InputError, match="only an ONNX file can have another reference"):
        run(Config("linear", reference="float.onnx"))
    with pytest.raises(InputError, match="only an ONNX file can have another reference"):
        replace(find_source(Config("linear")), reference=Path("float.onnx"))
