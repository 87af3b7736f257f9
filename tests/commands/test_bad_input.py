"""Bad input on the command line: one line, exit code 2, and nothing written."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import HERE, Run, files_under, refused

from pipeline.machine.target import TARGETS, installed_version


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["dance"], ["unknown command 'dance'. Known: convert, ", "verify"]),
        (["convrt", "raft"], ["unknown command 'convrt'. Did you mean convert?"]),
        (["convert"], ["no SOURCE"]),
        (["convert", "rfat"], ["unknown model 'rfat'", "did you mean raft?", "raft_small"]),
        (["convert", "none.pt"], ["source none.pt: no such file"]),
        (["convert", "folder/none.py"], ["source folder/none.py: no such file"]),
        (["convert", "resnet"], ["unknown model 'resnet'", "known: linear, llama, raft"]),
        (["convert", "raft", "--target", "rtx-9"], ["unknown target 'rtx-9'", *TARGETS]),
        (["convert", "raft", "--what"], ["--what", "Run `pipeline convert --help`"]),
        (["convert", "raft", "--precison", "fp16"], ["did you mean --precision?"]),
        (["convert", "raft", "--option", "updates"], ["--option 'updates' is not NAME=VALUE"]),
        (["convert", "raft", "--option", "steps=3"], ["no option 'steps'", "updates"]),
        (["convert", "raft", "--option", "updates=many"], ["updates='many'", "int"]),
        (["convert", "raft", "--option", "updates=true"], ["updates=True", "int"]),
        (["convert", "raft", "--option", "updates=0"], ["updates=0", "at least 1"]),
        (["convert", "raft", "--profile", "h=500:440:300"], ["h", "min=500 is greater than 300"]),
        (["convert", "raft", "--profile", "h=135:130:300"], ["opt=130 is outside 135..300"]),
        (["convert", "raft", "--profile", "h=135:440:5000"], ["h=5000", "2160"]),
        (["convert", "raft", "--profile", "h=135:440"], ["DIM=MIN:OPT:MAX"]),
        (["convert", "raft", "--profile", "d=1:2:3"], ["no dim 'd'", "h, w"]),
        (["convert", "raft", "--profile", ""], ["DIM=MIN:OPT:MAX"]),
        (["convert", "raft", "--shape", "h=130"], ["h=130", "135"]),
        (["convert", "raft", "--shape", "h=440,w=9999"], ["w=9999", "3840"]),
        (["convert", "raft", "--shape", "h"], ["DIM=SIZE"]),
        (["convert", "raft", "--shape", "d=4"], ["no dim 'd'"]),
        (
            ["convert", "raft", "--memory-limit", "lots"],
            ["'lots' is not a size; write for example 16GiB"],
        ),
        (["convert", "raft", "--memory-limit", "nan"], ["'nan' is not a size"]),
        (["convert", "raft", "--memory-limit", "infGB"], ["'infGB' is not a size"]),
        (["convert", "raft", "--memory-limit", "0"], ["'0' is not positive"]),
        (["convert", "raft", "--memory-limit", "16BiG"], ["is not a size"]),
        (["convert", "raft", "--seed", "x"], ["--seed"]),
        (["convert", "raft", "--seed", "-1"], ["seed -1"]),
        (["convert", "raft", "--precision", "int8"], ["int8", "fp32", "tf32", "fp16"]),
        (["convert", "raft", "--weights", "none.pth"], ["weights none.pth: no such file"]),
        (["export", "raft", "--weights", "none.pth"], ["weights none.pth: no such file"]),
        (["rewrite", "none"], ["none", "no such folder"]),
        (["build", "none"], ["none", "no such folder"]),
        (["verify", "none"], ["none", "no such folder"]),
        (["inspect", "none"], ["none", "no such folder"]),
        (["inspect", "."], ["it has no manifest.json"]),
    ],
)
def test_bad_input(cli: Run, tmp_path: Path, words: list[str], parts: list[str]) -> None:
    refused(cli(*words), *parts)
    assert files_under(tmp_path) == []


@pytest.mark.parametrize("name", ["tensorrt-8.6", "tensorrt-10", "tensorrt-11"])
def test_target_that_is_not_installed(cli: Run, tmp_path: Path, name: str) -> None:
    if installed_version(TARGETS[name]):
        pytest.skip("a TensorRT is installed here")
    refused(cli("convert", "raft", "--target", name), f"target {name}", TARGETS[name].get)
    assert files_under(tmp_path) == []


def test_weights_that_are_no_good(cli: Run, tmp_path: Path) -> None:
    import torch

    (tmp_path / "cut.pth").write_bytes(b"PK\x03\x04 cut short")
    (tmp_path / "text.safetensors").write_text("hello")
    (tmp_path / "w.npz").write_bytes(b"")
    torch.save({"conv.weight": torch.zeros(1), "fc.bias": torch.zeros(2)}, tmp_path / "other.pth")
    before = files_under(tmp_path)
    place = ("--out", tmp_path / "a", "--weights")
    refused(cli_quiet(cli, "convert", "tiny", *place, "cut.pth"), "weights cut.pth: damaged")
    refused(cli_quiet(cli, "convert", "tiny", *place, "text.safetensors"), "damaged, or not safet")
    refused(cli_quiet(cli, "convert", "tiny", *place, "w.npz"), "unknown kind; use .pth")
    refused(
        cli_quiet(cli, "export", "tiny", *place, "other.pth"),
        "other.pth are for another model",
        "missing keys: conv.bias",
        "unexpected keys: fc.bias",
        "conv.weight (1,) instead of (4, 3, 3, 3)",
    )
    assert files_under(tmp_path) == before


def test_weights_for_the_shipped_model(cli: Run, tmp_path: Path) -> None:
    import torch

    torch.save({"conv.weight": torch.zeros(1)}, tmp_path / "w.pth")
    result = cli_quiet(cli, "convert", "raft_small", "--weights", "w.pth")
    refused(result, "w.pth are for another model", "missing keys", "unexpected keys: conv.weight")


def cli_quiet(cli: Run, *words: object) -> tuple[int, str, str]:
    """Leaves the progress out of stderr."""
    code, output, errors = cli(*words)
    lines = [line for line in errors.splitlines(keepends=True) if not line.startswith("[")]
    return code, output, "".join(lines)


def spoil_cut(folder: Path) -> None:
    path = folder / "engine.plan"
    path.write_bytes(path.read_bytes()[:-7])


def spoil_bytes(folder: Path) -> None:
    path = folder / "model.onnx"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def spoil_missing(folder: Path) -> None:
    (folder / "exported.onnx").unlink()


def spoil_manifest(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace('"engine_compared": false', '"engine_compared": true'))


def spoil_half_manifest(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_text(path.read_text()[:300])


SPOILT: list[tuple[Callable[[Path], None], str]] = [
    (spoil_cut, "engine.plan: is cut short"),
    (spoil_bytes, "model.onnx: its content was changed"),
    (spoil_missing, "exported.onnx: is missing"),
    (spoil_manifest, "was changed after it was written"),
    (spoil_half_manifest, "is cut short or not JSON"),
]


@pytest.mark.parametrize(
    ("verb", "spoil", "part"),
    [
        (verb, spoil, part)
        for verb in ("inspect", "verify", "build", "rewrite")
        for spoil, part in SPOILT
        if (verb, spoil) != ("build", spoil_cut)  # tests/convert/test_reuse.py tests the repair
    ],
)
def test_artifact_that_is_not_what_it_says(
    cli: Run, artifact: Path, verb: str, spoil: Callable[[Path], None], part: str
) -> None:
    spoil(artifact)
    before = {name: (artifact / name).stat().st_mtime_ns for name in files_under(artifact)}
    refused(
        cli(verb, artifact),
        part,
        "copy it again, or `pipeline build" if spoil is spoil_cut else "convert again",
    )
    after = {name: (artifact / name).stat().st_mtime_ns for name in files_under(artifact)}
    assert after == before
    assert files_under(artifact.parent)[0] == artifact.name


def test_place_that_is_not_ours(cli: Run, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("text")
    refused(cli("convert", "tiny", "--out", "mine"), "mine: has files but no manifest.json")
    (tmp_path / "file").write_text("text")
    refused(cli("convert", "tiny", "--out", "file"), "file")
    assert files_under(tmp_path) == ["file", "mine", "mine/thesis.txt"]


# The imports come first, because another user may not be able to read Python's folder.
AS_NOBODY = """
import os, sys, pipeline.commands.main, pipeline.convert.driver, tiny
if os.geteuid() == 0:
    os.setgroups([]), os.setgid(65534), os.setuid(65534)
