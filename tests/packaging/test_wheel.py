"""The sdist and the wheel: their contents, and that the contents work outside of the repository.

The builds need no package index. They use the setuptools of the test environment, which torch
depends on.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Mapping
from email.parser import BytesParser
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINKS = ("models", "passes", "plugins")  # folders at the top level that pipeline/ links to
GENERATED = {"PKG-INFO", "setup.cfg"}  # files that setuptools adds to every sdist
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
OFFLINE = ["--no-index", "--no-deps"]


def run(
    *words: str | Path, folder: Path, variables: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs a command without the PYTHONPATH of the tests, which would hide the wheel."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        words, cwd=folder, env={**inherited, **(variables or {})}, capture_output=True, text=True
    )


def build_wheel(source: Path, into: Path) -> subprocess.CompletedProcess[str]:
    """Runs `pip wheel` on a folder or an sdist."""
    options = [*OFFLINE, "--no-build-isolation", "--wheel-dir"]
    return run(*PIP, "wheel", *options, into, source, folder=source.parent)


def built_wheel(source: Path, into: Path) -> Path:
    """The wheel that `pip wheel` makes of a folder or an sdist."""
    done = build_wheel(source, into)
    assert done.returncode == 0, done.stderr
    (path,) = into.glob("*.whl")
    return path


def repository_files() -> set[str]:
    """The files of this clone, or of this unpacked sdist, relative to its root."""
    if (ROOT / ".git").exists() and shutil.which("git"):
        listed = run("git", "ls-files", "-z", folder=ROOT).stdout.split("\0")
    else:
        sources = next(ROOT.glob("*.egg-info/SOURCES.txt"), None)
        if sources is None:
            pytest.skip("the folder is neither a git clone nor an unpacked sdist")
        listed = [name for name in sources.read_text().splitlines() if ".egg-info/" not in name]
    names = {name for name in listed if name and os.path.lexists(ROOT / name)}
    assert names, "git lists no files of this clone"
    return names


def in_package(names: set[str]) -> set[str]:
    """The same files with the linked folders inside of pipeline/, and without the links."""
    return {
        f"pipeline/{name}" if name.partition("/")[0] in LINKS else name
        for name in names
        if name not in {f"pipeline/{link}" for link in LINKS}
    }


@pytest.fixture(scope="module", autouse=True)
def setuptools() -> None:
    """Skips if torch is not installed and setuptools is missing or old."""
    found = [d.version for d in metadata.distributions(name="setuptools")]
    if not found or int(found[0].partition(".")[0]) < 77:
        pytest.skip("the build needs setuptools 77 or newer in the test environment")


@pytest.fixture(scope="module")
def names() -> set[str]:
    """The files of the repository."""
    return repository_files()


@pytest.fixture(scope="module")
def tree(names: set[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository: a build writes into the folder that it builds from."""
    folder = tmp_path_factory.mktemp("copy") / "repository"
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    return folder


