"""ONNX Runtime's DFT is inaccurate in float32, and is computed in float64 for a comparison."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest

import pipeline
from pipeline.graph.dft import exact_dft
from pipeline.graph.session import open_session, run_onnx

LENGTHS = (43, 97, 100, 128)
OPSET_20 = (
    "(float[n,t,2] x) => (float[n,t,2] y) <int64 one = {1}> { s = Shape(x) l = Gather(s, one) "
    "y = DFT(x, l, one) }"
)
OPSET_17 = (
    "(float[n,t,2] x) => (float[n,t,2] y) <int64 one = {1}> { s = Shape(x) l = Gather(s, one) "
    "y = DFT<axis=1>(x, l) }"
)
IN_A_BRANCH = (
    "(float[n,t,2] x, bool c) => (float[n,t,2] y) <int64 one = {1}> { s = Shape(x) "
    "l = Gather(s, one) y = If(c) <then_branch = a () => (float[n,t,2] p) { p = DFT(x, l, one) }, "
    "else_branch = b () => (float[n,t,2] q) { q = Identity(x) }> }"
)


def saved(text: str, opset: int, file: Path) -> Path:
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : {opset}]> g {text}')
    onnx.save(model, file)
    return file


def errors(found: list[np.ndarray], feeds: list[dict[str, np.ndarray]]) -> list[float]:
    """The largest error of each result in units of its largest value, against float64."""
    wanted = [np.fft.fft(feed["x"].astype(np.float64) @ [1, 1j]) for feed in feeds]
    pairs = zip(found, wanted, strict=True)
    return [np.abs(got @ [1, 1j] - want).max() / np.abs(want).max() for got, want in pairs]


@pytest.mark.parametrize(("text", "opset"), [(OPSET_20, 20), (OPSET_17, 17), (IN_A_BRANCH, 20)])
def test_the_comparison_is_exact_where_onnx_runtime_is_not(
    tmp_path: Path, text: str, opset: int
) -> None:
    file = saved(text, opset, tmp_path / "m.onnx")
    rng = np.random.default_rng(0)
    feeds = [{"x": rng.normal(size=(1, n, 2)).astype(np.float32)} for n in LENGTHS]
    if "bool c" in text:
        feeds = [{**feed, "c": np.array(True)} for feed in feeds]
    own = open_session(file)
    assert max(errors([own.run(None, feed)[0] for feed in feeds], feeds)) > 5e-6
    assert max(errors([outputs["y"] for outputs in run_onnx(file, feeds)], feeds)) < 3e-7


def test_other_models_stay(tmp_path: Path) -> None:
    text = "(float[n] x) => (float[n] DFT) { DFT = Relu(x) }"
    assert exact_dft(saved(text, 20, tmp_path / "m.onnx")) is None


def test_a_model_with_a_transform_of_odd_lengths_converts(tmp_path: Path) -> None:
    import torch

    class Net(torch.nn.Module):
        def forward(self, x):
            return torch.fft.fftn(x, dim=(1, 2)).real

    report = pipeline.convert(
        Net(), {"x": "{b}x{t}x10"}, {"b": (1, 2), "t": (41, 100)}, out=tmp_path / "a"
    )
    assert report.ok
