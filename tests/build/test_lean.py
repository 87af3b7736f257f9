"""The lean runtime, found in a wheel and given the name that TensorRT's builder opens."""

from __future__ import annotations

import _ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.build.lean import lean_library, need_lean
from pipeline.errors import InputError
from pipeline.machine.target import TARGETS

T86 = TARGETS["tensorrt-8.6"]
NAME = "libnvinfer_lean.so"


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed tensorrt_lean. Its library is another small one that can be opened."""
    package = tmp_path / "site" / "tensorrt_lean"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    shutil.copy(_ctypes.__file__, package / f"{NAME}.8")
    monkeypatch.syspath_prepend(str(package.parent))
    return package


@pytest.mark.skipif(sys.platform != "linux", reason="the names on Linux")
def test_a_child_opens_the_wheels_library_by_its_long_name(wheel: Path, tmp_path: Path) -> None:
    """8.6.0 says `Unable to load library: libnvinfer_lean.so.8.6.0`. The wheel has `.so.8`."""
    (tmp_path / "links").mkdir()
    env = lean_library(T86, "8.6.0", tmp_path / "links")
    code = (
        "from pipeline.build.lean import need_lean\n"
        "from pipeline.machine.target import TARGETS\n"
        "need_lean(TARGETS['tensorrt-8.6'], '8.6.0')"
    )
    child = [sys.executable, "-c", code]
    assert subprocess.run(child, env={**os.environ, **env}, check=False).returncode == 0
    plain = {**os.environ, "LD_LIBRARY_PATH": str(wheel)}  # the folder alone is not enough
    assert subprocess.run(child, env=plain, check=False, capture_output=True).returncode == 1


def test_what_was_on_the_path_stays(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", "/before")
    found = lean_library(T86, "8.6.1.post1", tmp_path)["LD_LIBRARY_PATH"]
    assert found == os.pathsep.join((str(tmp_path), "/before"))
    for name in (f"{NAME}.8", f"{NAME}.8.6.1"):
        assert (tmp_path / name).resolve() == wheel / f"{NAME}.8"


@pytest.mark.skipif(sys.platform != "linux", reason="the names on Linux")
def test_no_wheel(tmp_path: Path) -> None:
    assert lean_library(T86, "8.6.0", tmp_path) == {}
    with pytest.raises(InputError, match=r"needs libnvinfer_lean\.so\.8\.6\.0, .*lean==8\.6\.0'"):
        need_lean(T86, "8.6.0")
