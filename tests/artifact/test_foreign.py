"""An artifact from somebody else, with hashes that fit: data, never code, and never a path."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import Run, refused, refused_late, rehash
from test_artifact import FULL, make

from pipeline.artifact.manifest import Manifest
from pipeline.commands.report import report_json, report_text
from pipeline.convert.report import Report
from pipeline.errors import InputError
from pipeline.machine.files import hash_file
from pipeline.spec.file_names import MANIFEST, PLAN

VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1 << 62, 10**400, -(10**40), 1.5, 1e308, "", "x", "\x1b[2J", "\ud800", "a/b",
    "../../x", [], {}, [None], {"h": None}, ["x", -1], {"h": 1 << 62},
)  # fmt: skip


def spots(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a JSON value."""
    if path:
        yield path
    items = (
        value if isinstance(value, dict) else range(len(value) if isinstance(value, list) else 0)
    )
    for key, inner in ((key, value[key]) for key in items):
        yield from spots(inner, (*path, key))


def put(content: Any, path: tuple[Any, ...], value: Any) -> None:
    for key in path[:-1]:
        content = content[key]
    content[path[-1]] = copy.deepcopy(value)


def used(manifest: Manifest) -> None:
    """What every command does with a manifest that was read."""
    report_text(Report(Path("x"), manifest))
    report_json(Report(Path("x"), manifest))
    manifest.tolerances()
    manifest.engine_tolerances()
    assert manifest.merged is not None
    for profile in manifest.interface.profiles:
        resolved = profile.resolve(manifest.interface.dims)
        manifest.interface.sizes_of(
            {
                name: shapes[1]
                for name, shapes in resolved.shapes(manifest.interface.input_shapes).items()
            }
        )


def test_any_value_in_any_place_of_a_manifest(tmp_path: Path) -> None:
    """Each value at each place, with a right hash: an `InputError`, or a manifest that works."""
    path = tmp_path / MANIFEST
    text = FULL.to_json()
    content = json.loads(text)
    refusals = tries = 0
    for spot in spots(content):
        if spot == ("manifest_sha256",):
            continue
        for value in VALUES[tries % 5 :: 5]:
            path.write_text(text)
            rehash(path, lambda content, spot=spot, value=value: put(content, spot, value))
            tries += 1
            try:
                used(Manifest.from_json(path.read_bytes(), str(path)))
            except InputError as error:
                assert "\n" not in str(error)
                refusals += 1
            except Exception as error:
                raise AssertionError(f"{spot} = {value!r}") from error
    assert tries > 1000
    assert refusals > tries / 2


def change(*path: Any, value: Any) -> Callable[[Any], None]:
    return lambda content: put(content, path, value)


