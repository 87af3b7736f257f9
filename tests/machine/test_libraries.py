"""The installed packages are listed once, and again after one was installed."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

import pytest

from pipeline.machine.libraries import packages_by_import


def test_the_list_is_pythons_and_is_kept() -> None:
    assert packages_by_import() == metadata.packages_distributions()
    assert packages_by_import() is packages_by_import()


def test_a_package_that_is_installed_later_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    assert "late_package" not in packages_by_import()
    info = tmp_path / "late_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: late-package\nVersion: 1.0\n")
    (info / "top_level.txt").write_text("late_package\n")
    assert packages_by_import()["late_package"] == ["late-package"]
