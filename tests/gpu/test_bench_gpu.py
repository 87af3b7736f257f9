"""`pipeline bench` and the benchmarks of engines, on a GPU; no torch is needed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import onnx.parser
import pytest
from helpers import Run
from on_gpu import ALONE, TARGET, WHY
from onnx import numpy_helper

from pipeline.convert.driver import run
from pipeline.spec.config import Config

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks" / "engines"))

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(TARGET is None, reason=WHY)]

MODEL = """
<ir_version: 8, opset_import: ["" : 17]>
g (float[1, 3, h, w] x) => (float[1, 8, h, w] y) {
    a = Conv <pads = [1, 1, 1, 1]> (x, k)
    y = Relu (a)
}"""


@pytest.fixture(scope="module")
def convolution(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A converted convolution at 8..1024 x 8..1024."""
    assert TARGET is not None
    folder = tmp_path_factory.mktemp("bench")
    model = onnx.parser.parse_model(MODEL)
    weights = np.random.default_rng(0).normal(size=(8, 3, 3, 3)).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(weights, "k"))
    onnx.save(model, folder / "c.onnx")
    config = Config(
        str(folder / "c.onnx"), out=folder / "c", target=TARGET.name,
        dims=("h=8:32:1024", "w=8:64:1024"),
    )  # fmt: skip
    return run(config).path


@ALONE
def test_bench_measures_the_corners(cli: Run, convolution: Path, tmp_path: Path) -> None:
    place = tmp_path / "b.json"
    code, output, errors = cli("bench", convolution, "--repeat", "40", "--out", place)
    assert code == 0, errors
    assert "h=8,w=8" in output and "h=1024,w=1024" in output
    report = json.loads(place.read_text())
    assert report["ok"] is True
    assert [p["sizes"] for p in report["points"]] == [
        {"h": 8, "w": 8}, {"h": 32, "w": 64}, {"h": 1024, "w": 1024},
    ]  # fmt: skip
    for point in report["points"]:
        for timing in (point["plain"], point["graph"]):
            assert timing["runs"] >= 40
            assert 0 < timing["least_ms"] <= timing["median_ms"] <= timing["p99_ms"]
            assert timing["calls_per_second"] > 1e3 / timing["p99_ms"] / 2
        output = 4 * 8 * point["sizes"]["h"] * point["sizes"]["w"]
        assert point["engine_bytes"] > output
        assert point["memory_bytes"] is not None


def test_bench_at_a_size_without_graphs(cli: Run, convolution: Path) -> None:
    words = ("--shape", "h=9,w=100", "--no-graph", "--json", "--repeat", "5")
    code, output, errors = cli("bench", convolution, *words)
    assert code == 0, errors
    (point,) = json.loads(output)["points"]
    assert point["sizes"] == {"h": 9, "w": 100}
    assert point["graph"] is None and point["graph_why"] == "not asked for"


@ALONE
def test_longer_work_takes_longer(cli: Run, convolution: Path) -> None:
    """1024 x 1024 has 16,384 times the work of 8 x 8, and moves 45 MB."""
    words = ("--shape", "h=8,w=8", "--shape", "h=1024,w=1024", "--json")
    _, output, _ = cli("bench", convolution, *words)
    small, large = json.loads(output)["points"]
    assert large["graph"]["median_ms"] > small["graph"]["median_ms"]


@ALONE
def test_memory_stays_as_it_is_after_the_first_hundred(convolution: Path) -> None:
    import engine_overhead

    from pipeline.artifact.artifact import Artifact

    found = engine_overhead.steady(Artifact.open(convolution), 2000, numpy=False)
    for name in ("gpu", "engine"):
        first, last = found[name]
        assert last == first > 0


def test_overhead_is_measured_on_the_tiny_model(tmp_path: Path) -> None:
    import engine_overhead

    rows = engine_overhead.overhead(engine_overhead.tiny(tmp_path), 100)
    assert [row["what"] for row in rows] == [
        "same size", "sizes change", "same size, an engine's output going in",
        "CUDA graph, against launching one", "numpy in and out at min, against a call waited for",
    ]  # fmt: skip
    assert all(row["bare_us"] > 0 and row["engine_us"] > 0 for row in rows)
