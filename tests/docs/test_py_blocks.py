"""Runs each `py` block of README, docs/guide and docs/reference, which is a part of a program.

`given` has the names that a block leaves out. A GPU and its engine are stand-ins. They have the
real signatures and attributes, and the names and sizes of `raft`. No number comes from an engine.
"""

from __future__ import annotations

import inspect
import re
import shutil
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import EllipsisType, ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import Mock, create_autospec

import numpy as np
import prometheus_client
import pytest
import torch
from docs_blocks import BLOCKS, Block

import pipeline
from pipeline.convert.report import Report
from pipeline.runtime.metrics import Counters
from pipeline.runtime.sizes import EngineSizes
from pipeline.source.zoo import find_spec
from pipeline.spec.dims import shape_at

PARTS = [block for block in BLOCKS if block.language == "py"]
IMAGE = np.zeros((1, 3, 440, 1024), np.float32)
SPEECH = {"audio": np.zeros((2, 100), np.float32), "lengths": np.array([100, 60])}


def pretended_engine() -> Any:
    """An engine of raft that returns zeros. It checks names and sizes as the real one does."""
    sizes = EngineSizes(find_spec("raft", {}).interface)
    engine = create_autospec(pipeline.Engine, instance=True)

    def run(
        inputs: Mapping[str, Any] | None = None,
        /,
        *,
        stream: Any = None,
        out: Mapping[str, Any] | None = None,
        **named: Any,
    ) -> dict[str, Any]:
        del stream
        given = {**(inputs or {}), **named}
        at = sizes.check(sizes.solve({name: array.shape for name, array in given.items()}))
        shapes = sizes.interface.output_shapes.items()
        made = {name: np.zeros(shape_at(shape, at), np.float32) for name, shape in shapes}
        assert (out or {}).keys() <= made.keys()
        return made

    engine.side_effect = run
    engine.capture.side_effect = sizes.check
    engine.__enter__.return_value = engine
    counters, memory = Counters(sizes.interface, {}), {"weights": 1, "buffers": 2}
    engine.metrics.side_effect = lambda: counters.read(memory, 0)
    return engine


def pretended_package(engine: Any) -> ModuleType:
    """The package with stand-ins of what needs a GPU. Its `ModelSpec` takes `...` for the rest."""
    package = ModuleType("pipeline")
    for name in pipeline.__all__:
        setattr(package, name, getattr(pipeline, name))

    def spec(first: EllipsisType, **fields: Any) -> pipeline.ModelSpec:
        assert first is ...
        model = "llama" if any("past" in rule for rule in fields.get("rules", ())) else "raft"
        return replace(find_spec(model, {}), **fields)

    def convert(module: Any, inputs: Any = None, dims: Any = None, **options: Any) -> None:
        inspect.signature(pipeline.convert.__call__).bind(module, inputs, dims, **options)
        options.pop("name", None)
        pipeline.Config("raft", **options)

    package.load = create_autospec(pipeline.load, return_value=engine)  # type: ignore[attr-defined]
    package.refit = create_autospec(pipeline.refit)  # type: ignore[attr-defined]
    package.ModelSpec = spec  # type: ignore[attr-defined]
    package.convert = convert  # type: ignore[attr-defined]
    return package


def given(package: Any, engine: Any) -> dict[str, Any]:
    """The names that a block may use without making them."""
    return {
        "__name__": "block", "np": np, "torch": torch, "pipeline": package, "engine": engine,
        "engines": {"raft": engine},
        "image1": IMAGE, "image2": IMAGE, "a": IMAGE, "b": IMAGE, "buffer": IMAGE[:, :2],
        "module": torch.nn.Identity(), "inputs": {}, "dims": {},
        "node": SimpleNamespace(name="a node", op="Loop"),
        "Change": sys.modules["pipeline.passes"].Change,
        "PassResult": sys.modules["pipeline.passes"].PassResult,
        "ModelSpec": package.ModelSpec, "Tolerance": pipeline.Tolerance,
        "audio": torch.as_tensor(SPEECH["audio"]), "lengths": torch.as_tensor(SPEECH["lengths"]),
    }  # fmt: skip


@pytest.mark.parametrize("block", PARTS, ids=str)
def test_a_part_of_a_program_runs(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, request: Any
) -> None:
    engine = pretended_engine()
    package = pretended_package(engine)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(prometheus_client, "start_http_server", Mock())  # it takes a port
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Mock(spec=torch.cuda.Stream))
    if "artifacts/linear" in block.text:
        converted: Report = request.getfixturevalue("converted")
        shutil.copytree(converted.path, "artifacts/linear")
    text = block.text
    if text.startswith("return "):
        text = f"def run():\n{textwrap.indent(text, '    ')}\nresult = run()"
    names = given(package, engine)
    code = compile(text, str(block), "exec")
    if "import pipeline\n" in text:
        monkeypatch.setitem(sys.modules, "pipeline", package)
    exec(code, names)
    monkeypatch.undo()
    printed = capsys.readouterr().out.splitlines()
    for shown in re.findall(r"print\(.*\)  # (.*)", text):
        assert shown in printed, f"{block}: {shown}"
    if "savez" in text:
        for name, array in np.load(tmp_path / "sample.npz").items():
            assert np.array_equal(array, SPEECH[name])
        assert torch.load(tmp_path / "sample.pt").keys() == SPEECH.keys()
