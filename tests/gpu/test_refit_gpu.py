"""Refit and compatible plans on a GPU. All nets are ONNX files, so no torch is needed."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from helpers import refinish
from on_gpu import TARGET, needs_gpu
from onnx import numpy_helper

import pipeline
from pipeline.artifact.artifact import Artifact
from pipeline.build.lean import lean_library, need_lean
from pipeline.build.network import open_network
from pipeline.build.refit import network_weights
from pipeline.commands.main import main
from pipeline.compare.runners import failures
from pipeline.convert.driver import run, run_build, verify
from pipeline.convert.refit import refit
from pipeline.convert.report import Report
from pipeline.errors import ArtifactError, InputError
from pipeline.graph.session import run_onnx
from pipeline.machine.gpu import Gpu, find_gpu
from pipeline.machine.target import installed_version, use
from pipeline.runtime.bindings import Log
from pipeline.spec.config import Config
from pipeline.spec.effort import Effort
from pipeline.spec.plan_flags import PlanFlags

pytestmark = [
    pytest.mark.gpu,
    needs_gpu,
    pytest.mark.skipif(
        TARGET is not None and TARGET.flavour == "tensorrt_rtx",
        reason="TensorRT-RTX has none of these flags",
    ),
]

REFIT = PlanFlags(refit=True)
QUICK = Effort(level=0)
_NET = """<ir_version: 8, opset_import: ["" : 17]>
net (float[b,3,h,w] x) => (float[b,5] y)
{
    a = Conv<pads = [1, 1, 1, 1]>(x, first, bias)
    n = BatchNormalization<epsilon = 0.001>(a, scale, shift, mean, var)
    r = Relu(n)
    d = Conv(r, back)
    p = GlobalAveragePool(d)
    f = Flatten(p)
    m = MatMul(f, middle)
    y = Gemm<transB = 1>(m, last, out)
}"""
_SHAPES = {
    "first": (4, 3, 3, 3), "bias": (4,), "scale": (4,), "shift": (4,), "mean": (4,), "var": (4,),
    "back": (6, 4, 2, 2), "middle": (6, 7), "last": (5, 7), "out": (5,),
}  # fmt: skip


def save(path: Path, seed: int, **shapes: tuple[int, ...]) -> Path:
    """Saves the net with random weights."""
    model = onnx.parser.parse_model(_NET)
    rng = np.random.default_rng(seed)
    for number, node in enumerate(model.graph.node):
        node.name = f"{node.op_type}{number}"
    for name, shape in {**_SHAPES, **shapes}.items():
        values = rng.uniform(0.2, 1.0, shape).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(values, name))
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model, path)
    return path


def convert(folder: Path, flags: PlanFlags, **options: Any) -> Report:
    assert TARGET is not None
    config = Config(
        str(save(folder / "net.onnx", 0)), out=folder / "net", target=TARGET.name, quick=True,
        dims=("b=1:2:4", "h=4:8:12", "w=4:8:12"), flags=flags, effort=QUICK, **options,
    )  # fmt: skip
    return run(config)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """The net with an engine that can be refitted. Do not change it."""
    return convert(tmp_path_factory.mktemp("refit"), REFIT)


@pytest.fixture
def copy(made: Report, tmp_path: Path) -> Path:
    """A copy of `made`'s folder. You may change it."""
    return Path(shutil.copytree(made.path, tmp_path / "net"))


def inputs(b: int = 3, h: int = 5, w: int = 9) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(7).uniform(0, 1, (b, 3, h, w)).astype(np.float32)}


def output(place: Path, **how: Any) -> np.ndarray:
    with pipeline.load(place, **how) as engine:
        return np.array(engine(inputs())["y"])


def right(found: np.ndarray, source: Path, within: float = 1e-4) -> None:
    """The output is ONNX Runtime's of a file, relative to its largest value."""
    (wanted,) = run_onnx(source, [inputs()])
    far = np.abs(found - wanted["y"]).max() / np.abs(wanted["y"]).max()
    assert far < within, f"differs by {far:.2e}: {found[0]} instead of {wanted['y'][0]}"


