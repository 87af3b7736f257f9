"""expand_scatter: several updates of one element, half precision, infinities, and torch."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import pytest
import torch
from pass_harness import apply, assert_same, own, run

from pipeline.passes.case import Case
from pipeline.passes.expand_scatter import PASS

POSITIVE = own("expand_scatter", "positive")


def scattered(op: str, reduction: str, dtype: str, index_columns: int) -> onnx.ModelProto:
    axis = "axis=0, " if op == "ScatterElements" else ""
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 18]> g '
        f"({dtype}[n,4] x, int64[k,{index_columns}] i, {dtype}[k,4] u) => ({dtype}[n,4] y) "
        f'{{ y = {op}<{axis}reduction="{reduction}">(x, i, u) }}'
    )
    model.graph.node[0].name = "scatter"
    after, result = apply(PASS, model)
    assert result.modified
    onnx.checker.check_model(after, full_check=True)
    return after


@pytest.mark.parametrize("name", ["tuples add float", "elements max float", "elements mul int64"])
def test_the_last_update_alone_is_another_result(name: str) -> None:
    """What TensorRT 8.6 computes: it does not read the attribute."""
    (case,) = (c for c in POSITIVE if c.name == name)
    feeds = case.feeds(case.shapes[1])
    ignored = case.model()
    kept = [a for a in ignored.graph.node[0].attribute if a.name != "reduction"]
    del ignored.graph.node[0].attribute[:]
    ignored.graph.node[0].attribute.extend(kept)
    with pytest.raises(AssertionError):
        assert_same(run(case.model(), feeds), run(ignored, feeds))


@pytest.mark.parametrize(
    ("reduction", "name"), [("add", "sum"), ("mul", "prod"), ("max", "amax"), ("min", "amin")]
)
@pytest.mark.parametrize("dtype", ["float16", "float", "int64"])
def test_elements_are_what_torch_scatters(reduction: str, name: str, dtype: str) -> None:
    """ONNX Runtime can't scatter half precision with a reduction on a CPU; torch can."""
    kind = np.float32 if dtype == "float" else np.dtype(dtype)
    rng = np.random.default_rng(0)
    low, high = (-3, 4) if reduction == "mul" else (-8, 8)
    x, u = (rng.integers(low, high, (rows, 4)).astype(kind) for rows in (5, 9))
    i = rng.integers(0, 5, (9, 4))
    (y,) = run(scattered("ScatterElements", reduction, dtype, 4), {"x": x, "i": i, "u": u})
    right = torch.from_numpy(x).scatter_reduce(
        0, torch.from_numpy(i), torch.from_numpy(u), reduce=name, include_self=True
    )
    assert_same([right.numpy()], [y])


@pytest.mark.parametrize("dtype", ["float16", "float", "int64"])
def test_rows_are_what_torch_adds(dtype: str) -> None:
    kind = np.float32 if dtype == "float" else np.dtype(dtype)
    rng = np.random.default_rng(1)
    x, u = (rng.integers(-8, 8, (rows, 4)).astype(kind) for rows in (5, 9))
    i = rng.integers(0, 5, (9, 1))
    (y,) = run(scattered("ScatterND", "add", dtype, 1), {"x": x, "i": i, "u": u})
    right = torch.from_numpy(x).index_add(0, torch.from_numpy(i[:, 0]), torch.from_numpy(u))
    assert_same([right.numpy()], [y])


def test_an_infinity_stays_where_it_belongs() -> None:
    x, u = np.zeros((3, 4), np.float32), np.ones((2, 4), np.float32)
    u[0, 0], u[1, 1] = -np.inf, np.inf
    i = np.array([[0] * 4, [2] * 4])
    for reduction in ("add", "max", "min"):
        after = scattered("ScatterElements", reduction, "float", 4)
        (y,) = run(after, {"x": x, "i": i, "u": u})
        right = x.copy()
        combine = {"add": np.add, "max": np.maximum, "min": np.minimum}[reduction]
        combine.at(right, (i, np.arange(4)[None].repeat(2, 0)), u)
        np.testing.assert_array_equal(y, right)


def test_the_limit_counts_rows_only_where_they_are_compared() -> None:
    """Adding rows of any length needs 2**24 pairs here; the maximum needs 2**24 x 64."""
    for reduction, refused in (("add", False), ("max", True)):
        case = Case(
            "expand_scatter",
            "rows",
            "positive",
            "(float[4096,64] x, int64[4096,1] i, float[4096,64] u) => (float[4096,64] y) "
            f'{{ y = ScatterND<reduction="{reduction}">(x, i, u) }}',
            (),
        )
        _, result = apply(PASS, case.model())
        assert bool(result.refused) == refused
