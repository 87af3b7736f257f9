"""The comparison of another engine of the same model takes over what the model gave."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from helpers import files_under, perturb
from onnx import numpy_helper

from pipeline.artifact.artifact import Artifact
from pipeline.artifact.manifest import ComparisonInfo
from pipeline.compare.half_runner import HalfRunner
from pipeline.compare.memory import Memory, once
from pipeline.compare.plan import CompareOptions
from pipeline.convert.driver import compare_again
from pipeline.spec.recipe import all_but


def compared(place: Path, memory: Memory | None) -> tuple[ComparisonInfo, set[str]]:
    """The new comparison, and the runs that were made at planned sizes."""
    said: list[str] = []
    artifact = Artifact.open(place, check=False)
    options = CompareOptions(memory=memory)
    manifest = compare_again(artifact, artifact.manifest, None, options, said.append)
    assert manifest.comparison is not None
    return manifest.comparison, {text.split(" at ")[0] for text in said if " at " in text}


@pytest.fixture
def copies(artifact: Path, tmp_path: Path) -> Callable[[str], Path]:
    return lambda name: Path(shutil.copytree(artifact, tmp_path / name))


def test_equal_files_run_once(copies: Callable[[str], Path]) -> None:
    alone, ran = compared(copies("alone"), None)
    assert ran == {"exported"}  # no pass changes this model
    memory: Memory = {}
    assert compared(copies("first"), memory)[1] == ran
    second = copies("second")
    again, none = compared(second, memory)
    assert not none
    assert again == alone
    assert again.passed
    assert files_under(second / "comparison") == files_under(copies("third") / "comparison")


def test_a_changed_model_runs_again_and_fails(copies: Callable[[str], Path]) -> None:
    memory: Memory = {}
    assert compared(copies("first"), memory)[0].passed
    wrong = copies("second")
    perturb(wrong)
    comparison, ran = compared(wrong, memory)
    assert ran == {"rewritten"}
    assert not comparison.passed


def calls_of(model: Path, memory: Memory, *values: object) -> int:
    """How often `once` calls for a result: 0 or 1."""
    calls: list[int] = []
    once(memory, lambda: calls.append(1), model, *values)
    return len(calls)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A file whose weights are beside it."""
    weights = numpy_helper.from_array(np.arange(2000, dtype=np.float32), "w")
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Add", ["x", "w"], ["y"])], "g",
        [onnx.helper.make_tensor_value_info("x", 1, [2000])],
        [onnx.helper.make_tensor_value_info("y", 1, [2000])], [weights],
    )  # fmt: skip
    path = tmp_path / "model.onnx"
    onnx.save(
        onnx.helper.make_model(graph), path, save_as_external_data=True, location="model.data",
        size_threshold=0,
    )  # fmt: skip
    return path


def test_weights_beside_the_file_count(model: Path) -> None:
    memory: Memory = {}
    assert calls_of(model, memory) == 1
    assert calls_of(model, memory) == 0
    data = bytearray((model.parent / "model.data").read_bytes())
    data[4000] ^= 1
    (model.parent / "model.data").write_bytes(data)
    assert calls_of(model, memory) == 1


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (np.zeros(5000), np.eye(1, 5000, 2500).ravel()),  # differ in the middle, which repr hides
        (np.zeros((2, 3)), np.zeros((3, 2))),
        (np.zeros(2, np.float32), np.zeros(1, np.float64)),
        ([{"a": np.ones(1)}], [{"b": np.ones(1)}]),
        (["a", "b"], ["a", ["b"]]),
        (["ab"], ["a", "b"]),
    ],
)
def test_every_value_counts(model: Path, one: Any, other: Any) -> None:
    memory: Memory = {}
    assert [calls_of(model, memory, each) for each in (one, other, one, other)] == [1, 1, 0, 0]


def test_the_precision_and_the_recipe_count(model: Path) -> None:
    memory: Memory = {}
    half = HalfRunner(Path(), "fp16", True)
    ways = [
        half, replace(half, precision="bf16"), replace(half, recipe=all_but("fp16", [])),
        replace(half, recipe=all_but("fp16", ["net.norm"])), replace(half, plain=False),
    ]  # fmt: skip
    assert [calls_of(model, memory, way) for way in ways] == [1] * len(ways)
    assert [calls_of(model, memory, way) for way in ways] == [0] * len(ways)
