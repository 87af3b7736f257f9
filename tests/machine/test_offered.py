"""Rewrite passes and plugins of installed packages."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.convert.keys import _plugins
from pipeline.errors import InputError
from pipeline.machine.offered import PASSES, PLUGINS, offered_file, offered_names
from pipeline.machine.target import TARGETS
from pipeline.plugins.loading import find_plugins
from pipeline.rewrite.choose import all_passes, load_pass, pass_file

PASS = '''"""Does nothing."""

from pipeline.passes import PassResult


def run(graph):
    return PassResult()
'''
Install = Callable[..., Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    def install(package: str = "their_package", **groups: str) -> Path:
        """Installs a package with entry points, as pip would, and returns its folder."""
        site = tmp_path / f"site_{package}"
        info = site / f"{package}-1.0.dist-info"
        folder = site / package
        info.mkdir(parents=True)
        folder.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        names = {"passes": PASSES, "plugins": PLUGINS}
        text = "\n".join(f"[{names[group]}]\n{line}" for group, line in groups.items())
        (info / "entry_points.txt").write_text(text)
        (folder / "__init__.py").write_text(
            "from pathlib import Path\nLIBRARY = Path(__file__).with_name('libtheir.so')\n"
        )
        (folder / "libtheir.so").write_bytes(b"a library")
        (folder / "mine.py").write_text(PASS)
        monkeypatch.syspath_prepend(str(site))
        monkeypatch.delitem(sys.modules, package, raising=False)
        return folder

    return install


def test_a_pass_by_name(install: Install) -> None:
    folder = install(passes="their_pass = their_package.mine")
    assert offered_names(PASSES) == ["their_pass"]
    assert pass_file("their_pass") == folder / "mine.py"
    (mine,) = (p for p in all_passes(["their_pass"]) if p.own)
    assert (mine.name, mine.summary) == ("mine", "Does nothing.")
    assert mine.evidence[0].startswith("mine.py, sha256 ")


def test_a_file_goes_before_a_name(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(passes="their_pass = their_package.mine")
    monkeypatch.chdir(tmp_path)
    Path("their_pass").touch()
    assert pass_file("their_pass") == Path("their_pass")
    assert pass_file("other.py") == Path("other.py")


def test_an_unknown_pass_lists_the_installed_ones(install: Install) -> None:
    install(passes="their_pass = their_package.mine")
    with pytest.raises(InputError, match=r"no such file. Installed packages offer their_pass"):
        load_pass(pass_file("her_pass"))


def test_a_plugin_by_name(install: Install) -> None:
    folder = install(plugins="their_op = their_package:LIBRARY")
    (plugin,) = find_plugins(["their_op"], TARGETS["tensorrt-8.6"])
    assert plugin.file == (folder / "libtheir.so").resolve()
    before = _plugins(["their_op"])
    (folder / "libtheir.so").write_bytes(b"another library")
    assert _plugins(["their_op"]) != before  # its content counts in the keys
    with pytest.raises(InputError, match=r"unknown plugin 'her_op'.*correlation_lookup, their_op"):
        find_plugins(["her_op"], TARGETS["tensorrt-8.6"])


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("their_package.other", "the module their_package.other has no file"),
        ("their_package:OTHER", "AttributeError"),
        ("no_package:LIBRARY", "ModuleNotFoundError"),
    ],
)
def test_a_package_that_is_broken(install: Install, value: str, words: str) -> None:
    install(plugins=f"their_op = {value}")
    with pytest.raises(InputError, match=f"their_op: .*{words}"):
        offered_file(PLUGINS, "their_op")


def test_two_packages_with_one_name(install: Install) -> None:
    for package in ("their_package", "her_package"):
        install(package, passes=f"same = {package}.mine")
    with pytest.raises(InputError, match="her_package and their_package both offer it"):
        pass_file("same")
