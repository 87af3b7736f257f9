"""Refit of an artifact: what is exported and rewritten again, and what is refused.

TensorRT refits only on a GPU, so here its part is pretended: the plan is an ONNX file, which ONNX
Runtime runs. tests/gpu/test_refit_gpu.py is real.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnx
import onnx.parser
import pytest
from helpers import refinish
from onnx import numpy_helper

import pipeline
from pipeline.artifact.artifact import Artifact
from pipeline.artifact.manifest import Manifest
from pipeline.build import refit as refitting
from pipeline.build.build import Built
from pipeline.compare import stage
from pipeline.compare.engine_runs import OpenedEngine
from pipeline.convert import driver, stages
from pipeline.convert import refit as refit_module
from pipeline.convert.driver import run_build, run_export, run_rewrite
from pipeline.convert.refit import refit
from pipeline.errors import CompareError, InputError, TargetMissing
from pipeline.graph.session import run_reference
from pipeline.machine.gpu import Gpu
from pipeline.spec.config import Config
from pipeline.spec.plan_flags import PlanFlags
from pipeline.spec.tensors import Precision

REFIT = PlanFlags(refit=True)
_NET = """<ir_version: 8, opset_import: ["" : 17]>
net (float[b,3] x) => (float[b,4] y) { a = MatMul(x, w)  y = Relu(a) }"""
Pack = Callable[[Config], Path]


def save(path: Path, seed: int, columns: int = 4) -> Path:
    model = onnx.parser.parse_model(_NET.replace("b,4", f"b,{columns}"))
    values = np.random.default_rng(seed).normal(size=(3, columns)).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(values, "w"))
    path.parent.mkdir(exist_ok=True)
    onnx.save(model, path)
    return path


class Engine:
    """Runs the ONNX file in a plan, and adds `error` to the outputs."""

    error = 0.0

    def __init__(self, plan: bytes) -> None:
        self.model = plan.removeprefix(b"refitted ")
        self.poison, self.profile = False, None

    def __call__(self, feed: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        (outputs,) = run_reference(self.model, [feed])
        return {name: value + np.float32(self.error) for name, value in outputs.items()}


@contextmanager
def opened(folder: Path, manifest: Manifest, *_: object) -> Iterator[OpenedEngine]:
    profiles, precision = manifest.interface.profiles, cast(Precision, manifest.precision)
    yield OpenedEngine(Engine((folder / "engine.plan").read_bytes()), profiles, precision)


@pytest.fixture
def pack(monkeypatch: pytest.MonkeyPatch) -> Pack:
    """Makes an artifact for TensorRT 8.6, whose build and refit are pretended."""

    def build(model: Path, plan: Path, *_: object) -> Built:
        del model
        plan.write_bytes(b"plan")
        return Built("8.6.0", 4, "", 9, [], {})

    def refit_plan(plan: Path, model: Path, *_: object) -> refitting.Refitted:
        assert plan.read_bytes() == b"plan"
        plan.write_bytes(b"refitted " + model.read_bytes())
        return refitting.Refitted(plan.stat().st_size, {"tensorrt refit": 1.0}, 7)

    monkeypatch.setattr(driver, "require", lambda _: "8.6.0")
    monkeypatch.setattr(stages.building, "build", build)
    monkeypatch.setattr(refitting, "refit", refit_plan)
    for module in (refit_module, stage):
        monkeypatch.setattr(module, "why_not_run", lambda *_: "")
    monkeypatch.setattr(stage, "opened", opened)
    monkeypatch.setattr(stage, "find_gpu", lambda: Gpu("some GPU", (9, 0)))

    def made(config: Config) -> Path:
        config = replace(config, target="tensorrt-8.6")
        place = run_export(config).path
        run_rewrite(place)
        run_build(place, flags=REFIT)
        return place

    return made


@pytest.fixture
def place(pack: Pack, tmp_path: Path) -> Path:
    """An artifact of an ONNX file."""
    source = save(tmp_path / "first" / "net.onnx", 0)
    return pack(Config(str(source), out=tmp_path / "net", dims=("b=1:2:4",)))


def weights_of(model: Path) -> np.ndarray:
    (tensor,) = onnx.load(model).graph.initializer
    return numpy_helper.to_array(tensor)


def test_the_new_weights_go_through_all_stages(place: Path, tmp_path: Path) -> None:
    old, new = Artifact.open(place).manifest, save(tmp_path / "second" / "net.onnx", 1)
    said: list[str] = []
    report = refit(place, new, announce=lambda text: said.append(str(text)))
    made = Artifact.open(place).manifest
    assert report.path == place and report.manifest == made
    for name in ("exported.onnx", "model.onnx"):
        assert np.array_equal(weights_of(place / name), weights_of(new))
    assert (place / "engine.plan").read_bytes().startswith(b"refitted ")
    assert made.build is not None and old.build is not None
    assert made.build.flags == REFIT and made.build.layers == 9 and made.build.peak_bytes == 7
    assert made.build.refitted_from == old.files["engine.plan"].sha256
    assert made.model.weights.sha256 != old.model.weights.sha256
    assert (made.name, made.target, made.interface.dims) == (
        old.name, old.target, old.interface.dims,
    )  # fmt: skip
    assert made.comparison is not None and made.comparison.passed and made.engine_compared
    assert [one.name for one in made.stages] == ["export", "rewrite", "build", "compare"]
    assert [text for text in said if " " not in text] == ["export", "rewrite", "build", "compare"]


def test_another_folder(place: Path, tmp_path: Path) -> None:
    before = (place / "manifest.json").read_bytes()
    out = tmp_path / "out"
    assert refit(place, save(tmp_path / "second.onnx", 1), out=out).path == out
    assert Artifact.open(out).manifest.name == Artifact.open(place).manifest.name
    assert (place / "manifest.json").read_bytes() == before


@pytest.mark.parametrize("precision", ["fp32", "tf32", "fp16"])
def test_nothing_is_written_if_the_engine_differs(
    precision: str, pack: Pack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if only half precision or tf32 differs, and the old engine was never compared."""
    source = save(tmp_path / "first" / "net.onnx", 0)
    place = pack(Config(str(source), out=tmp_path / "net", dims=("b=1:2:4",), precision=precision))
    assert Artifact.open(place).manifest.comparison is None
    before = contents(place)
    monkeypatch.setattr(Engine, "error", 10.0)
    new = save(tmp_path / "second" / "net.onnx", 1)
    with pytest.raises(CompareError, match=rf"{place} is unchanged\n! y of engine differs"):
        refit(place, new)
    assert contents(place) == before
    out = tmp_path / "out"
    with pytest.raises(CompareError, match=f"{out} was not written"):
        refit(place, new, out=out)
    assert not out.exists()
    monkeypatch.setattr(Engine, "error", 0.0)
    assert refit(place, new).manifest.engine_compared


