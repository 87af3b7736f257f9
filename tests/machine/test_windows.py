"""pipeline on Linux, with what Windows lacks taken away: see `support/windows/sitecustomize.py`.

This is not Windows. It shows that nothing asks for a missing module, constant or function.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from importlib.util import find_spec
from pathlib import Path

import onnx
import onnx.parser
import pytest
from helpers import HERE
from test_child import alive

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="imitates Windows on Linux")
ROOT = HERE.parents[1]
NET = """<ir_version: 8, opset_import: ["" : 17]>
net (float[b, 4] x) => (float[b, 8] y) { t = Tanh(x)  y = Concat<axis = 1>(t, x) }"""
CONVERT = ("convert", "net.onnx", "--dim", "b=1:2:5")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tmp").mkdir()
    onnx.save(onnx.parser.parse_model(NET), tmp_path / "net.onnx")
    return tmp_path


def run(folder: Path, *words: str, imitate: bool = True) -> subprocess.CompletedProcess[str]:
    """Runs Python in the folder. Text files need an encoding, and stdout has one of Windows."""
    parts = [HERE / "windows", ROOT] if imitate else [ROOT]
    variables = {
        "PYTHONPATH": os.pathsep.join(map(str, parts)),
        "PYTHONWARNDEFAULTENCODING": "1",
        "PYTHONWARNINGS": "ignore",
        "PYTHONIOENCODING": "cp1252",
        "TMPDIR": str(folder / "tmp"),
    }
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env={**os.environ, **variables},
        capture_output=True, text=True, encoding="cp1252", check=False,
    )  # fmt: skip


def succeed(folder: Path, *words: str, imitate: bool = True) -> str:
    done = run(folder, *words, imitate=imitate)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def python(folder: Path, code: str) -> str:
    """Runs code as a module of the package, so that it sees what the package sees."""
    text = f"exec({textwrap.dedent(code)!r}, {{'__name__': 'pipeline.__test__'}})"
    return succeed(folder, "-c", text)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_the_imitation_takes_parts_away(folder: Path) -> None:
    code = """
    import os, signal, sys
    from pathlib import Path
    assert (os.name, sys.platform) == ("nt", "win32")
    assert not hasattr(os, "O_NOFOLLOW") and not hasattr(signal, "SIGKILL")
    for name in ("fcntl", "resource", "pwd", "grp", "termios"):
        try:
            __import__(name, globals())
        except ImportError:
            continue
        raise AssertionError(name)
    with open("one", "w", encoding="utf-8"):
        try:
            Path("one").unlink()
        except PermissionError:
            print("refused")
    try:
        open("one")
    except EncodingWarning:
        print("no encoding")
    """
    if sys.version_info >= (3, 11):
        assert python(folder, code) == "refused\nno encoding\n"


def test_every_module_is_imported(folder: Path) -> None:
    if not (find_spec("torchvision") and find_spec("transformers")):
        pytest.skip("the models that come with pipeline need torchvision and transformers")
    code = """
    import importlib, pkgutil
    import pipeline
    from pipeline.machine.libraries import import_torchvision
    import_torchvision()
    found = [m.name for m in pkgutil.walk_packages(pipeline.__path__, "pipeline.")]
    for name in found:
        if not name.endswith("__main__"):
            importlib.import_module(name)
    print(len(found))
    """
    assert int(python(folder, code)) > 250


def test_an_onnx_file_is_converted_to_the_same_files(folder: Path) -> None:
    pytest.importorskip("tensorrt_rtx")
    succeed(folder, "-m", "pipeline", *CONVERT, "--out", "here")
    succeed(folder, "-m", "pipeline", *CONVERT, "--out", "there", imitate=False)
    for name in ("model.onnx", "exported.onnx", "engine.plan", "reproduce.sh"):
        assert (folder / "here" / name).read_bytes() == (folder / "there" / name).read_bytes()
    for words, said in (
        ((*CONVERT, "--out", "here"), "Nothing changed"),
        ((*CONVERT[:-1], "b=1:2:6", "--out", "here"), "b in 1..6"),  # replaces the folder
        (("verify", "here"), "each row is independent"),
        (("inspect", "here"), "each row is independent"),
        (("build", "here"), "engine:"),
        (("report", "here", "--out", "page.html"), "page.html"),
        (("check", *CONVERT[1:]), "No findings block a conversion"),
        (("rewrite", "net.onnx", "--out", "rewritten.onnx"), "no rewrite was needed"),
    ):
        assert said in succeed(folder, "-m", "pipeline", *words), words
    left = {"net.onnx", "tmp", "here", "there", "page.html", "rewritten.onnx"}
    assert names(folder) == left
    assert names(folder / "tmp") == set()


@pytest.mark.slow
def test_a_torch_model_is_converted(folder: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("tensorrt_rtx")
    assert "converted: linear" in succeed(folder, "-m", "pipeline", "convert", "linear")
    assert names(folder / "tmp") == set()


def test_the_command_line_and_python_read_an_artifact(folder: Path) -> None:
    succeed(folder, "-m", "pipeline", *CONVERT, "--out", "a", imitate=False)
    assert "usage: pipeline" in succeed(folder, "-m", "pipeline", "--help")
    code = """
    from pathlib import Path
    import pipeline
    print(pipeline.Artifact.open(Path("a")).manifest.name)
    try:
        pipeline.load("a")
    except pipeline.PipelineError as error:
        print(error)
    """
    said = python(folder, code)
    assert said.startswith("net\n")
    assert said == succeed(folder, "-c", textwrap.dedent(code), imitate=False)


def test_a_folder_with_an_open_file_stays_as_it_was(folder: Path) -> None:
    code = """
    from pathlib import Path
    from pipeline.errors import InputError
    from pipeline.machine.files import fresh
    from pipeline.machine.swap_folder import replacing

    def write(text):
        with replacing(Path("a"), keep=True) as staging:
            fresh(staging / "manifest.json").write_text(text, encoding="utf-8")
    Path("a").mkdir()
    write("one")
    with open("a/manifest.json", encoding="utf-8"):
        try:
            write("two")
        except InputError as error:
            print(error)
    print(Path("a/manifest.json").read_text(encoding="utf-8"))
    write("three")
    print(Path("a/manifest.json").read_text(encoding="utf-8"))
    """
    refused, before, after = python(folder, code).splitlines()
    assert refused.startswith("a: can't be written: ")
    assert (before, after) == ("one", "three")
    assert names(folder) == {"a", "net.onnx", "tmp"}


def test_a_child_answers_and_dies(folder: Path) -> None:
    code = """
    import math, os
    from pipeline.machine.child import Child, ChildDied
    with Child(time_limit=20) as child:
        print(child.call(math.hypot, 3, 4))
        try:
            child.call(os._exit, 3)
        except ChildDied as died:
            print(died.how)
        print(child.call(math.hypot, 3, 4))
    """
    assert python(folder, code).splitlines() == ["5.0", "exit code 3", "5.0"]


def test_a_child_ends_with_its_parent_in_a_call(folder: Path) -> None:
    """Without prctl, which only Linux has."""
    code = """
    import os, threading, time
    from pipeline.machine.child import Child
    child = Child()
    print(child.call(os.getpid), flush=True)
    threading.Timer(0.5, os._exit, [0]).start()
    child.call(time.sleep, 60)
    """
    pid = int(python(folder, code))
    end = time.monotonic() + 10
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.02)
    assert not alive(pid)