def test_what_tensorrt_can_refit(made: Report) -> None:
    """First, because its output says why the others fail."""
    assert TARGET is not None and made.ok
    trt = use(TARGET)
    logger = Log.of(trt).logger  # TensorRT keeps the first logger of a process
    runtime = trt.Runtime(logger)
    engine = runtime.deserialize_cuda_engine((made.path / "engine.plan").read_bytes())
    refitter = trt.Refitter(engine, logger)
    opened = open_network(trt, TARGET, logger)
    assert opened.parse_file(made.path / "model.onnx") == []
    own = [(name, role.name, w.size) for name, role, w in network_weights(trt, opened.network)]
    print("refittable:", engine.refittable)
    print("by role:", [(n, r.name) for n, r in zip(*refitter.get_all(), strict=True)])
    print("in the network:", own)
    print("missing:", refitter.get_missing())
    with suppress(Exception):  # it fails if a weight has no name
        print("by name:", refitter.get_all_weights())
    assert engine.refittable
    can = {(name, role.name) for name, role in zip(*refitter.get_all(), strict=True)}
    assert can, "TensorRT lists no weights by layer and role"
    assert can <= {(name, role) for name, role, _ in own}


def test_a_refitted_engine_computes_with_the_new_weights(
    made: Report, copy: Path, tmp_path: Path
) -> None:
    new = save(tmp_path / "net.onnx", 1)
    before = Artifact.open(copy).manifest
    right(output(copy), made.path.parent / "net.onnx")
    report = refit(copy, new)
    assert report.ok, failures(report.manifest.comparison or before.comparison)  # type: ignore[arg-type]
    after = Artifact.open(copy).manifest
    assert after.engine_compared and after.build is not None and before.build is not None
    assert after.build.refitted_from == before.files["engine.plan"].sha256
    assert after.build.flags == REFIT
    assert after.files["engine.plan"] != before.files["engine.plan"]
    assert after.target == before.target
    assert after.interface.profiles == before.interface.profiles
    assert after.model.weights.sha256 != before.model.weights.sha256
    right(output(copy), new)
    with pytest.raises(AssertionError, match="differs by"):
        right(output(copy), made.path.parent / "net.onnx")
    # it can be refitted again
    third = save(tmp_path / "third" / "net.onnx", 2)
    assert refit(copy, third).ok
    right(output(copy), third)
    assert verify(copy).ok


