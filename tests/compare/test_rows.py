"""Batch rows that are independent, rows that must be independent, and rows that may depend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
import tiny
from helpers import FeedRunner

from pipeline.artifact.manifest import PointInfo
from pipeline.compare import rows as batch_rows
from pipeline.compare.rows import Batch, RowSizes, cheap_sizes, check_models, check_rows, find_batch
from pipeline.compare.runners import TorchRunner
from pipeline.convert.driver import run
from pipeline.graph.session import OnnxRunner
from pipeline.spec.config import Config
from pipeline.spec.dims import Dim, Size, read_size
from pipeline.spec.findings import note
from pipeline.spec.interface import Interface
from pipeline.spec.model import Input, ModelSpec, Output, Tolerance
from pipeline.spec.tensors import Feed
from pipeline.spec.verdicts import ROW_CHANGES, RowChangeKind

B = Dim("b", 1, 4, 8)
S = Dim("s", 1, 4, 16)
X = Input("x", (B, 4))


def declared(*outputs: str, rules: tuple[str, ...] = ()) -> Interface:
    """X, and outputs of its shape."""
    return Interface((X,), tuple(Output(name, (B, 4)) for name in outputs), rules)


TOLERANCE = {"y": Tolerance(1e-4, 1e-5, "test"), "z": Tolerance(1e-4, 1e-5, "test")}
SAME: RowChangeKind = "same-sample"
OTHERS: RowChangeKind = "other-samples"
PLACE: RowChangeKind = "position"
SIZE: RowChangeKind = "batch-size"
# what a graph does with x [b, 4] -> the findings
GRAPHS: dict[str, set[RowChangeKind]] = {
    "y = Tanh(x)": set(),
    "m = ReduceMean<axes=[0], keepdims=1>(x)  y = Sub(x, m)": {OTHERS, SIZE},
    "y = CumSum(x, scalar)": {SAME, PLACE},
    "y = Mul(x, rows)": {SIZE},
    "r = Range(start, rows, step)  c = Unsqueeze(r, axes)  y = Add(x, c)": {SAME, PLACE},
    "m = ReduceMean<axes=[0], keepdims=1>(x)  c = CumSum(x, scalar)  y = Sub(c, m)": {
        SAME, OTHERS, PLACE, SIZE,
    },
}  # fmt: skip


def graph(text: str) -> onnx.ModelProto:
    made: onnx.ModelProto = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["" : 17]>
        g (float[b,4] x) => (float[b,4] y)
        <float start = {{0.0}}, float step = {{1.0}},
         int64[1] axes = {{1}}, int64 scalar = {{0}}>
        {{ whole = Shape(x)  count = Gather(whole, scalar)  rows = Cast<to=1>(count)  {text} }}"""
    )
    return made


@pytest.mark.parametrize("text", GRAPHS)
def test_what_is_found(tmp_path: Path, text: str) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(graph(text), path)
    batch = find_batch(declared("y"))
    assert batch is not None
    found = check_rows(OnnxRunner(path, "exported"), batch, RowSizes({"b": 4}, 2), TOLERANCE)
    assert set(found.against) == {(part, "y") for part in GRAPHS[text]}
    assert found.info.passed is (not GRAPHS[text])
    assert (found.info.name, found.info.run, found.info.sizes) == (
        "batch rows", "exported", {"b": 4},
    )  # fmt: skip
    if not GRAPHS[text]:
        assert found.info.kind == "rows-independent"
        assert found.info.text == "each row is independent of the others"
    else:
        assert found.info.kind == "rows-depend"
        assert {row.kind for row in found.info.rows} == GRAPHS[text]
        for part in GRAPHS[text]:
            assert f"{ROW_CHANGES[part]}: y by up to " in found.info.text


def test_rows_of_nan_stand_for_themselves() -> None:
    """The sign of a NaN, and so its bits, depend on how ONNX Runtime computes it."""
    batch = find_batch(declared("y"))
    assert batch is not None

    def nans(feed: Feed) -> Feed:
        signs = (-1.0) ** np.arange(len(feed["x"]))
        return {"y": np.copysign(np.full_like(feed["x"], np.nan), signs[:, None])}

    found = check_rows(FeedRunner("exported", nans), batch, RowSizes({"b": 4}, 2), TOLERANCE)
    assert (found.info.passed, found.info.kind) == (True, "rows-independent")