TAMPERED: dict[str, tuple[Callable[[Any], None], str]] = {
    "a profile that is a path": (
        change("interface", "profiles", 0, "name", value="/tmp/x"),
        "interface.profiles: profile name '/tmp/x' is not valid for a folder",
    ),
    "a reserved profile": (
        change("interface", "profiles", 0, "name", value="later"),
        "interface.profiles: profile name 'later'",
    ),
    "an empty text": (
        change("comparison", "notes", 1, value={"kind": "weak-parts", "facts": {}, "text": ""}),
        "comparison.notes[1]: lacks 'output'",
    ),
    "a fact of another type": (
        change(
            "comparison", "points", 0, "results", 1,
            value={
                "kind": "differs", "pair": ["a", "b"], "output": "flow", "max_abs": 1.0,
                "max_rel": 1.0, "text": "",
                "facts": {"index": "1", "largest": "1", "worst_abs": "x", "worst_rel": "y"},
            },
        ),
        "comparison.points[0].results[1]: its fields don't fit together",
    ),
    "an unknown target": (
        change("target", "name", value="tvm"),
        "target.name: 'tvm' is unknown; known: rtx-1.7",
    ),
    "another target's flavour": (
        change("target", "flavour", value="tensorrt_rtx"),
        "target.flavour: 'tensorrt_rtx' is unknown; known: tensorrt",
    ),
    "an unknown precision": (change("precision", value="int1"), "precision: 'int1' is unknown"),
    "an unknown reference": (change("reference", value="../x"), "reference: '../x' is unknown"),
    "a dim that is none": (
        change("export", "dynamic", value={"q": {"where": "x axis 2", "ran_at": []}}),
        "export.dynamic: no dim is called q",
    ),
    "sizes of other dims": (
        change("comparison", "points", 0, "sizes", value={"q": 1}),
        "comparison.points[0].sizes: expected a size of each dim: h, w",
    ),
    "a rule that is none": (
        change("export", "refinements", 0, "size_rule", value="h h"),
        "export.refinements[0].size_rule: size rule 'h h'",
    ),
    "a hash that is none": (
        change("build", "plugin_hashes", "foo.so", value="x"),
        "build.plugin_hashes.foo.so: is not a SHA-256",
    ),
    "a negative time": (
        change("stages", 0, "seconds", value=-1.0),
        "stages[0].seconds: is -1.0, but can't be negative",
    ),
    "a number beyond 64 bits": (
        change("comparison", "points", 0, "sizes", "h", value=10**400),
        "comparison.points[0].sizes.h: expected an integer",
    ),
    "two tensors of one name": (
        change("interface", "outputs", 0, "name", value="image"),
        "interface: two tensors are called 'image'",
    ),
    "an output of objects": (
        change("interface", "outputs", 0, "dtype", value="object"),
        "interface.outputs[0]: output flow: dtype 'object' is not a number or bool",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", TAMPERED)
def test_a_manifest_that_was_hashed_again(cli: Run, tmp_path: Path, case: str) -> None:
    how, words = TAMPERED[case]
    make(tmp_path / "raft")
    rehash(tmp_path / "raft" / MANIFEST, how)
    refused(cli("inspect", "raft"), "raft/manifest.json: ", words, "convert again")


@pytest.mark.parametrize("kind", ["link", "folder", "pipe", "device", "manifest"])
def test_what_is_no_file(cli: Run, tmp_path: Path, kind: str) -> None:
    """A link, a pipe and a device are refused before they are opened."""
    make(tmp_path / "raft")
    odd = tmp_path / "raft" / (MANIFEST if kind == "manifest" else PLAN)
    odd.unlink()
    if kind == "link":
        odd.symlink_to(MANIFEST)
    elif kind == "folder":
        shutil.rmtree(tmp_path / "raft" / "comparison")
        (tmp_path / "raft" / "comparison").symlink_to("/usr")
    elif kind == "device":
        try:
            os.mknod(odd, 0o20666, os.makedev(1, 5))  # /dev/zero never ends
        except PermissionError:
            pytest.skip("only root makes devices")
    else:
        os.mkfifo(odd)
    words = "is a link" if kind in ("link", "folder") else "not a plain file"
    for command in ("inspect", "verify", "build", "locate", "bench"):
        refused(cli(command, "raft"), "raft/", words)


def test_a_pipe_as_a_source(cli: Run, tmp_path: Path) -> None:
    for name in ("a.onnx", "a.pt2", "w.pth", "w.safetensors"):
        os.mkfifo(tmp_path / name)
    for words in (
        ("lint", "a.onnx"),
        ("rewrite", "a.onnx"),
        ("check", "a.onnx"),
        ("convert", "a.pt2"),
        ("convert", "tiny", "--weights", "w.pth"),
        ("convert", "tiny", "--weights", "w.safetensors"),
    ):
        refused_late(cli(*words), words[-1])


def test_verify_does_not_write_where_a_link_leads(cli: Run, tmp_path: Path, artifact: Path) -> None:
    outside = tmp_path / "outside"
    shutil.move(artifact / "comparison", outside)
    (artifact / "comparison").symlink_to(outside)
    before = {path: path.read_bytes() for path in outside.rglob("*.json")}
    refused(cli("verify", artifact), "comparison: is a link")
    assert {path: path.read_bytes() for path in outside.rglob("*.json")} == before


def test_verify_does_not_write_where_a_profile_leads(
    cli: Run, tmp_path: Path, artifact: Path
) -> None:
    def move(content: Any) -> None:
        for profile in content["interface"]["profiles"]:
            profile["name"] = str(tmp_path / "outside")

    rehash(artifact / MANIFEST, move)
    refused(cli("verify", artifact), "interface.profiles: profile name")
    assert not (tmp_path / "outside").exists()


SOURCE = """
import pathlib
pathlib.Path(__file__).with_name("ran").touch()
def factory():
    pathlib.Path(__file__).with_name("called").touch()
"""


def test_verify_runs_a_source_only_with_the_users_word(
    cli: Run, tmp_path: Path, artifact: Path
) -> None:
    (tmp_path / "evil.py").write_text(SOURCE)
    source = f"{tmp_path / 'evil.py'}:factory"

    def name_it(content: Any) -> None:
        content["model"] |= {"source": source, "options": {}}

    rehash(artifact / MANIFEST, name_it)
    refused(
        cli("verify", artifact, "--torch"),
        f"--torch would run {source}, which the artifact's manifest names. If you trust it, add "
        "--trust",
    )
    assert not (tmp_path / "ran").exists()
    code, _, errors = cli("verify", artifact, "--torch", "--trust")
    assert code == 2, errors
    assert (tmp_path / "called").exists()


def test_a_model_that_comes_with_pipeline_needs_no_word(cli: Run, artifact: Path) -> None:
    code, _, errors = cli("verify", artifact, "--torch")
    assert code == 0, errors


def test_control_characters_are_not_printed(cli: Run, tmp_path: Path) -> None:
    make(tmp_path / "raft")

    def rename(content: Any) -> None:
        put(content, ("name",), "\x1b[2Jname\x07\u202e")
        put(content, ("model", "source"), "a\x9bb")
        put(content, ("rewrite", "warnings"), ["one\rtwo\ttabs"])

    rehash(tmp_path / "raft" / MANIFEST, rename)
    code, output, _ = cli("inspect", "raft")
    assert code == 1  # its comparison failed
    assert r"\x1b[2Jname\x07\u202e" in output
    assert r"one\rtwo" in output
    assert all(ch.isprintable() or ch in "\n\t" for ch in output)
    code, output, errors = cli("verify", "x\x1b[2J\nerror: forged\x07\udcff")
    assert (code, output) == (2, "")
    assert all(ch.isprintable() or ch == "\n" for ch in errors)
    assert errors.count("\n") == 1


def test_stored_runs_that_are_something_else(cli: Run, artifact: Path) -> None:
    """Polygraphy's JSON with wrong content, listed with the right hash."""
    stored = sorted(artifact.glob("comparison/*/inputs.json"))
    stored += sorted(artifact.glob("comparison/*/torch.json"))
    assert len(stored) == 2
    wrong = ("", "[]", "{}", "[1]", '[{"x": 1}]', "null", '{"lst": []}')
    for path in stored:
        whole = path.read_bytes()
        name = path.relative_to(artifact).as_posix()
        for text in wrong:
            path.write_text(text)
            info = dataclasses.asdict(hash_file(path))
            rehash(artifact / MANIFEST, change("files", name, value=info))
            refused_late(cli("verify", artifact), "the artifact's comparison/default/")
        path.write_bytes(whole)
        info = dataclasses.asdict(hash_file(path))
        rehash(artifact / MANIFEST, change("files", name, value=info))