def test_a_refit_into_another_folder(
    made: Report, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new, out = save(tmp_path / "net.onnx", 3), tmp_path / "other"
    before = (made.path / "manifest.json").read_bytes()
    assert main(["refit", str(made.path), "--weights", str(new), "--out", str(out)]) == 0
    assert "its weights were replaced in the plan" in capsys.readouterr().out
    right(output(out), new)
    right(output(made.path), made.path.parent / "net.onnx")
    assert (made.path / "manifest.json").read_bytes() == before


def test_a_refit_in_half_precision(tmp_path: Path) -> None:
    place = convert(tmp_path, REFIT, precision="fp16").path
    new = save(tmp_path / "new" / "net.onnx", 1)
    report = refit(place, new)
    assert report.ok and report.manifest.precision == "fp16"
    right(output(place), new, within=1e-2)


def test_weights_that_do_not_fit(copy: Path, tmp_path: Path) -> None:
    before = (copy / "manifest.json").read_bytes()
    wide = save(tmp_path / "wide.onnx", 1, middle=(6, 8), last=(5, 8))
    with pytest.raises(InputError, match=r"another model\.onnx: .* instead of .*Convert again"):
        refit(copy, wide)
    assert (copy / "manifest.json").read_bytes() == before
    run_build(copy, flags=PlanFlags())
    with pytest.raises(InputError, match="built without --refit"):
        refit(copy, save(tmp_path / "new.onnx", 1))


def test_an_engine_with_other_weights_is_found(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If TensorRT replaced no weights, the comparison fails, and the artifact stays."""
    from pipeline.build import refit as refitting

    def nothing(plan: Path, *_: object) -> refitting.Refitted:
        return refitting.Refitted(plan.stat().st_size, {})

    monkeypatch.setattr(refitting, "refit", nothing)
    before = (copy / "manifest.json").read_bytes()
    with pytest.raises(pipeline.CompareError):
        refit(copy, save(tmp_path / "net.onnx", 1))
    assert (copy / "manifest.json").read_bytes() == before


def test_a_hardware_compatible_engine(tmp_path: Path) -> None:
    report = convert(tmp_path, PlanFlags(hardware_compatible=True))
    place, manifest = report.path, report.manifest
    assert report.ok and manifest.engine_compared and manifest.flags.hardware_compatible
    right(output(place), tmp_path / "net.onnx")
    assert TARGET is not None
    trt = use(TARGET)
    plan = (place / "engine.plan").read_bytes()
    engine = trt.Runtime(Log.of(trt).logger).deserialize_cuda_engine(plan)
    assert engine.hardware_compatibility_level == trt.HardwareCompatibilityLevel.AMPERE_PLUS
    # built elsewhere: this GPU loads it, if it is of 8.0 or later
    gpu = find_gpu()
    assert isinstance(gpu, Gpu)
    other = "8.6" if gpu.capability != (8, 6) else "8.9"
    refinish(place, target=replace(manifest.target, compute_capabilities=(other,)))
    right(output(place), tmp_path / "net.onnx")
    assert verify(place).manifest.engine_compared


def _lean() -> bool:
    version = TARGET and installed_version(TARGET)
    if TARGET is None or version is None:
        return False
    with tempfile.TemporaryDirectory() as folder:
        if lean_library(TARGET, version, Path(folder)):
            return True
    try:
        need_lean(TARGET, version)
    except InputError:
        return False
    return True


@pytest.mark.skipif(_lean(), reason="the lean runtime is installed")
def test_no_lean_runtime(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"pip install 'tensorrt-lean=="):
        convert(tmp_path, PlanFlags(version_compatible=True))


@pytest.fixture
def newer() -> Callable[[Path], None]:
    """Changes a manifest, as if an older version of the same major version built the plan."""

    def change(place: Path) -> None:
        target = Artifact.open(place).manifest.target
        assert target.version is not None
        older = replace(target, version=f"{target.version.split('.')[0]}.0.0")
        refinish(place, target=older)

    return change


def test_a_compatible_engine_needs_its_flag(tmp_path: Path, made: Report) -> None:
    place = Path(shutil.copytree(made.path, tmp_path / "net"))
    target = made.manifest.target
    refinish(place, target=replace(target, version="8.0.0"))
    with pytest.raises(pipeline.TargetMissing, match=r"was built with tensorrt 8\.0\.0"):
        pipeline.load(place)
    refinish(place, target=replace(target, compute_capabilities=("3.5",)))
    with pytest.raises((InputError, ArtifactError), match=r"compute capability 3\.5"):
        pipeline.load(place)


@pytest.mark.skipif(not _lean(), reason="the lean runtime is not installed (tensorrt-lean)")
def test_a_version_compatible_engine(tmp_path: Path, newer: Callable[[Path], None]) -> None:
    report = convert(tmp_path, PlanFlags(version_compatible=True))
    place, source = report.path, tmp_path / "net.onnx"
    assert report.ok and report.manifest.engine_compared
    with pytest.raises(InputError, match="holds code that runs on the CPU"):
        output(place)
    right(output(place, host_code=True), source)
    newer(place)
    right(output(place, host_code=True), source)
    assert verify(place, host_code=True).manifest.engine_compared