def test_a_run_that_fails_is_a_fault(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(graph("shape = Constant<value_ints=[1, 4]>()  y = Reshape(x, shape)"), path)
    batch = find_batch(declared("y"))
    assert batch is not None
    info = check_rows(
        OnnxRunner(path, "rewritten"), batch, RowSizes({"b": 4}, None), TOLERANCE
    ).info
    assert not info.passed
    assert info.kind == "run-failed" and info.text.startswith("fails: ")
    assert "\n" not in info.text


@pytest.mark.parametrize(
    ("inputs", "outputs", "rows"),
    [
        ([X], {"y": ("b", 4)}, {"x", "y"}),
        ([X, Input("mask", (S, S))], {"y": ("b", 4)}, {"x", "y"}),
        ([X], {"y": ("b", 4), "loss": ()}, {"x", "y"}),
        ([Input("x", (2, B))], {"y": ("b", 4)}, None),  # the batch is not the first axis
        ([X, Input("past", (2, B, S))], {"y": ("b", 4)}, None),  # not of every tensor
        ([X], {"y": ("2*b", 4)}, None),
        ([X], {"y": ("b", "b")}, None),
        ([X], {"y": (4,)}, None),  # no output has rows
        ([Input("x", (1, 3, B))], {"y": (1, "b")}, None),
        ([Input("x", (S, B)), Input("m", (B,))], {"y": ("b", "s")}, None),
        # nodes of a graph: the edges are positions of rows
        ([X, Input("edges", (2, S), "int64", 0, B - 1)], {"y": ("b", 4)}, None),
        ([X, Input("scale", (B,), "float32", 0, B)], {"y": ("b", 4)}, {"x", "scale", "y"}),
        ([X, Input("n", (B,), "int64", 1, S)], {"y": ("b", 4)}, {"x", "n", "y"}),
    ],
)
def test_which_dim_counts_the_rows(
    inputs: list[Input], outputs: dict[str, tuple[Size | str, ...]], rows: set[str] | None
) -> None:
    dims = {"b": B, "s": S}
    found = tuple(
        Output(name, tuple(read_size(size, dims) for size in shape))
        for name, shape in outputs.items()
    )
    batch = find_batch(Interface(tuple(inputs), found))
    assert (batch.rows if batch else None) == rows
    assert batch is None or batch.dim == B


@pytest.mark.parametrize(
    ("low", "near", "high", "found"),
    [
        (1, 4, 8, (4, 1)),
        (1, 1, 8, (2, 1)),
        (0, 0, 8, (2, 1)),
        (2, 2, 8, (3, 2)),
        (4, 4, 4, (4, None)),
        (1, 1, 1, None),
    ],
)
def test_how_many_rows(low: int, near: int, high: int, found: Any) -> None:
    batch = Batch(B, declared("y"), frozenset({"x", "y"}))
    got = batch.at({"b": 1, "s": 3}, low, near, high)
    assert got == (None if found is None else ({"b": found[0], "s": 3}, found[1]))


def test_rows_keep_the_rules() -> None:
    batch = Batch(B, declared(rules=("b*s <= 12",)), frozenset({"x"}))
    assert batch.at({"b": 1, "s": 3}, 1, 4, 8) == ({"b": 4, "s": 3}, 1)
    assert batch.at({"b": 1, "s": 4}, 1, 4, 8) == ({"b": 2, "s": 4}, 1)
    assert batch.at({"b": 1, "s": 12}, 1, 4, 8) is None
    six = Batch(Dim("b", 6, 6, 18, multiple_of=6), declared(), frozenset({"x"}))
    assert six.at({"b": 6}, 6, 6, 18) == ({"b": 12}, 6)


def test_the_cheapest_sizes_within_the_memory() -> None:
    batch = Batch(B, declared(), frozenset({"x"}))
    points = [
        PointInfo("opt", {"b": 4, "s": 4}, 400),
        PointInfo("min", {"b": 1, "s": 1}, 50),
        PointInfo("tiny", {"b": 1, "s": 0}, 1, (), note("not-stored", run="torch")),
    ]
    assert cheap_sizes(batch, points, 100) == ({"b": 2, "s": 1}, 1)
    assert cheap_sizes(batch, points, 99) is None


def models(tmp_path: Path, **texts: str) -> list[OnnxRunner]:
    for name, text in texts.items():
        onnx.save(graph(text), tmp_path / f"{name}.onnx")
    return [OnnxRunner(tmp_path / f"{name}.onnx", name) for name in texts]


PLAIN, MEAN, *_, BOTH = GRAPHS


@pytest.mark.parametrize("with_torch", [False, True])
def test_what_the_model_means_is_told_and_no_fault(tmp_path: Path, with_torch: bool) -> None:
    import torch

    class Mean(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x - x.mean(0, keepdim=True)

    batch = find_batch(declared("y"))
    assert batch is not None
    judge = TorchRunner(Mean(), ["y"]) if with_torch else None
    runs = models(tmp_path, exported=MEAN, rewritten=MEAN)
    checks, forgiven = check_models(batch, RowSizes({"b": 2}, 1), runs, judge, TOLERANCE)
    assert [check.run for check in checks] == ["exported", "rewritten"]
    assert all(check.passed for check in checks)
    assert all(check.kind == "rows-as-in-model" for check in checks)
    start = f"as in the model: {ROW_CHANGES[OTHERS]}: y"
    assert all(check.text.startswith(start) for check in checks)
    assert forgiven == {(OTHERS, "y"), (SIZE, "y")}


def test_torch_goes_before_what_was_exported(tmp_path: Path) -> None:
    import torch

    batch = find_batch(declared("y"))
    assert batch is not None
    judge = TorchRunner(torch.nn.Tanh(), ["y"])
    runs = models(tmp_path, exported=MEAN, rewritten=MEAN)
    checks, forgiven = check_models(batch, RowSizes({"b": 2}, 1), runs, judge, TOLERANCE)
    assert not any(check.passed for check in checks)
    assert not forgiven


def test_a_rewrite_that_mixes_rows(tmp_path: Path) -> None:
    batch = find_batch(declared("y"))
    assert batch is not None
    runs = models(tmp_path, exported=PLAIN, rewritten=MEAN)
    (exported, rewritten), forgiven = check_models(
        batch, RowSizes({"b": 2}, 1), runs, None, TOLERANCE
    )
    assert exported.passed and not rewritten.passed and not forgiven
    # a fault beside an intended dependence is still a fault
    runs = models(tmp_path, exported=MEAN, rewritten=BOTH)
    (exported, rewritten), _ = check_models(batch, RowSizes({"b": 2}, 1), runs, None, TOLERANCE)
    assert exported.passed and not rewritten.passed
    assert rewritten.kind == "rows-depend"
    assert rewritten.text.startswith(ROW_CHANGES[SAME])
    assert f"as in the model: {ROW_CHANGES[OTHERS]}" in rewritten.text
    assert {row.kind for row in rewritten.rows if row.in_model} == {OTHERS, SIZE}


def test_what_is_meant_in_one_output_is_a_fault_in_another() -> None:
    batch = find_batch(declared("y", "centred"))
    assert batch is not None

    def meant(feed: Feed) -> Feed:
        x = feed["x"]
        return {"y": np.tanh(x), "centred": x - x.mean(0)}

    def mixed(feed: Feed) -> Feed:
        outputs = meant(feed)
        return {**outputs, "y": outputs["y"] + outputs["y"][::-1].mean(0)}

    tolerance = dict.fromkeys(("y", "centred"), TOLERANCE["y"])
    runs = [FeedRunner("exported", meant), FeedRunner("rewritten", mixed)]
    (first, second), forgiven = check_models(batch, RowSizes({"b": 4}, 2), runs, None, tolerance)
    assert first.passed and forgiven == {(OTHERS, "centred"), (SIZE, "centred")}
    assert not second.passed
    assert second.text.startswith(f"{ROW_CHANGES[OTHERS]}: y by up to ")
    runner = FeedRunner("engine", mixed)
    engine = check_rows(runner, batch, RowSizes({"b": 4}, 2), tolerance, forgiven=forgiven)
    assert not engine.info.passed


def spec(forward: Any) -> ModelSpec:
    b, w = Dim("b", 1, 2, 3), Dim("w", 4, 6, 9)
    return tiny.of(forward, shape=(b, 3, w), outputs=(Output("y", (b, 3, w)),))


def test_a_conversion_checks_the_rows(tmp_path: Path) -> None:
    manifest = run(Config(spec(lambda x: x.tanh()), out=tmp_path / "a")).manifest
    assert manifest.comparison is not None
    check, edges = manifest.comparison.checks  # model.onnx equals exported.onnx: one run is enough
    assert (edges.name, edges.run, edges.passed) == ("inputs at the edges", "exported", True)
    assert (check.name, check.run, check.passed) == (batch_rows.ROWS, "exported", True)
    assert check.sizes == {"b": 2, "w": 4}
    manifest = run(Config(tiny.conv(), out=tmp_path / "b")).manifest
    assert manifest.comparison is not None
    assert [check.name for check in manifest.comparison.checks] == ["inputs at the edges"]


def test_a_conversion_of_rows_that_are_meant_to_depend(tmp_path: Path) -> None:
    report = run(Config(spec(lambda x: x + x.mean(0, keepdim=True)), out=tmp_path / "a"))
    assert report.ok and report.manifest.comparison is not None
    check, _ = report.manifest.comparison.checks
    assert check.passed and check.kind == "rows-as-in-model"
