"""Fixtures: one converted artifact for all tests, copies of it, and the tiny specs by name.

A machine that builds and runs engines may have no torch. Test files that import torch are then left
out, and named at the end.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import tiny
from helpers import Run, let_children_heed_signals
from quick_exports import keep_table
from readme_commands import ROOT, SNIPPETS, Beside, Done

from pipeline.artifact.artifact import Artifact
from pipeline.commands.main import main
from pipeline.convert.driver import run
from pipeline.convert.report import Report
from pipeline.machine.target import TARGETS, bind_polygraphy, installed_version
from pipeline.models import MODELS
from pipeline.source import imports
from pipeline.spec.config import Config

# The first import of Polygraphy binds it to a flavour of TensorRT. The order of the tests must not
# change the flavour.
bind_polygraphy(next((t for t in TARGETS.values() if installed_version(t)), TARGETS["rtx-1.7"]))

HAS_TORCH = importlib.util.find_spec("torch") is not None
EXPORT_ONLY = {"torch", "torchvision", "transformers", "safetensors", "onnxscript"}
OTHER_EXTRAS = {
    "fsspec", "grpc", "moto", "nbclient", "nbformat", "opentelemetry", "prometheus_client",
    "tritonclient", "yaml",
}  # fmt: skip
left_out: dict[str, str] = {}  # file -> the module that it needs


class TorchlessModule(pytest.Module):
    """A test file on a machine without torch. It has no tests if an import is missing."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        try:
            return super().collect()
        except self.CollectError as error:
            missing = (getattr(error.__cause__, "name", None) or "").partition(".")[0]
            if missing not in EXPORT_ONLY | OTHER_EXTRAS:
                raise
            left_out[self.nodeid] = missing
            return []


def pytest_configure() -> None:
    let_children_heed_signals()


def pytest_pycollect_makemodule(
    module_path: Path, parent: pytest.Collector
) -> pytest.Module | None:
    return None if HAS_TORCH else TorchlessModule.from_parent(parent, path=module_path)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if left_out:
        terminalreporter.section(f"{len(left_out)} test files left out: not installed here")
        for name, missing in left_out.items():
            terminalreporter.line(f"{name}: needs {missing}")


BESIDE = Beside()
NEEDS = {
    "raft_artifact": ["raft"],
    "snippet": [f"snippet{n}" for n in range(len(SNIPPETS))],
    "foreign": ["foreign"],
}


def needed(item: pytest.Item) -> set[str]:
    """The entries of `NEEDS` that a test uses."""
    return NEEDS.keys() & set(getattr(item, "fixturenames", ()))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Starts the long commands that the tests need.

    Objects from imports stay alive. They are frozen here, so that each collection of garbage saves
    0.2 s. With several processes, a process starts a command when a test waits for it, because each
    process knows only later which tests it gets.
    """
    gc.collect()
    gc.freeze()
    if not session.config.option.collectonly and not hasattr(session.config, "workerinput"):
        used = {name for item in session.items for name in needed(item)}
        BESIDE.start(command for name in used for command in NEEDS[name])


def pytest_sessionfinish() -> None:
    BESIDE.close()


def pytest_runtest_setup() -> None:
    keep_table()


@pytest.fixture(autouse=True)
def as_in_a_new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python files that a test writes are older than the process that converts them."""
    monkeypatch.setattr(imports, "STARTED", float("inf"))


@pytest.fixture
def zoo(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets commands find the tiny specs by name."""
    for name, factory in tiny.ZOO.items():
        monkeypatch.setitem(MODELS, name, factory)


@pytest.fixture(scope="session")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """`tiny.conv`, converted once; not to be changed."""
    if not HAS_TORCH:
        pytest.skip("converts a torch model, and torch is not installed here")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MODELS, "tiny", tiny.ZOO["tiny"])
        return run(Config("tiny", out=tmp_path_factory.mktemp("converted") / "tiny"))


@pytest.fixture(scope="session")
def raft_artifact() -> Callable[[], Artifact]:
    """Waits for `make convert MODEL=raft`, and returns its artifact."""

    def converted() -> Artifact:
        done = BESIDE.done("raft")
        assert done.code == 0, done.errors
        return Artifact.open(ROOT / "artifacts" / "raft")

    return converted


@pytest.fixture(scope="session")
def zoo_artifact(
    tmp_path_factory: pytest.TempPathFactory, raft_artifact: Callable[[], Artifact]
) -> Callable[[str], Artifact]:
    """The artifact of a model of the zoo, converted once for all processes; not to be changed."""
    if not HAS_TORCH:
        pytest.skip("converts torch models, and torch is not installed here")
    import converted_zoo

    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # each process has a folder below the common one
        folder = folder.parent
    folder = folder / "converted-zoo"
    folder.mkdir(exist_ok=True)
    return lambda name: raft_artifact() if name == "raft" else converted_zoo.converted(name, folder)


@pytest.fixture(scope="session")
def snippet() -> Callable[[int], Done]:
    """Waits for a snippet of README or docs, by its number."""
    return lambda number: BESIDE.done(f"snippet{number}")


@pytest.fixture(scope="session")
def foreign() -> Callable[[], Done]:
    """Waits for the README's conversion of a model of another library."""
    return lambda: BESIDE.done("foreign")


@pytest.fixture
def artifact(converted: Report, tmp_path: Path) -> Path:
    """A copy of `converted`'s folder. You may change it."""
    return Path(shutil.copytree(converted.path, tmp_path / "place" / "tiny"))


@pytest.fixture
def cli(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch, zoo: None) -> Run:
    """Runs a command line in `tmp_path`: exit code, stdout, stderr."""
    del zoo
    monkeypatch.chdir(tmp_path)

    def call(*words: object) -> tuple[int, str, str]:
        code = main([str(word) for word in words])
        return (code, *capsys.readouterr())

    return call
