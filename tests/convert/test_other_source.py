"""An artifact of another source is never replaced silently."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import onnx
import onnx.parser
import pytest
import tiny
from helpers import Run, files_under, refused

from pipeline.artifact.artifact import Artifact
from pipeline.convert.driver import run, run_export
from pipeline.convert.reuse import same_source
from pipeline.errors import InputError
from pipeline.spec.config import Config
from pipeline.spec.dims import shape_texts

NET = """import torch


def {name}(out=2):
    return torch.nn.Linear(3, out)
"""
WORDS = ("--input", "input:{n}x3", "--dim", "n=1:3:9")
ONNX = """<ir_version: 8, opset_import: ["" : 18]>
g (float[n,4] x) => (float[n,4] y) {{ y = {op}(x) }}"""


@pytest.fixture
def files(cli: Run, tmp_path: Path) -> Path:
    """Two files with a factory of the same name, and one with the name of a zoo model."""
    del cli
    for folder, name in (("a", "net"), ("b", "net"), ("c", "tiny")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "other_source.py").write_text(NET.format(name=name))
    return tmp_path


def source(place: Path) -> str:
    return Artifact.open(place).manifest.model.source


def test_a_factory_of_the_same_name(cli: Run, files: Path) -> None:
    mine, other = "a/other_source.py:net", "b/other_source.py:net"
    code, _, errors = cli("export", mine, *WORDS)
    assert code == 0, errors
    place = files / "artifacts" / "net"
    before = files_under(place.parent), (place / "manifest.json").read_bytes()
    for command in ("export", "convert"):
        refused(
            cli(command, other, *WORDS),
            f"artifacts/net has an artifact of {mine}, not of {other}. Pass another folder with "
            "--out DIR, or replace the artifact with --force",
        )
        assert (files_under(place.parent), (place / "manifest.json").read_bytes()) == before
    code, _, errors = cli("export", other, *WORDS, "--out", "net2")
    assert code == 0 and source(files / "net2") == other, errors
    refused(cli("export", mine, *WORDS, "--out", "net2"), "net2 has an artifact of", other)
    code, _, errors = cli("export", other, *WORDS, "--force")
    assert code == 0 and source(place) == other, errors


def test_the_same_source_is_replaced(cli: Run, files: Path) -> None:
    place = files / "artifacts" / "net"
    for text, out in (
        ("a/other_source.py:net", 2),
        ("a/other_source.py:net", 3),  # other options are not another source
        ("./a/../a/other_source.py:net", 4),
        (f"{files}/a/other_source.py:net", 5),
    ):
        code, _, errors = cli("export", text, *WORDS, "--option", f"out={out}")
        assert code == 0 and source(place) == text, errors
        (output,) = Artifact.open(place).manifest.interface.outputs
        assert shape_texts(output.shape) == ("n", out)


def test_a_name_of_the_zoo(cli: Run, files: Path) -> None:
    code, _, errors = cli("export", "tiny")
    assert code == 0, errors
    own = "c/other_source.py:tiny"
    refused(cli("export", own, *WORDS), f"has an artifact of tiny, not of {own}")
    code, _, errors = cli("export", own, *WORDS, "--force")
    assert code == 0, errors
    refused(cli("convert", "tiny"), f"has an artifact of {own}, not of tiny")
    assert source(files / "artifacts" / "tiny") == own


def test_onnx_files_of_the_same_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder, op in (("a", "Tanh"), ("b", "Sigmoid"), ("c", "Tanh")):
        Path(folder).mkdir()
        onnx.save(onnx.parser.parse_model(ONNX.format(op=op)), f"{folder}/model.onnx")
    dims = ("n=1:3:9",)
    first = run(Config("a/model.onnx", dims=dims))
    with pytest.raises(
        InputError, match=r"an artifact of a/model\.onnx, not of b/model\.onnx\. Pass"
    ):
        run(Config("b/model.onnx", dims=dims))
    assert source(first.path) == "a/model.onnx"
    # identical bytes: nothing is replaced
    assert run(Config("c/model.onnx", dims=dims)).unchanged
    done = run(Config("b/model.onnx", dims=dims, force=True))
    assert done.path == first.path and source(done.path) == "b/model.onnx"


def test_an_object_of_the_same_name_with_other_inputs_replaces_nothing(tmp_path: Path) -> None:
    first = tiny.of(lambda x: x * 2)
    other = replace(first, inputs=(replace(first.inputs[0], name="other"),))
    done = run_export(Config(first, out=tmp_path / "a"))
    before = (tmp_path / "a" / "manifest.json").read_bytes()
    why = r"has an artifact of another spec:.*: its inputs are x, not other. Pass another name"
    with pytest.raises(InputError, match=why):
        run_export(Config(other, out=tmp_path / "a"))
    assert (tmp_path / "a" / "manifest.json").read_bytes() == before
    again = run_export(Config(other, out=tmp_path / "a", force=True))
    assert again.path == done.path and again.manifest.interface.inputs[0].name == "other"


def test_an_older_or_damaged_artifact_still_says_what_it_is_of(artifact: Path) -> None:
    """The source is read even if the rest is unreadable."""
    other = Config("spec.onnx", dims=("n=:9",), out=artifact)
    onnx.save(onnx.parser.parse_model(ONNX.format(op="Tanh")), artifact.parent / "spec.onnx")
    content = json.loads((artifact / "manifest.json").read_text())
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(artifact.parent)
        old = {key: value for key, value in content.items() if key != "interface"}
        for kept in ({**content, "schema": 2}, {**content, "manifest_sha256": "0"}, old):
            (artifact / "manifest.json").write_text(json.dumps(kept))
            with pytest.raises(InputError, match=r"has an artifact of tiny, not of spec\.onnx"):
                run_export(other)
        for text in (
            "{",
            "[]",
            json.dumps({**content, "model": {}}),
        ):  # it does not state its source
            (artifact / "manifest.json").write_text(text)
            shutil.copytree(artifact, artifact.parent / "copy")
            done = run_export(Config("spec.onnx", dims=("n=:9",), out="copy"))
            assert done.manifest.model.source == "spec.onnx"
            shutil.rmtree("copy")


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("raft", "raft", True),
        ("raft", "raft_small", False),
        ("raft", "spec:raft", False),
        ("net.py:f", "./net.py:f", True),
        ("net.py:f", "net.py:g", False),
        ("a/net.py:f", "b/net.py:f", False),
        ("net.py:f", "net:f", False),
        ("a.onnx", "x/../a.onnx", True),
        ("a.onnx", "x/a.onnx", False),
        ("a.pt2", "./a.pt2", True),
        ("a.pt2", "a.onnx", False),
    ],
)
def test_which_texts_are_one_source(one: str, other: str, same: bool) -> None:
    assert same_source(one, other) is same
    assert same_source(other, one) is same
