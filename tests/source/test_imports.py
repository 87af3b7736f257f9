"""Code that a factory imports late or from elsewhere: a change of it is never taken for nothing."""

from __future__ import annotations

import importlib
import runpy
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from pipeline.artifact.artifact import Artifact
from pipeline.convert.driver import run, verify
from pipeline.convert.report import Report
from pipeline.errors import CompareError, InputError
from pipeline.source import imports
from pipeline.source.find import find_source
from pipeline.source.imports import changed_files, changed_imports, imports_of
from pipeline.spec.code_file import CodeFile
from pipeline.spec.config import Config

OWN = """
def net():
    from late_blocks.scaling import Scaled
    return Scaled()
"""
SCALED = """
import torch, {package}
class Scaled(torch.nn.Module):
    def forward(self, x): return x * {factor}
"""


def forget() -> None:
    for name in [n for n in sys.modules if n.split(".")[0] in ("late_blocks", "own")]:
        del sys.modules[name]


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Puts ``late_blocks`` into a folder of its own on the path, as if in a new process."""
    monkeypatch.chdir(tmp_path)
    Path("scripts").mkdir()
    Path("scripts/own.py").write_text(OWN)

    def write(folder: Path, factor: float, package: str = "yaml") -> None:
        forget()
        sys.path[:] = [p for p in sys.path if not p.startswith(str(tmp_path))]
        place = folder / "late_blocks"
        place.mkdir(parents=True, exist_ok=True)
        (place / "__init__.py").write_text("")
        (place / "scaling.py").write_text(SCALED.format(factor=factor, package=package))
        sys.path.insert(0, str(folder))

    before = list(sys.path)
    yield write
    forget()
    sys.path[:] = before


def convert(out: str, **more: object) -> Report:
    fields = {"inputs": ("x:{b}x4",), "dims": ("b=1:4",), "quick": True, **more}
    return run(Config("scripts/own.py:net", out=out, **fields))  # type: ignore[arg-type]


def factor(place: str) -> float:
    session = onnxruntime.InferenceSession(Artifact.open(place).path / "model.onnx")
    return float(session.run(None, {"x": np.ones((1, 4), np.float32)})[0].max())


def test_a_late_import_that_changed_is_converted_again(
    library: Callable[..., None], tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    library(elsewhere, 2)
    first = convert("a")
    assert factor("a") == 2
    assert {"late_blocks", "late_blocks.scaling"} <= first.manifest.model.modules.keys()
    library(elsewhere, 2)
    assert convert("a").unchanged
    library(elsewhere, 3)
    second = convert("a")
    assert not second.unchanged and factor("a") == 3
    # the key alone cannot tell: it is made before the factory runs
    assert first.manifest.keys["export"] == second.manifest.keys["export"]


def test_changed_code_is_named_if_the_torch_model_differs(
    library: Callable[..., None], tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    library(elsewhere, 2)
    assert convert("a").ok
    assert verify("a", torch_model=True, trust=True).ok
    library(elsewhere, 3)
    file = elsewhere / "late_blocks" / "scaling.py"
    said = (
        f"^a: .* differs.* But source code of scripts/own.py:net was changed .*: {file}. "
        "The artifact is unchanged. Convert again, or "
    )
    before = (Path("a") / "manifest.json").read_bytes()
    with pytest.raises(CompareError, match=said):
        verify("a", torch_model=True, trust=True)
    assert (Path("a") / "manifest.json").read_bytes() == before
    # a change that does not change the result
    file.write_text(file.read_text().replace("3", "(1 + 1)"))
    forget()
    assert verify("a", torch_model=True, trust=True).ok
    # the factory's own file
    library(elsewhere, 2)
    Path("scripts/own.py").write_text(OWN + "\n")
    assert verify("a", torch_model=True, trust=True).ok
    other = "Scaled.forward = lambda _, x: x\n    return"
    Path("scripts/own.py").write_text(OWN.replace("return", other))
    with pytest.raises(CompareError, match=r"was changed .*/scripts/own\.py\. The artifact"):
        verify("a", torch_model=True, trust=True)
    Path("scripts/own.py").write_text(OWN)
    library(elsewhere, 2)
    assert verify("a", torch_model=True, trust=True).ok
    # another copy of the same code, at another place
    Path("scripts").rename("moved")
    library(tmp_path_factory.mktemp("copy"), 2)
    (elsewhere / "late_blocks" / "scaling.py").write_text("")
    Path("scripts").symlink_to("moved")
    assert verify("a", torch_model=True, trust=True).ok


def test_a_module_that_is_the_source_is_an_import_too(
    library: Callable[..., None], tmp_path: Path
) -> None:
    library(tmp_path / "lib", 2)
    Path("late_blocks.scaling").write_text("no module")
    made = Config("late_blocks.scaling:Scaled", out="a", inputs=("x:{b}x4",), dims=("b=1:4",))
    modules = run(replace(made, quick=True)).manifest.model.modules
    assert "late_blocks.scaling" in modules
    assert changed_files(str(made.model), modules) == {}
    # another copy, which a run would import
    library(tmp_path / "other", 3)
    file = tmp_path / "other/late_blocks/scaling.py"
    assert changed_files(str(made.model), modules) == {"late_blocks.scaling": file}
    with pytest.raises(CompareError, match=f"was changed after the conversion: {file}"):
        verify("a", torch_model=True, trust=True)


def test_a_store_gives_no_model_of_other_code(
    library: Callable[..., None], tmp_path_factory: pytest.TempPathFactory
) -> None:
    pytest.importorskip("fsspec")
    one, same, other = (tmp_path_factory.mktemp(name) for name in ("one", "same", "other"))
    library(one, 2)
    convert("a", store="store")
    library(same, 2)
    hit = convert("b", store="store")
    assert hit.unchanged and factor("b") == 2
    library(other, 3)
    miss = convert("c", store="store")
    assert not miss.unchanged and factor("c") == 3
    assert miss.store is not None
    (text,) = [line for line in miss.store.lines() if line.startswith("miss")]
    assert "differs in module late_blocks.scaling " in text
    assert miss.store.pushed  # in place of the entry of the other code
    library(other, 3)
    assert convert("d", store="store").unchanged
    library(one, 2)
    assert not convert("e", store="store").unchanged
    assert factor("e") == 2


def test_installed_packages_count_by_version(
    library: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library(tmp_path / "lib", 2)
    importlib.import_module("late_blocks.scaling")

    modules, packages = imports_of("scripts/own.py:net")
    assert packages["PyYAML"] == metadata.version("PyYAML")
    assert "torch" in packages and "numpy" not in modules
    assert changed_imports(modules, packages) == {}
    real = metadata.version
    monkeypatch.setattr(metadata, "version", lambda n: "0.1" if n == "PyYAML" else real(n))
    assert changed_imports(modules, packages) == {"PyYAML": (packages["PyYAML"], "0.1")}


def test_modules_are_found_without_an_import(library: Callable[..., None], tmp_path: Path) -> None:
    library(tmp_path / "lib", 2)
    importlib.import_module("late_blocks.scaling")

    modules, _ = imports_of("scripts/own.py:net")
    own = {name: modules[name] for name in ("late_blocks", "late_blocks.scaling")}
    (tmp_path / "lib").rename(tmp_path / "gone")
    assert changed_imports(own, {}).keys() == own.keys()
    library(tmp_path / "copy", 2)
    assert changed_imports(own, {}) == {}
    assert "late_blocks" not in sys.modules
    library(tmp_path / "copy", 4)
    assert changed_imports(own, {}).keys() == {"late_blocks.scaling"}
    (tmp_path / "copy" / "late_blocks" / "scaling.py").unlink()
    assert changed_imports(own, {})["late_blocks.scaling"][1] == ""
    # a folder without __init__.py is a package too
    (tmp_path / "copy" / "late_blocks" / "scaling").mkdir()
    assert changed_imports(own, {})["late_blocks.scaling"][1] == ""


def test_a_file_that_was_loaded_by_its_path(tmp_path: Path) -> None:
    from pipeline.machine.python_file import run_python_file

    file = tmp_path / "by_path.py"
    file.write_text("x = 1")
    run_python_file(file, "name_of_no_file")
    try:
        modules, _ = imports_of("elsewhere.py:net")
        assert changed_imports({str(file): modules[str(file)]}, {}) == {}
        assert str(file) not in imports_of(f"{file}:net")[0]  # the key has it
    finally:
        del sys.modules["name_of_no_file"]
    file.write_text("x = 2")
    assert changed_imports({str(file): modules[str(file)]}, {}).keys() == {str(file)}


@pytest.mark.parametrize("source", ["raft", "net.onnx", "spec:net", "hf:NAME", "net.pt2"])
def test_other_sources_have_none(source: str) -> None:
    assert imports_of(source) == ({}, {})


def test_the_copy_that_was_used_counts_also_if_another_one_has_its_name(
    library: Callable[..., None], tmp_path: Path
) -> None:
    library(tmp_path / "used", 2)
    importlib.import_module("late_blocks.scaling")
    modules, _ = imports_of("scripts/own.py:net")
    own = {"late_blocks.scaling": modules["late_blocks.scaling"]}
    library(tmp_path / "other", 2)
    assert changed_imports(own, {}) == {}
    (tmp_path / "used/late_blocks/scaling.py").write_text("x = 1")
    assert changed_imports(own, {}).keys() == own.keys()


def test_a_file_that_changed_after_its_import_is_never_unchanged(
    library: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library(tmp_path / "lib", 2)
    monkeypatch.setattr(imports, "STARTED", 0.0)
    first = convert("a", force=True)
    assert first.manifest.model.modules["late_blocks.scaling"].sha256 == ""
    monkeypatch.setattr(imports, "STARTED", float("inf"))
    library(tmp_path / "lib", 2)
    assert not convert("a").unchanged
    library(tmp_path / "lib", 2)
    assert convert("a").unchanged


def test_an_optional_import_that_becomes_possible(
    library: Callable[..., None], tmp_path: Path
) -> None:
    library(
        tmp_path / "lib",
        2,
        package="yaml\ntry:\n    import fast_blocks\nexcept ImportError: pass\n#",
    )
    importlib.import_module("late_blocks.scaling")
    modules, _ = imports_of("scripts/own.py:net")
    assert modules["fast_blocks"] == CodeFile()
    assert changed_imports(modules, {}) == {}
    (tmp_path / "lib" / "fast_blocks.py").write_text("")
    assert changed_imports(modules, {}).keys() == {"fast_blocks"}


def test_a_class_of_a_file_that_nobody_imported_by_name(tmp_path: Path) -> None:
    file = tmp_path / "pipeline" / "hubconf.py"  # a folder of that name is not the package
    file.parent.mkdir()
    file.write_text(SCALED.format(factor=2, package="math"))
    module = runpy.run_path(str(file))["Scaled"]()
    modules, _ = imports_of("elsewhere.py:net", module)
    one = {str(file): modules[str(file)]}
    assert changed_imports(one, {}) == {}
    file.write_text(SCALED.format(factor=3, package="math"))
    assert changed_imports(one, {}).keys() == one.keys()


def test_a_file_with_nothing_but_an_import_is_in_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    keys = set()
    for kind in ("Identity", "ReLU", "Identity"):
        Path("net.py").write_text(f"from torch.nn import {kind} as net")
        keys.add(find_source(Config("net.py:net", inputs=("x:{b}x4",), dims=("b=1:4",))).key)
    assert len(keys) == 2


def test_a_module_of_another_folder_with_the_same_name_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, factor in ("a", 2), ("b", 5):
        place = tmp_path / name
        place.mkdir()
        (place / "net.py").write_text(
            "def net():\n    from late import Scaled\n    return Scaled()"
        )
        (place / "late.py").write_text(SCALED.format(factor=factor, package="math"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    fields = {"inputs": ("x:{b}x4",), "dims": ("b=1:4",), "quick": True}
    try:
        run(Config("a/net.py:net", out="x", **fields))  # type: ignore[arg-type]
        with pytest.raises(InputError, match=r"its import of late gave .*/a/late\.py"):
            run(Config("b/net.py:net", out="y", **fields))  # type: ignore[arg-type]
    finally:
        sys.modules.pop("late", None)
