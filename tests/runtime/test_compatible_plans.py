"""Which GPU and which TensorRT load a compatible plan. Real ones: tests/gpu/test_refit_gpu.py."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers import refinish

import pipeline
from pipeline.artifact.artifact import Artifact
from pipeline.artifact.engines import engine_folder
from pipeline.artifact.manifest import Manifest
from pipeline.errors import InputError, TargetMissing
from pipeline.machine.gpu import Gpu
from pipeline.machine.target import TARGETS
from pipeline.runtime import choose as choosing
from pipeline.runtime import engine, trust
from pipeline.spec.plan_flags import NO_FLAGS, PlanFlags

H100, A100, T4 = Gpu("H100", (9, 0)), Gpu("A100", (8, 0)), Gpu("T4", (7, 5))


def as_built(manifest: Manifest, flags: PlanFlags, version: str = "10.3.0") -> Manifest:
    """A manifest of TensorRT 10, built on an H100."""
    assert manifest.build is not None
    target = replace(
        manifest.target, name="tensorrt-10", flavour="tensorrt", version=version,
        compute_capabilities=("9.0",),
    )  # fmt: skip
    return replace(manifest, target=target, build=replace(manifest.build, flags=flags))


@pytest.mark.parametrize(
    ("built", "here", "plain", "compatible"),
    [
        ("10.3.0", "10.3.0", True, True),
        ("10.3.0", "10.12.0.36", False, True),
        ("10.3.0", "10.3.0.1", False, True),
        ("10.3.0", "10.2.9", False, False),
        ("10.3.0", "11.0.0", False, False),
        ("10.3.0", None, False, False),
    ],
)
def test_versions(
    artifact: Path, built: str, here: str | None, plain: bool, compatible: bool
) -> None:
    manifest = Artifact.open(artifact).manifest
    assert as_built(manifest, NO_FLAGS, built).loads_in(here) is plain
    assert (
        as_built(manifest, PlanFlags(version_compatible=True), built).loads_in(here) is compatible
    )


def test_the_installed_version(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trust, "installed_version", lambda _: "10.9.0")
    manifest = Artifact.open(artifact).manifest
    with pytest.raises(TargetMissing, match=r"was built with tensorrt 10\.3\.0, but 10\.9\.0"):
        trust.check_tensorrt(as_built(manifest, NO_FLAGS), "a")
    found = trust.check_tensorrt(as_built(manifest, PlanFlags(version_compatible=True)), "a")
    assert found.name == "tensorrt-10"


def test_gpus(artifact: Path) -> None:
    manifest = Artifact.open(artifact).manifest
    plain, compatible = (
        as_built(manifest, flags) for flags in (NO_FLAGS, PlanFlags(hardware_compatible=True))
    )
    trust.check_gpu(plain, "a", H100)
    with pytest.raises(InputError, match=r"built for compute capability 9\.0, but the A100"):
        trust.check_gpu(plain, "a", A100)
    trust.check_gpu(compatible, "a", H100)
    trust.check_gpu(compatible, "a", A100)
    with pytest.raises(InputError, match=r"needs compute capability 8\.0 or later, T4 has 7\.5"):
        trust.check_gpu(compatible, "a", T4)


def test_load_takes_a_compatible_engine(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choosing, "installed_version", lambda _: "10.3.0")
    manifest = Artifact.open(artifact).manifest

    def fits(flags: PlanFlags, gpu: Gpu) -> str:
        return choosing._why_not(as_built(manifest, flags), gpu, None, host_code=True)

    assert fits(PlanFlags(hardware_compatible=True), A100) == ""
    assert "A100 has 8.0" in fits(NO_FLAGS, A100)
    assert "T4 has 7.5" in fits(PlanFlags(hardware_compatible=True), T4)
    monkeypatch.setattr(choosing, "installed_version", lambda _: "10.4.0")
    assert fits(PlanFlags(version_compatible=True), H100) == ""
    assert "but 10.4.0 is installed" in fits(NO_FLAGS, H100)


HARDWARE, VERSION = PlanFlags(hardware_compatible=True), PlanFlags(version_compatible=True)


def two_engines(place: Path, own: tuple[PlanFlags, str], other: tuple[PlanFlags, str]) -> Path:
    """Makes an artifact with its own engine and another one, and returns the other one's folder.

    Each has its flags, and the compute capability of the GPU that built it.
    """
    second = place / "engines" / "other"
    shutil.copytree(place, second)
    for folder, (flags, capability) in ((place, own), (second, other)):
        manifest = as_built(Artifact.open(folder).manifest, flags)
        target = replace(manifest.target, compute_capabilities=(capability,))
        refinish(folder, target=target, build=manifest.build)
    return second


def test_the_engine_for_this_gpu_comes_before_a_compatible_one(
    artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choosing, "installed_version", lambda _: "10.3.0")
    second = two_engines(artifact, (HARDWARE, "8.0"), (NO_FLAGS, "9.0"))
    assert choosing.choose(artifact, H100) == second
    assert choosing.choose(artifact, A100) == artifact
    assert choosing.choose(artifact, Gpu("L4", (8, 9))) == artifact


def test_an_engine_with_code_for_the_cpu_is_taken_with_consent_only(
    artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (choosing, trust):
        monkeypatch.setattr(module, "installed_version", lambda _: "10.3.0")
    monkeypatch.setattr(engine, "find_gpu", lambda _=0: H100)
    opened: list[Path] = []
    monkeypatch.setattr(engine, "load_own", lambda path, *_: opened.append(path))
    second = two_engines(artifact, (VERSION, "9.0"), (NO_FLAGS, "9.0"))
    pipeline.load(artifact)
    pipeline.load(artifact, host_code=True)
    assert opened == [second, artifact]
    shutil.rmtree(second)
    assert choosing.choose(artifact, H100) == artifact  # load then says what to pass
    monkeypatch.undo()
    monkeypatch.setattr(trust, "installed_version", lambda _: "10.3.0")
    with pytest.raises(InputError, match="host_code=True"):
        pipeline.load(artifact)


def test_only_engines_with_code_for_the_cpu(
    artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choosing, "installed_version", lambda _: "10.3.0")
    two_engines(artifact, (VERSION, "9.0"), (NO_FLAGS, "8.0"))
    text = "its own engine: it is version-compatible, so it needs host_code=True; engines/other: "
    with pytest.raises(InputError, match=text) as error:
        choosing.choose(artifact, H100)
    assert "\n" not in str(error.value)
    assert choosing.choose(artifact, H100, host_code=True) == artifact


def test_code_for_the_cpu_needs_consent(artifact: Path) -> None:
    manifest = Artifact.open(artifact).manifest
    trust.check_host_code(manifest, False, "a")
    lean = as_built(manifest, PlanFlags(version_compatible=True))
    trust.check_host_code(lean, True, "a")
    with pytest.raises(InputError, match="host_code=True") as error:
        trust.check_host_code(lean, False, "a")
    assert "\n" not in str(error.value)


def test_folders_of_compatible_engines() -> None:
    flags = PlanFlags(hardware_compatible=True)
    name = engine_folder(TARGETS["tensorrt-8.6"], ((9, 0),), "fp16", flags=flags)
    assert name == "tensorrt-8.6-sm90-fp16-hardware-compatible"


def test_the_flags_in_the_manifest_and_the_report(artifact: Path, cli: Any) -> None:
    built = Artifact.open(artifact).manifest.build
    assert built is not None and built.flags == NO_FLAGS
    flags = PlanFlags(hardware_compatible=True, refit=True)
    refinish(artifact, build=replace(built, flags=flags, refitted_from="0" * 64))
    assert Artifact.open(artifact).manifest.flags == flags
    code, out, _ = cli("inspect", artifact)
    assert code == 0
    assert "built hardware-compatible, refit\n" in out
    assert "its weights were replaced in the plan 0000000000000000...\n" in out


@pytest.mark.parametrize("flag", ["version-compatible", "hardware-compatible", "refit"])
def test_the_command_line_refuses_for_rtx(artifact: Path, cli: Any, flag: str) -> None:
    before = (artifact / "manifest.json").read_bytes()
    for words in (("build", artifact), ("convert", "tiny", "--out", "new")):
        code, _, err = cli(*words, f"--{flag}")
        assert code == 2 and err.count("\n") == 1 and f"--{flag}" in err, err
    assert (artifact / "manifest.json").read_bytes() == before
    assert cli("build", artifact, f"--no-{flag}")[0] == 0