def test_nothing_is_written_if_the_engine_was_not_compared(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, new = contents(place), save(tmp_path / "second" / "net.onnx", 1)
    monkeypatch.setattr(stage, "why_not_run", lambda *_: "the GPU is busy")
    text = rf"the refitted engine was not compared \(the GPU is busy\); {place} is unchanged"
    with pytest.raises(CompareError, match=text) as error:
        refit(place, new)
    assert "\n" not in str(error.value)
    assert contents(place) == before


def contents(place: Path) -> dict[str, bytes]:
    return {
        path.relative_to(place).as_posix(): path.read_bytes()
        for path in place.rglob("*")
        if path.is_file()
    }


def test_another_structure(place: Path, tmp_path: Path) -> None:
    before = (place / "manifest.json").read_bytes()
    wide = save(tmp_path / "second" / "net.onnx", 1, columns=5)
    text = r"the new weights make another model\.onnx: .* Convert again with these weights"
    with pytest.raises(InputError, match=text):
        refit(place, wide)
    assert (place / "manifest.json").read_bytes() == before


def test_what_is_refused(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new = save(tmp_path / "new.onnx", 1)
    old = Artifact.open(place).manifest
    assert old.build is not None and old.rewrite is not None
    for weights, text in (
        (tmp_path / "none.onnx", "no such file"),
        (save(tmp_path / "second" / "net.safetensors", 1), "Pass a .onnx file with the new ones"),
    ):
        with pytest.raises(InputError, match=text):
            refit(place, weights)
    mine = replace(old.rewrite.passes[0], name="my_pass")
    rtx = replace(old.target, name="rtx-1.7", flavour="tensorrt_rtx")
    for changes, text in (
        ({"build": replace(old.build, flags=PlanFlags())}, "build .* --refit`, then refit"),
        ({"build": None}, "has no engine.plan yet"),
        ({"target": rtx}, "plans of rtx-1.7 are not refitted. Convert again"),
        ({"rewrite": replace(old.rewrite, passes=(mine,))}, "your own pass my_pass"),
        ({"model": replace(old.model, source="spec:net")}, "was made from a spec object"),
        ({"model": replace(old.model, source="net.py:net")}, "would run net.py:net.*--trust"),
        ({"reference": "reference"}, "Convert again with --reference"),
    ):
        refinish(place, **changes)
        with pytest.raises(InputError, match=text) as error:
            refit(place, new)
        assert "\n" not in str(error.value)
        refinish(place, **{name: getattr(old, name) for name in changes})
    monkeypatch.undo()
    with pytest.raises(TargetMissing, match="a refit needs the engine to run here, but"):
        refit(place, new)


def test_unknown_options(place: Path) -> None:
    with pytest.raises(InputError, match="wieghts"):
        refit(place, "new.onnx", wieghts=1)


@pytest.mark.usefixtures("zoo")
def test_a_torch_model(pack: Pack, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    place = pack(Config("tiny", out=tmp_path / "tiny"))
    state = {"conv.weight": torch.ones(4, 3, 3, 3), "conv.bias": torch.arange(4.0)}
    save_file(state, tmp_path / "new.safetensors")
    report = refit(place, tmp_path / "new.safetensors")
    assert report.ok
    assert report.manifest.model.weights.file == "new.safetensors"
    tensors = {t.name: numpy_helper.to_array(t) for t in _weights(place / "model.onnx")}
    assert any(np.array_equal(t, np.arange(4.0)) for t in tensors.values())
    stored: Any = report.manifest.comparison
    assert {r.pair[0] for p in stored.points for r in p.results} >= {"torch"}

    save_file({"conv.weight": torch.ones(4, 3, 3, 3)}, tmp_path / "half.safetensors")
    with pytest.raises(InputError, match=r"1 missing keys: conv\.bias"):
        refit(place, tmp_path / "half.safetensors")
    save_file({**state, "conv.weight": torch.ones(5, 3, 3, 3)}, tmp_path / "wide.safetensors")
    with pytest.raises(InputError, match="1 keys with another shape"):
        refit(place, tmp_path / "wide.safetensors")
    assert Artifact.open(place).manifest == report.manifest


def _weights(model: Path) -> Any:
    return onnx.load(model).graph.initializer


def test_the_command(place: Path, tmp_path: Path, cli: Any) -> None:
    new = save(tmp_path / "second" / "net.onnx", 1)
    code, out, err = cli("refit", place, "--weights", new)
    assert code == 0, err
    assert "its weights were replaced in the plan" in out
    code, _, err = cli("refit", place, "--weights", tmp_path / "none.onnx")
    assert code == 2 and err.count("\n") == 1
    assert pipeline.refit is refit
