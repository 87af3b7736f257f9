"""verify on a GPU: right engines, and faults planted in real engines.

An unwritten output can't be planted in a real engine. tests/compare/test_engine_checks.py tests
this check.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import perturb, refinish
from on_gpu import TARGET, mix_rows, needs_gpu, save_net

import pipeline
from pipeline.commands.main import main
from pipeline.compare.runners import failures
from pipeline.convert.driver import run, run_build, verify
from pipeline.convert.options import Verify
from pipeline.convert.report import Report
from pipeline.errors import InputError
from pipeline.machine.gpu import Gpu, capability_text, find_gpu
from pipeline.spec.config import Config
from pipeline.spec.model import Tolerance
from pipeline.spec.verdicts import Check

pytestmark = [pytest.mark.gpu, needs_gpu]

SMALL = "b=1:1:2,h=8:12:16,w=8:12:16"
LARGE = "b=1:3:5,h=8:24:40,w=8:24:40"
ENGINES = {"engine-profile0", "engine-profile1"}
CHECKS = {"determinism", "unwritten outputs", "shuffled order", "batch rows"}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """A small net, converted for this GPU in two profiles. Do not change it."""
    assert TARGET is not None
    place = tmp_path_factory.mktemp("made")
    config = Config(
        str(save_net(place / "net.onnx")),
        out=place / "net",
        target=TARGET.name,
        dims=("b=1:3:5", "h=8:24:40", "w=8:24:40"),
        profiles=(SMALL, LARGE),
        shapes=("b=4,h=11,w=33",),
    )
    return run(config)


@pytest.fixture
def copy(made: Report, tmp_path: Path) -> Path:
    """A copy of `made`'s folder. You may change it."""
    return Path(shutil.copytree(made.path, tmp_path / "net"))


def gpu_name() -> str:
    gpu = find_gpu()
    assert isinstance(gpu, Gpu)
    return gpu.name


def checks(report: Report) -> dict[tuple[str, str], Check]:
    assert report.manifest.comparison is not None
    return {(check.run, check.name): check for check in report.manifest.comparison.checks}


def bad_runs(report: Report) -> set[str]:
    """The runs that differ from their reference."""
    assert report.manifest.comparison is not None
    points = report.manifest.comparison.points
    return {r.pair[1] for point in points for r in point.results if not r.passed}


def with_other_engine(copy: Path, change: Callable[[Path], None]) -> None:
    """Builds the engine from a changed model.onnx, and restores the right model.onnx."""
    right = (copy / "model.onnx").read_bytes()
    change(copy)
    refinish(copy)
    run_build(copy)
    (copy / "model.onnx").write_bytes(right)
    refinish(copy)


def test_a_conversion_compares_the_engine(made: Report) -> None:
    manifest = made.manifest
    assert made.ok
    assert manifest.engine_compared
    assert manifest.engine_gpu == gpu_name()
    assert manifest.engine_compared_why == f"compared on {gpu_name()}"
    if manifest.target.flavour == "tensorrt":
        gpu = find_gpu()
        assert isinstance(gpu, Gpu)
        assert manifest.target.compute_capabilities == (capability_text(gpu.capability),)
        assert manifest.build is not None and manifest.build.gpu == gpu.name
    assert manifest.comparison is not None
    for point in manifest.comparison.points:
        held = {result.pair for result in point.results}
        assert ("exported", "engine-profile1") in held, point.label
        assert {result.output for result in point.results} == {"y", "mean"}
    for folder, engines in (("profile0", ENGINES), ("profile1", {"engine-profile1"})):
        for engine in engines:
            assert (made.path / "comparison" / folder / f"{engine}.json").is_file()


def test_every_check_is_done_in_every_profile(made: Report) -> None:
    done = checks(made)
    assert {key for key in done if key[0] in ENGINES} == {
        (engine, check) for engine in ENGINES for check in CHECKS
    }
    assert done["engine-profile0", "batch rows"].sizes["b"] == 2
    assert done["engine-profile1", "batch rows"].sizes == {"b": 3, "h": 24, "w": 24}
    assert all(check.passed for check in done.values())


