"""A plugin file runs code. Only plugins that the caller names are loaded."""

from __future__ import annotations

import dataclasses
import hashlib
import re
import shutil
from pathlib import Path

import onnx
import onnx.parser
import pytest
from helpers import Run, refinish, refused

import pipeline
from pipeline.artifact.artifact import Artifact
from pipeline.convert.driver import run, verify
from pipeline.convert.options import Verify
from pipeline.errors import InputError, TargetMissing
from pipeline.machine.gpu import find_gpu
from pipeline.machine.target import TARGETS
from pipeline.runtime.trust import allowed_plugins, load_plugins
from pipeline.spec.config import Config

NAME = "./foo.py"


@pytest.fixture
def evil(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An artifact whose manifest names a file in the current folder. The file records its run."""
    monkeypatch.chdir(artifact.parent)
    file = artifact.parent / "foo.py"
    file.write_text(
        f"import pathlib\npathlib.Path({str(artifact.parent / 'ran')!r}).touch()\n"
        "def register(trt): pass\n"
    )
    named(artifact, {NAME: hashlib.sha256(file.read_bytes()).hexdigest()})
    return artifact


def named(artifact: Path, hashes: dict[str, str], name: str = NAME) -> None:
    build = Artifact.open(artifact).manifest.build
    assert build is not None
    refinish(artifact, build=dataclasses.replace(build, plugins=(name,), plugin_hashes=hashes))


def test_a_file_that_only_the_manifest_names_does_not_run(evil: Path) -> None:
    with pytest.raises(InputError) as caught:
        pipeline.load(evil)
    assert re.search(
        r"runs the code of the plugin \./foo\.py \(sha256 [0-9a-f]{16}\.\.\.\), which is loaded "
        r"only if you pass it: .* pass plugins=\('\./foo\.py',\) or --plugin \./foo\.py$",
        str(caught.value),
    )
    assert not (evil.parent / "ran").exists()


def test_without_a_hash_it_does_not_run_even_if_it_is_given(evil: Path) -> None:
    named(evil, {})
    with pytest.raises(
        InputError, match=r"no hash of the plugin \./foo\.py, so the plugin is not loaded"
    ):
        allowed_plugins(Artifact.open(evil).manifest, [NAME], "a")


def test_the_file_that_is_given_is_the_one_that_runs(evil: Path, tmp_path: Path) -> None:
    """The file may be anywhere on this machine. The path in the manifest is never used."""
    moved = Path(shutil.move(evil.parent / "foo.py", tmp_path / "moved.py"))
    Path("foo.py").write_text("raise AssertionError\n")
    assert allowed_plugins(Artifact.open(evil).manifest, [str(moved)], "a") == (str(moved),)
    if isinstance(find_gpu(), str):  # an error after the plugins
        with pytest.raises(TargetMissing, match="an engine needs a GPU"):
            pipeline.load(evil, plugins=(str(moved),))


def test_a_file_of_another_content_does_not_run(evil: Path) -> None:
    (evil.parent / "foo.py").write_text("def register(trt): raise AssertionError\n")
    with pytest.raises(InputError, match=r"plugin foo\.py: its content differs from \./foo\.py"):
        pipeline.load(evil, plugins=("foo.py",))
    with pytest.raises(InputError, match="which is loaded only if you pass it"):
        allowed_plugins(Artifact.open(evil).manifest, ["foo.py"], "a")


def test_the_pipelines_own_need_not_be_given(artifact: Path) -> None:
    own = "correlation_lookup"
    named(artifact, {}, own)
    manifest = Artifact.open(artifact).manifest
    assert allowed_plugins(manifest, (), "a") == (own,)
    load_plugins(pytest.importorskip("tensorrt_rtx"), (own,), TARGETS["rtx-1.7"], "a")


def test_a_build_writes_the_hash_and_converts_with_its_own_consent(tmp_path: Path) -> None:
    text = """<ir_version: 8, opset_import: ["" : 18, "mine" : 1]>
        g (float[1,4] x) => (float[1,4] y) { t = Relu(x) y = mine.Twice(t) }
        <opset_import: ["" : 18], domain: "mine"> Twice (a) => (b) { b = Add(a, a) }"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "net.onnx")
    twice = str(Path(__file__).parents[1] / "support" / "twice_plugin.py")
    done = run(Config(str(tmp_path / "net.onnx"), out=tmp_path / "a", plugins=(twice,)))
    assert done.manifest.build is not None and done.manifest.build.plugins == (twice,)
    digest = hashlib.sha256(Path(twice).read_bytes()).hexdigest()
    assert done.manifest.build.plugin_hashes == {twice: digest}
    assert verify(tmp_path / "a", Verify(plugins=[twice])).ok
    with pytest.raises(InputError, match=r"runs the code of the plugin .*twice_plugin\.py"):
        pipeline.load(tmp_path / "a")


@pytest.mark.parametrize("verb", ["verify", "bench"])
def test_on_the_command_line(cli: Run, evil: Path, verb: str) -> None:
    refused(cli(verb, evil, "--plugin", "nope"), "plugin nope: no such file, and not one of the")
    other = evil.parent / "other.py"
    other.write_text("raise AssertionError\n")
    refused(cli(verb, evil, "--plugin", other), "its engine needs the plugins ./foo.py; leave it")
    own = "correlation_lookup"
    refused(cli(verb, evil, "--plugin", own), f"plugin {own}: its engine needs the plugins ./foo")
    if verb == "bench":
        refused(cli(verb, evil), "runs the code of the plugin ./foo.py", "--plugin ./foo.py")
    assert not (evil.parent / "ran").exists()


def test_weights_that_nothing_reads(cli: Run, artifact: Path, tmp_path: Path) -> None:
    (tmp_path / "w.pth").touch()
    refused(cli("verify", artifact, "--weights", "w.pth"), "weights w.pth: only the torch model")
