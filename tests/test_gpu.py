"""The engine comparison on a GPU, and how it is known that there is none."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import tiny
from helpers import refinish

from pipeline import gpu
from pipeline.artifact import Artifact
from pipeline.config import Config
from pipeline.driver import run, run_verify
from pipeline.gpu import Gpu, find_gpu, why_not
from pipeline.profiles import Profile
from pipeline.target import TARGETS, Target, installed_version


def runnable() -> tuple[Target | None, str]:
    """The installed target whose engines a GPU here can run, or why there is none."""
    reasons = []
    for target in TARGETS.values():
        version = installed_version(target)
        if version is None or not version.startswith(".".join(map(str, target.version))):
            continue
        why = why_not(target)
        if not why:
            return target, ""
        reasons.append(f"{target}: {why}")
    return None, "; ".join(reasons) or "no TensorRT is installed here"


TARGET, WHY = runnable()


@pytest.mark.gpu
@pytest.mark.skipif(TARGET is None, reason=WHY)
def test_engine_is_compared_in_every_profile(tmp_path: Path) -> None:
    assert TARGET is not None
    profiles = (Profile("small", {"h": (5, 8, 12), "w": (5, 8, 12)}), Profile("large"))
    place = tmp_path / "a"
    report = run(
        Config(tiny.conv(profiles=profiles), out=place, target=TARGET.name, shapes=("h=11,w=33",))
    )
    manifest = report.manifest
    assert report.ok
    assert manifest.engine_compared
    assert manifest.comparison is not None
    for point in manifest.comparison.points:
        pairs = {result.pair for result in point.results}
        assert ("torch", "engine") in pairs
        assert all(result.passed for result in point.results)
    for name in ("small", "large"):
        assert (place / "comparison" / name / "engine.json").is_file()
    # what another machine left uncompared is finished by verify
    refinish(place, engine_compared=False, engine_compared_why="no NVIDIA driver")
    assert run_verify(place).manifest.engine_compared


@pytest.mark.gpu
@pytest.mark.skipif(TARGET is None, reason=WHY)
def test_engine_of_other_weights_fails(tmp_path: Path) -> None:
    import torch

    assert TARGET is not None
    state = tiny.conv().build(None).state_dict()
    torch.save({key: value * 1.05 for key, value in state.items()}, tmp_path / "w.pth")
    run(Config(tiny.conv(), out=tmp_path / "a", target=TARGET.name))
    run(Config(tiny.conv(), out=tmp_path / "b", target=TARGET.name, weights=tmp_path / "w.pth"))
    shutil.copy(tmp_path / "b" / "engine.plan", tmp_path / "a" / "engine.plan")
    refinish(tmp_path / "a")
    report = run_verify(tmp_path / "a")
    assert not report.ok
    assert report.manifest.comparison is not None
    bad = {r.pair for p in report.manifest.comparison.points for r in p.results if not r.passed}
    assert bad == {("rewritten", "engine"), ("torch", "engine")}


@pytest.mark.parametrize(
    ("capability", "runs"),
    [((7, 0), False), ((7, 5), True), ((8, 6), True), ((9, 0), False), ((12, 0), True)],
)
def test_gpus_that_rtx_runs_on(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], runs: bool
) -> None:
    monkeypatch.setattr(gpu, "find_gpu", lambda: Gpu("some GPU", capability))
    why = why_not(TARGETS["rtx-1.7"])
    assert (why == "") is runs
    if not runs:
        major, minor = capability
        assert why == (
            f"TensorRT-RTX does not run on some GPU (compute capability {major}.{minor})"
        )
    assert why_not(TARGETS["tensorrt-8.6"]) == ""


def test_no_driver_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_library(_: str) -> None:
        raise OSError("cannot open shared object file")

    monkeypatch.setattr(gpu.ctypes, "CDLL", no_library)
    assert find_gpu() == "no NVIDIA driver is installed here"
    for target in TARGETS.values():
        assert why_not(target) == "no NVIDIA driver is installed here"


def test_other_version_than_the_one_that_built(
    artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pipeline import verify

    monkeypatch.setattr(verify, "why_not", lambda _: "")
    monkeypatch.setattr(verify, "installed_version", lambda _: "1.7.9")
    built = Artifact.open(artifact).manifest.target.version
    manifest = run_verify(artifact).manifest
    assert not manifest.engine_compared
    assert manifest.engine_compared_why == f"built with tensorrt_rtx {built}, here is 1.7.9"
