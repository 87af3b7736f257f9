"""Locating an engine's first difference. ONNX Runtime on a changed model is the engine."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from helpers import Run

from pipeline.artifact.artifact import Artifact
from pipeline.compare.divergence.engine import (
    EngineParting,
    Engines,
    describe_parting,
    distance,
    search,
)
from pipeline.convert.driver import run
from pipeline.errors import InputError
from pipeline.spec.config import Config

NAMES = [f"v{n}" for n in range(100)]


def silent(_: str) -> None:
    pass


class Faulty:
    """An engine that is wrong from one value on, except where `heals` says so."""

    def __init__(self, start: int, heals: Mapping[str, bool] | None = None) -> None:
        self.start, self.heals = start, heals or {}
        self.asked: list[Sequence[str] | None] = []

    def __call__(self, names: Sequence[str] | None) -> dict[str, float]:
        self.asked.append(names)
        well = names is not None and (
            self.heals.get("fresh", False) or any(self.heals.get(n, False) for n in names)
        )
        off = 1e-6 if well else 0.5
        far = {n: off if NAMES.index(n) >= self.start else 1e-6 for n in names or ()}
        return {**far, "y": off}


@pytest.mark.parametrize("start", [0, 1, 37, 98, 99])
def test_the_first_value_that_is_off(start: int) -> None:
    engine = Faulty(start)
    found = search(NAMES, ["y"], engine, 1e-4, silent)
    before = NAMES[start - 1] if start else ""
    assert found == EngineParting(0.5, NAMES[start], before, builds=len(engine.asked) - 1)
    assert found.builds <= 3


def test_only_the_output_is_off() -> None:
    assert search(NAMES, ["y"], Faulty(100), 1e-4, silent).first == "y"


def test_an_engine_that_is_right() -> None:
    found = search(NAMES, ["y"], lambda _: {"y": 2e-5}, 1e-4, silent)
    assert found == EngineParting(2e-5)
    assert describe_parting(found, lambda _: None, "fp32").startswith(
        "agrees with ONNX Runtime: the worst"
    )


def test_another_build_is_right() -> None:
    engine = Faulty(40, {"fresh": True})
    found = search(NAMES, ["y"], engine, 1e-4, silent)
    assert found.fresh and found.builds == 2 and engine.asked[-1] == []
    assert "a new engine built from the same model.onnx is right" in describe_parting(
        found, lambda _: None, "fp32"
    )


def test_a_fault_that_goes_away_where_it_is_looked_at() -> None:
    """The fused part from v30 to v69 is wrong, unless one of its values is an output."""
    engine = Faulty(69, {f"v{n}": True for n in range(30, 69)})
    found = search(NAMES, ["y"], engine, 1e-4, silent)
    assert found.fused
    assert (found.before, found.first) == ("v29", "v69")
    assert found.builds <= 16
    assert describe_parting(found, lambda _: None, "fp32").startswith(
        "wrong in the layers that TensorRT fuses from v29 up to"
    )


def test_a_fault_that_goes_away_with_many_outputs_alone() -> None:
    """A second output in the part removes the fault; one output does not."""

    class Shy(Faulty):
        def __call__(self, names: Sequence[str] | None) -> dict[str, float]:
            found = super().__call__(names)
            return found if len(names or ()) < 2 else dict.fromkeys(found, 1e-6)

    found = search(NAMES, ["y"], Shy(42), 1e-4, silent)
    assert (found.before, found.first, found.fused) == ("v41", "v42", False)


def test_distances() -> None:
    a = np.array([3.0, 4.0, -np.inf, np.nan])
    assert distance(a, a) == 0
    assert distance(a + np.array([0, 0.5, 0, 0]), a) == pytest.approx(0.1)
    assert distance(a[:2], a) == math.inf
    assert distance(np.array([np.nan, 1.0]), np.array([1.0, 1.0])) == math.inf
    assert distance(np.zeros(2), np.zeros(2)) == 0
    assert distance(np.full(2, 1e-3), np.zeros(2)) > 1


MODEL = """<ir_version: 8, opset_import: ["" : 17]>
net (float[n,4] x) => (float[n,4] y) <float[4] two = {2, 2, 2, 2}>
{ a = Exp(x) b = Mul(a, two) c = Tanh(b) d = Add(c, x) e = Mul(d, d) y = Sub(e, a) }"""


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("net")
    onnx.save(onnx.parser.parse_model(MODEL), folder / "net.onnx")
    return run(Config(str(folder / "net.onnx"), out=folder / "net", dims=("n=1:2:4",))).path


class Stand(Engines):
    """ONNX Runtime in place of TensorRT, with a Sigmoid in place of a Tanh."""

    def _run(self, model: Path) -> dict[str, np.ndarray]:
        import onnxruntime as ort

        proto = onnx.load(model)
        for node in proto.graph.node:
            node.op_type = "Sigmoid" if node.op_type == "Tanh" else node.op_type
        session = ort.InferenceSession(proto.SerializeToString())
        names = [output.name for output in session.get_outputs()]
        return dict(zip(names, session.run(names, dict(self.feed)), strict=True))

    def _own(self) -> Mapping[str, np.ndarray]:
        return self._run(self.model)

    def _engine(self, folder: Path, ranks: Mapping[str, int]) -> Mapping[str, np.ndarray]:
        assert all(rank == 2 for rank in ranks.values())
        return self._run(folder / "model.onnx")


def test_the_node_is_named(artifact: Path) -> None:
    engines = Stand(Artifact.open(artifact), {"n": 3}, ())
    assert engines.values == ["a", "b", "c", "d", "e"]
    found = search(engines.values, engines.outputs, engines, 1e-4, silent)
    text = describe_parting(found, engines.maker, "fp32")
    assert text.startswith(
        "first difference: Tanh node Tanh_c: c; b is right (the worst output differs"
    )


def test_sizes_that_are_not_legal(artifact: Path, cli: Run) -> None:
    code, _, errors = cli("locate", artifact, "--shape", "n=5")
    assert code == InputError.exit_code
    assert "n=5" in errors


def test_without_a_gpu_it_says_so(artifact: Path, cli: Run) -> None:
    from pipeline.machine.gpu import why_not
    from pipeline.machine.target import TARGETS

    if not why_not(TARGETS["rtx-1.7"]):
        pytest.skip("a GPU here runs the engine")
    code, _, errors = cli("locate", artifact)
    assert code != 0 and "error: " in errors and len(errors.strip().splitlines()) <= 2
