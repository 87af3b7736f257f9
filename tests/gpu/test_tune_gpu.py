"""`pipeline tune` on a GPU; no torch is needed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx.parser
import pytest
from helpers import Run
from on_gpu import TARGET, WHY
from onnx import numpy_helper

from pipeline.artifact.artifact import Artifact
from pipeline.convert.driver import run, verify
from pipeline.runtime.engine import load
from pipeline.spec.config import Config

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(TARGET is None, reason=WHY)]

MODEL = """
<ir_version: 8, opset_import: ["" : 17]>
g (float[b, 256] x) => (float[b, 256] y) {
    a = MatMul (x, k)
    c = Tanh (a)
    y = MatMul (c, k)
}"""


@pytest.fixture
def products(tmp_path: Path) -> Path:
    """Two matrix products with a batch of 1..64, in half precision."""
    assert TARGET is not None
    model = onnx.parser.parse_model(MODEL)
    weights = np.random.default_rng(0).normal(size=(256, 256)).astype(np.float32) / 16
    model.graph.initializer.append(numpy_helper.from_array(weights, "k"))
    onnx.save(model, tmp_path / "p.onnx")
    config = Config(
        str(tmp_path / "p.onnx"), out=tmp_path / "p", target=TARGET.name, dims=("b=1:8:64",),
        precision="fp16",
    )  # fmt: skip
    return run(config).path


def test_the_kept_engine_is_right_and_its_table_goes_with_the_next_build(
    cli: Run, products: Path
) -> None:
    words = ("--shape", "b=1", "--shape", "b=64", "--repeat", "10", "--json")
    code, output, errors = cli("tune", products, *words)
    assert code == 0, errors
    done = json.loads(output)
    assert json.loads((products / "tuning.json").read_text()) == done
    assert not products.with_name("p.tune").exists()
    trials = {trial["name"]: trial for trial in done["trials"]}
    assert {"as it is", "all half"} <= trials.keys()
    assert {name.rpartition(" + ")[2] for name in trials} >= {"own profiles", "level 5"}
    kept, first = trials[done["kept"]], trials["as it is"]
    assert kept["times"] and not kept["why"]
    assert [time["sizes"] for time in kept["times"]] == [{"b": 1}, {"b": 64}]
    if first["times"]:
        shares = [a["ms"] / b["ms"] for a, b in zip(kept["times"], first["times"], strict=True)]
        assert np.prod(shares) <= 1.0
    manifest = Artifact.open(products).manifest
    assert manifest.engine_compared and manifest.comparison is not None
    assert manifest.comparison.passed
    assert verify(products).ok
    with load(products) as engine:
        x = np.random.default_rng(1).normal(size=(5, 256)).astype(np.float32)
        assert engine({"x": x})["y"].shape == (5, 256)
    assert cli("build", products)[0] == 0
    assert not (products / "tuning.json").exists()


def test_no_time_leaves_the_artifact_as_it_is(cli: Run, products: Path) -> None:
    before = Artifact.open(products).manifest
    code, output, errors = cli("tune", products, "--minutes", "1e-9")  # over before the first try
    assert code == 1, errors
    assert "To try more: --minutes" in output
    assert Artifact.open(products).manifest == before