tiny.main()
"""


def test_no_write_permission() -> None:
    # another user can't enter pytest's temporary folders
    with tempfile.TemporaryDirectory() as name:
        locked = Path(name)
        locked.chmod(0o555)
        done = subprocess.run(
            [sys.executable, "-c", AS_NOBODY, "convert", "tiny", "--out", str(locked / "a")],
            env={**os.environ, "PYTHONPATH": f"{HERE.parent}{os.pathsep}{HERE}"},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        result = (done.returncode, done.stdout, done.stderr)
        refused(result, f"{locked / 'a'}: can't be written: Permission denied")
        assert files_under(locked) == []
        locked.chmod(0o755)


def test_an_option_of_your_factory(cli: Run, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "import torch\n"
        "def net(deep: bool = True, share=0.5):\n"
        "    assert deep is False\n"
        "    return torch.nn.ReLU()\n"
    )
    words = ("check", f"{tmp_path}/own.py:net", "--input", "input:{b}x3", "--dim", "b=1:4")
    refused(cli(*words, "--option", "deep=no"), "option deep='no' is text", "true or false")
    refused(cli(*words, "--option", "share=half"), "takes a number")
    for value in ("False", "false"):
        code, _, errors = cli(*words, "--option", f"deep={value}")
        assert code == 0, errors
