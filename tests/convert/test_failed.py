"""What a failed conversion leaves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import onnx
import onnx.parser
import pytest
from helpers import Run, files_under

import pipeline
from pipeline.artifact.artifact import Artifact
from pipeline.convert import stages
from pipeline.convert.driver import run
from pipeline.errors import ArtifactError, BuildError, InputError, PipelineError
from pipeline.graph.session import run_onnx
from pipeline.spec.config import Config

KEPT = ["exported.onnx", "failure.txt", "model.onnx"]
Fail = Callable[[BaseException], None]


@pytest.fixture
def fail(monkeypatch: pytest.MonkeyPatch) -> Fail:
    """Makes the next builds fail."""

    def with_error(error: BaseException) -> None:
        def build(*_: object) -> NoReturn:
            raise error

        monkeypatch.setattr(stages.building, "build", build)

    return with_error


def product(place: Path, rows: int = 1024, *, external: bool = False) -> Config:
    """The conversion of a product with `rows` KiB of weights, to the folder ``a``."""
    text = "g (float[n, {0}] x, float[{0}, 256] w) => (float[n, 256] y) {{ y = MatMul(x, w) }}"
    head = '<ir_version: 8, opset_import: ["" : 18]>'
    model = onnx.parser.parse_model(f"{head} {text.format(rows)}")
    weights = np.ones((rows, 256), np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(weights, "w"))
    del model.graph.input[1]
    onnx.save(model, place / "m.onnx", save_as_external_data=external, location="w.bin")
    return Config(str(place / "m.onnx"), dims=("n=1:2:4",), out=place / "a", quick=True)


def failed(config: Config, **changes: Any) -> str:
    with pytest.raises(PipelineError) as caught:
        run(Config(**{**vars(config), **changes}))
    return str(caught.value)


def test_the_files_are_kept_named_and_removed_by_a_success(
    tmp_path: Path, fail: Fail, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, place = product(tmp_path), tmp_path / "a.failed"
    fail(BuildError("TensorRT refuses it", detail="the log"))
    text = failed(config)
    assert text == f"TensorRT refuses it\nkept: {place}: exported.onnx, model.onnx"
    assert files_under(tmp_path) == ["a.failed", *(f"a.failed/{n}" for n in KEPT), "m.onnx"]
    assert (place / "failure.txt").read_text() == "TensorRT refuses it\nthe log\n"
    (place / "model.onnx").unlink()
    fail(BuildError("again"))
    failed(config)
    assert (place / "failure.txt").read_text() == "again\n"
    assert files_under(place) == KEPT
    for load in (Artifact.open, pipeline.load):
        with pytest.raises(ArtifactError, match="is what is left of a failed conversion, not an"):
            load(place)
    monkeypatch.undo()
    run(config)
    assert not place.exists()
    assert Artifact.open(tmp_path / "a").extra == ()


def test_the_files_run(tmp_path: Path, fail: Fail) -> None:
    config = product(tmp_path, external=True)
    fail(BuildError("no"))
    failed(config)
    for name in ("exported.onnx", "model.onnx"):
        (found,) = run_onnx(tmp_path / "a.failed" / name, [{"x": np.ones((2, 1024), np.float32)}])
        assert found["y"].shape == (2, 256)


def test_the_artifact_stays_apart_from_the_files(tmp_path: Path, fail: Fail) -> None:
    """Its large files are hard links in the folder of a conversion that begins with it."""
    config = product(tmp_path, 2048)
    run(config)
    before = Artifact.open(tmp_path / "a").manifest
    fail(BuildError("no"))
    text = failed(config, skip=("inline_functions",))
    assert text.endswith("a.failed: exported.onnx, model.onnx")
    assert files_under(tmp_path / "a.failed") == KEPT
    for name in KEPT:
        with (tmp_path / "a.failed" / name).open("r+b") as file:
            file.write(b"changed in place")
    assert Artifact.open(tmp_path / "a").manifest == before
    fail(BuildError("no"))  # the artifact has what comes before the build
    assert failed(config, precision="tf32") == "no"


@pytest.mark.parametrize("error", [InputError("no"), KeyboardInterrupt(), OSError(28, "full")])
def test_nothing_is_kept_after(tmp_path: Path, fail: Fail, error: BaseException) -> None:
    fail(error)
    with pytest.raises((type(error), PipelineError)) as caught:
        run(product(tmp_path))
    assert "\nkept: " not in str(caught.value)
    assert files_under(tmp_path) == ["m.onnx"]


def test_nothing_is_kept_before_the_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise PipelineError("no")

    monkeypatch.setattr(stages, "import_onnx", refuse)
    assert failed(product(tmp_path)) == "no"
    assert files_under(tmp_path) == ["m.onnx"]


@pytest.mark.parametrize("what", ["folder", "file", "artifact"])
def test_a_place_that_is_taken_stays(tmp_path: Path, fail: Fail, what: str) -> None:
    config, place = product(tmp_path), tmp_path / "a.failed"
    if what == "artifact":
        run(Config(**{**vars(config), "out": place}))
    elif what == "file":
        place.write_text("mine")
    else:
        place.mkdir()
        (place / "mine.txt").write_text("mine")
    before = files_under(tmp_path)
    run(config)
    assert [name for name in files_under(tmp_path) if not name.startswith("a/")] == ["a", *before]
    fail(BuildError("no"))
    assert failed(config, force=True) == "no"
    assert [name for name in files_under(tmp_path) if not name.startswith("a/")] == ["a", *before]


@pytest.mark.parametrize("memory", [False, True])
@pytest.mark.parametrize("json", [(), ("--json",)])
def test_the_command_names_them_in_a_line(
    cli: Run, tmp_path: Path, fail: Fail, memory: bool, json: tuple[str, ...]
) -> None:
    product(tmp_path)
    fail(MemoryError() if memory else BuildError("no\nway", detail="the log"))
    words = ("convert", "m.onnx", "--dim", "n=1:2:4", "--out", "a", "--quick", *json)
    code, output, errors = cli(*words)
    assert (code, output) == (1, "")
    *_, line, last = errors.splitlines()
    assert line.startswith("error: out of memory. " if memory else "error: no way (--debug")
    assert last == "kept: a.failed: exported.onnx, model.onnx"
    for command in ("inspect", "verify", "build"):
        code, _, errors = cli(command, "a.failed")
        assert code == 2 and "what is left of a failed conversion" in errors
