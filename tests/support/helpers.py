"""Helpers that change artifacts, and that run the command line in a child process."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from pipeline.artifact.artifact import Artifact, finish
from pipeline.artifact.manifest import Manifest
from pipeline.spec.tensors import Feed, Precision

HERE = Path(__file__).resolve().parent
Run = Callable[..., tuple[int, str, str]]  # the `cli` fixture


@dataclasses.dataclass(frozen=True)
class FeedRunner:
    """A runner from a function of one feed; see `pipeline.spec.runner.Runner`."""

    name: str
    function: Callable[[Feed], Feed]
    precision: Precision = "fp32"

    def run(self, feeds: Iterable[Feed]) -> Iterator[Feed]:
        """The function's outputs, feed by feed."""
        return map(self.function, feeds)


def refinish(folder: Path, **changes: object) -> Manifest:
    """Writes the manifest again after files were changed. Can also change fields."""
    manifest = Artifact.open(folder, check=False).manifest
    return finish(folder, dataclasses.replace(manifest, **changes))  # type: ignore[arg-type]


def rehash(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes a manifest and makes its hash fit again, as anybody can who knows the format."""
    content = json.loads(path.read_bytes())
    del content["manifest_sha256"]
    change(content)
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    content["manifest_sha256"] = hashlib.sha256(text.encode()).hexdigest()
    path.write_text(json.dumps(content, indent=2))


def redeclare(folder: Path, **changes: object) -> Manifest:
    """Changes parts of the interface in a manifest, and writes the manifest again."""
    interface = Artifact.open(folder, check=False).manifest.interface
    return refinish(folder, interface=dataclasses.replace(interface, **changes))  # type: ignore[arg-type]


def perturb(folder: Path, by: float = 0.05, name: str = "model.onnx") -> None:
    """Adds to the weights of a model in an artifact, and writes the manifest again."""
    model = onnx.load(folder / name)
    weights = next(
        t
        for t in model.graph.initializer
        if t.data_type == onnx.TensorProto.FLOAT and len(t.dims) == 4
    )
    values = numpy_helper.to_array(weights) + np.float32(by)
    weights.CopyFrom(numpy_helper.from_array(values, weights.name))
    onnx.save(model, folder / name)
    refinish(folder)


def command(*words: object, **how: object) -> subprocess.Popen[str]:
    """Starts the command line with the tiny specs in a child process."""
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1])}
    line = [sys.executable, str(HERE / "tiny.py"), *map(str, words)]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **how}
    return subprocess.Popen(line, text=True, env=environment, **options)  # type: ignore[call-overload, no-any-return]


def let_children_heed_signals() -> None:
    """Starts children with no signal ignored, although this process ignores some.

    A shell starts a job in the background with Ctrl-C ignored (`make test &`), and nohup ignores
    SIGHUP. A handler that does nothing still ignores them here, but a new program does not inherit
    it.
    """
    for number in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, lambda *_: None)


def files_under(folder: Path) -> list[str]:
    """All files in a folder, for a check that nothing was written."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def refused(result: tuple[int, str, str], *parts: str) -> None:
    """Checks exit code 2, one line on stderr with all `parts`, and nothing on stdout.

    A new process may say before it that libraries load.
    """
    code, output, errors = result
    errors = re.sub(r"\A\[ *[\d.]+ s\] load libraries\n", "", errors)
    assert code == 2, errors
    assert output == ""
    assert errors.endswith("\n")
    assert errors.count("\n") == 1
    assert errors.startswith("error: ")
    for part in parts:
        assert part in errors, errors


def refused_late(result: tuple[int, str, str], *parts: str) -> None:
    """As `refused`, for a command that prints its steps to stderr before the error."""
    code, output, errors = result
    steps = [line for line in errors.splitlines(keepends=True) if line.startswith("[")]
    refused((code, output, errors.removeprefix("".join(steps))), *parts)