@pytest.fixture(scope="module")
def sdist(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    into = tmp_path_factory.mktemp("sdist")
    code = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    done = run(sys.executable, "-c", code, into, folder=tree)
    assert done.returncode == 0, done.stderr
    (path,) = into.glob("*.tar.gz")
    return path


@pytest.fixture(scope="module")
def unpacked(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    into = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        assert all(member.isdir() or member.isfile() for member in archive), "a link"
        archive.extractall(into)
    (folder,) = into.iterdir()
    return folder


@pytest.fixture(scope="module")
def wheel(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built_wheel(tree, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh virtual environment with the wheel.

    A .pth file adds the packages of this environment. Python ignores the .pth files of such a
    folder, so an editable install of the repository has no effect.
    """
    folder = tmp_path_factory.mktemp("fresh") / "venv"
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    done = run(*PIP, "--python", python, "install", *OFFLINE, wheel, folder=folder)
    assert done.returncode == 0, done.stderr
    (packages,) = folder.glob("lib/python*/site-packages")
    paths = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (packages / "lent.pth").write_text("\n".join(paths))
    return folder


def contents(wheel: Path) -> dict[str, bytes]:
    """The files of a wheel without its metadata, by name."""
    with zipfile.ZipFile(wheel) as archive:
        return {
            name: archive.read(name) for name in archive.namelist() if ".dist-info/" not in name
        }


def test_the_sdist_holds_every_file_of_the_repository(names: set[str], unpacked: Path) -> None:
    held = {path.relative_to(unpacked).as_posix() for path in unpacked.rglob("*") if path.is_file()}
    held = {name for name in held if ".egg-info/" not in name}
    assert held == in_package(names) | GENERATED


def test_the_wheel_holds_exactly_the_package(names: set[str], wheel: Path) -> None:
    package = {name for name in in_package(names) if name.startswith("pipeline/")}
    for folder in ("", *(f"{link}/" for link in LINKS)):
        assert f"pipeline/{folder}__init__.py" in package
    assert "pipeline/py.typed" in package
    assert any(name.endswith("/kernel.cu") for name in package)
    assert contents(wheel).keys() == package


def test_the_sdist_builds_the_same_wheel(sdist: Path, wheel: Path, tmp_path: Path) -> None:
    assert contents(built_wheel(sdist, tmp_path)) == contents(wheel)


def test_windows_can_unpack_the_wheel(wheel: Path) -> None:
    """By the names in the archive: https://learn.microsoft.com/windows/win32/fileio/naming-a-file"""
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        members = archive.infolist()
    assert not [m.filename for m in members if stat.S_ISLNK(m.external_attr >> 16)]
    refused = re.compile(
        r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?|.*[<>:\"\\|?*\x00-\x1f].*|.*[. ]", re.IGNORECASE
    )
    parts = {part for m in members for part in m.filename.rstrip("/").split("/")}
    assert [part for part in parts if refused.fullmatch(part)] == []
    names = [m.filename.lower() for m in members]
    assert len(set(names)) == len(names)
    longest = max(map(len, names))
    assert longest < 140  # 260 are allowed for the whole path


def test_the_long_description_has_no_link_into_the_repository(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        message = BytesParser().parsebytes(archive.read(name))
    assert message["Description-Content-Type"] == "text/markdown"
    assert message["Summary"] and message["Keywords"] and message.get_all("Classifier")
    text = message.get_payload(decode=True).decode()  # type: ignore[union-attr]
    assert text.strip().startswith("# ")
    targets = re.findall(r"\]\(([^)]*)\)|^\[[^\]]+\]: *(\S+)", text, re.MULTILINE)
    targets += re.findall(r"(?:href|src)=[\"']([^\"']*)()", text)
    assert [a or b for a, b in targets if not (a or b).startswith("https://")] == []


@pytest.mark.slow
def test_the_tests_of_the_sdist_find_their_helpers(unpacked: Path) -> None:
    words = ["-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    variables = {"PYTHONPATH": str(unpacked), "PYTEST_ADDOPTS": "", "PYTHONDONTWRITEBYTECODE": "1"}
    done = run(sys.executable, *words, folder=unpacked, variables=variables)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    files = {line.partition("::")[0] for line in done.stdout.splitlines() if "::" in line}
    assert Path(__file__).relative_to(ROOT).as_posix() in files


@pytest.mark.slow
def test_the_installed_wheel_converts_a_model(environment: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("tensorrt_rtx")
    code = "import pipeline; print(pipeline.__file__)"
    imported = run(environment / "bin" / "python", "-c", code, folder=tmp_path)
    assert Path(imported.stdout.strip()).is_relative_to(environment), imported.stderr
    done = run(environment / "bin" / "pipeline", "convert", "linear", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    artifact = tmp_path / "artifacts" / "linear"
    assert (artifact / "engine.plan").stat().st_size
    assert (artifact / "model.onnx").stat().st_size
    manifest = json.loads((artifact / "manifest.json").read_text())
    assert manifest["comparison"]["passed"] is True


def test_a_clone_without_symbolic_links_does_not_build(tmp_path: Path) -> None:
    """Git for Windows clones so by default. The advice in the message mends the clone."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("needs git, and a clone of the repository")
    clone, wheels = tmp_path / "clone", tmp_path / "wheels"
    cloned = run(
        "git", "clone", "--quiet", "-c", "core.symlinks=false", ROOT, clone, folder=tmp_path
    )
    assert cloned.returncode == 0, cloned.stderr
    assert all((clone / "pipeline" / link).is_file() for link in LINKS)
    done = build_wheel(clone, wheels)
    assert done.returncode != 0
    assert not list(tmp_path.rglob("*.whl"))
    output = done.stdout + done.stderr
    assert "Traceback" not in output
    assert "[1 lines of output]" in output
    (line,) = (line for line in output.splitlines() if "not a directory" in line)
    assert all(f"pipeline/{link}" in line for link in LINKS)
    advice = re.findall(r"`(git [^`]+)`", line)
    assert len(advice) == 2
    for command in advice:
        mended = run(*command.split(), folder=clone)
        assert mended.returncode == 0, mended.stderr
    built_wheel(clone, wheels)