def test_what_another_machine_left_is_finished(
    copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refinish(copy, engine_compared=False, engine_compared_why="no NVIDIA driver", engine_gpu="")
    assert main(["verify", str(copy)]) == 0
    said = capsys.readouterr().out
    assert f"engine: compared: compared on {gpu_name()}" in said
    assert "determinism of engine-profile0: 3 runs at each of" in said
    assert "error of engine-profile1 against exported: " in said


def test_an_engine_of_other_weights(copy: Path, made: Report) -> None:
    with_other_engine(copy, lambda folder: perturb(folder, by=0.02))
    report = verify(copy, Verify(against=made.path))
    assert not report.ok
    assert bad_runs(report) == ENGINES
    # this engine also keeps everything other than the numbers
    assert all(check.passed for check in checks(report).values())
    found = [one for one in report.regressions if one.facts.get("run") == "engine-profile1"]
    assert found and all(one.kind == "error-too-large" for one in found)
    assert all("differs from exported by up to " in one.text for one in found)
    assert all("; the error before was " in one.text for one in found)


def test_where_an_engine_of_other_weights_parts(
    copy: Path, made: Report, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["locate", str(made.path), "--shape", "b=2,h=9,w=17"]) == 0
    assert capsys.readouterr().out.startswith("agrees with ONNX Runtime: the worst output differs")
    with_other_engine(copy, lambda folder: perturb(folder, by=0.02))
    assert main(["locate", str(copy), "--shape", "b=2,h=9,w=17"]) == 1
    assert "a new engine built from the same model.onnx is right" in capsys.readouterr().out


def test_an_engine_that_mixes_rows(copy: Path) -> None:
    with_other_engine(copy, lambda folder: mix_rows(folder / "model.onnx"))
    report = verify(copy)
    assert not report.ok
    for engine in ENGINES:
        check = checks(report)[engine, "batch rows"]
        assert not check.passed
        assert "a row changes with the samples in the other rows: " in check.text
    assert checks(report)["exported", "batch rows"].passed
    assert report.manifest.comparison is not None
    assert any("batch rows of engine-" in line for line in failures(report.manifest.comparison))


def test_the_same_engine_is_no_regression(copy: Path, made: Report) -> None:
    report = verify(copy, Verify(against=made.path))
    assert report.ok, report.regressions


def test_a_build_of_the_same_is_no_regression(copy: Path, made: Report) -> None:
    run_build(copy)
    report = verify(copy, Verify(against=made.path))
    assert report.ok, report.regressions


def test_fp16_has_a_tolerance_of_its_own(copy: Path, made: Report) -> None:
    run_build(copy, precision="fp16")
    report = verify(copy)
    assert report.manifest.precision == "fp16"
    assert verify(copy, Verify(against=made.path)).regressions[0].kind == "precision-changed"
    assert report.ok, failures(report.manifest.comparison or made.manifest.comparison)  # type: ignore[arg-type]
    assert report.manifest.comparison is not None
    measured = report.manifest.comparison.engine_tolerances
    own = report.manifest.tolerances()
    assert measured.keys() == own.keys()
    assert all(measured[name].atol > own[name].atol for name in own)
    report = verify(copy, Verify(engine_tolerance=Tolerance(0, 1e-12, "none")))
    assert not report.ok
    assert "half" in bad_runs(report) <= {*ENGINES, "half"}


def test_a_plan_of_another_gpu_is_not_compared(copy: Path) -> None:
    from dataclasses import replace

    from pipeline.artifact.artifact import Artifact

    target = replace(Artifact.open(copy).manifest.target, compute_capabilities=("3.5",))
    refinish(copy, target=target)
    manifest = verify(copy).manifest
    assert not manifest.engine_compared
    assert manifest.engine_compared_why.startswith("the engine needs compute capability 3.5, ")
    assert manifest.engine_gpu == ""


def test_two_engines_of_one_artifact(copy: Path) -> None:
    """An engine in tf32 and one in fp16, beside the artifact's own. `load` takes what is asked."""
    gpu = find_gpu()
    assert isinstance(gpu, Gpu) and TARGET is not None
    kind = capability_text(gpu.capability)
    for precision in ("tf32", "fp16"):
        run_build(copy, gpus=(kind,), precision=precision)
        engine = copy / "engines" / f"{TARGET.name}-sm{kind.replace('.', '')}-{precision}"
        assert verify(engine).manifest.engine_compared
    for precision in ("fp32", "tf32", "fp16"):
        with pipeline.load(copy, precision=precision) as loaded:
            assert loaded.manifest.precision == precision
    with pytest.raises(InputError, match="builds for the GPU of this machine only"):
        run_build(copy, gpus=("sm35",))
