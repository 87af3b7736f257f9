"""Targets: known by name, found where installed, and Polygraphy tied to the right flavour."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.errors import InputError, TargetMissing
from pipeline.machine import target as target_module
from pipeline.machine.target import (
    DEFAULT_TARGET,
    TARGETS,
    find_target,
    installed_version,
    require,
    use,
)

ROOT = Path(__file__).resolve().parents[2]
RTX = TARGETS["rtx-1.7"]


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(InputError) as caught:
        find_target("rtx-9")
    for name in TARGETS:
        assert name in str(caught.value)
    assert find_target(DEFAULT_TARGET) is RTX


def test_facts() -> None:
    assert TARGETS["tensorrt-8.6"].max_opset == 17
    assert {t.name for t in TARGETS.values() if t.strongly_typed} == {"rtx-1.7", "tensorrt-11"}
    for name, target in TARGETS.items():
        assert name == target.name == str(target)
        assert name.endswith(".".join(map(str, target.version)))
        assert target.get.startswith("pip install ")


def test_installed() -> None:
    version = require(RTX)
    assert version == installed_version(RTX)
    assert version.startswith("1.7.")
    assert use(RTX).__name__ == "tensorrt_rtx"


@pytest.mark.parametrize("version", [(1, 8), (2,), (1, 7, 0), (1, 70)])
def test_another_version_is_not_taken(version: tuple[int, ...]) -> None:
    other = dataclasses.replace(RTX, version=version, name="other")
    with pytest.raises(TargetMissing, match=r"tensorrt_rtx 1\.7\.\S+ is installed here, not "):
        require(other)


def test_unpacked_archive_without_metadata(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if installed_version(TARGETS["tensorrt-10"]):
        pytest.skip("a TensorRT is installed here")
    (tmp_path / "tensorrt.py").write_text("__version__ = '10.3.0'\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert require(TARGETS["tensorrt-10"]) == "10.3.0"
    with pytest.raises(TargetMissing, match=r"tensorrt 10\.3\.0 is installed here, not 11"):
        require(TARGETS["tensorrt-11"])
    sys.modules.pop("tensorrt")


def test_installed_but_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> object:
        if name == "tensorrt_rtx":
            raise OSError("libtensorrt_rtx.so.1: cannot open shared object file")
        return real(name)

    real = target_module.importlib.import_module
    monkeypatch.setattr(target_module.importlib, "import_module", broken)
    with pytest.raises(TargetMissing, match="is installed but can't be imported: libtensorrt_rtx"):
        use(RTX)


def child(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(("name", "rtx"), [("rtx-1.7", True), ("tensorrt-10", False)])
def test_polygraphy_is_bound_to_the_flavour(name: str, rtx: bool) -> None:
    code = (
        "from pipeline.machine.target import TARGETS, bind_polygraphy\n"
        f"bind_polygraphy(TARGETS[{name!r}])\n"
        "import polygraphy.config\nprint(polygraphy.config.USE_TENSORRT_RTX)"
    )
    assert child(code) == str(rtx)


def test_polygraphy_of_the_other_flavour_is_refused() -> None:
    code = (
        "import os; os.environ['POLYGRAPHY_USE_TENSORRT_RTX'] = '0'\n"
        "import polygraphy.config\nfrom pipeline.errors import InputError\n"
        "from pipeline.machine.target import TARGETS, use\n"
        "try:\n    use(TARGETS['rtx-1.7'])\nexcept InputError as error:\n    print(error)"
    )
    assert "Polygraphy was imported for the other flavour of TensorRT" in child(code)


def test_nothing_heavy_is_imported_to_know_the_targets() -> None:
    code = (
        "import sys, pipeline.machine.target as t\n"
        "t.require(t.TARGETS['rtx-1.7'])\n"
        "print([m for m in ('torch', 'polygraphy', 'tensorrt_rtx') if m in sys.modules])"
    )
    assert child(code) == "[]"
