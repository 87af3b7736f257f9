"""scatter, scatter_add, scatter_reduce and index_reduce, with NaN and several values at a place."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from op_exports import Of, compare_op

from pipeline.errors import ExportError
from pipeline.export.export import export
from pipeline.export.ops import scatters
from pipeline.spec.dims import Dim
from pipeline.spec.model import Input, ModelSpec, Output, Tolerance


def places(z: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """A place in a row of `x` for each value. Some places come often, and some never."""
    return (z.abs() * 97).nan_to_num(3, 1, 5).long() % x.shape[1]


def reduced(reduce, include_self, dtype=None):
    def function(x, z):
        index = places(z, x)
        if dtype is not None:
            x, z = ((9 * t).nan_to_num(1, 7, -7).to(dtype) for t in (x, z))
        return x.scatter_reduce(1, index, z, reduce, include_self=include_self)

    return function


def indexed(reduce, include_self):
    return lambda x, z: x.index_reduce(1, places(z[0], x), z, reduce, include_self=include_self)


def shorter(reduce, include_self):
    """There are fewer indices than sources."""
    return lambda x, z: x.scatter_reduce(
        1, places(z, x)[:1, 1:], z, reduce, include_self=include_self
    )


WAYS = [*itertools.product(("sum", "prod", "mean", "amax", "amin"), (True, False))]
CASES = {
    **{f"{r}, {own}": reduced(r, own) for r, own in WAYS},
    **{f"{r} of int64, {own}": reduced(r, own, torch.int64) for r, own in WAYS if r != "mean"},
    "amax of booleans": reduced("amax", False, torch.bool),
    "sum of float16": reduced("sum", True, torch.float16),
    **{f"index_reduce {r}, {own}": indexed(r, own) for r, own in WAYS if r != "sum"},
    **{f"fewer indices, {r}": shorter(r, False) for r in ("sum", "mean", "amax")},
    "scatter_add": lambda x, z: x.scatter_add(1, places(z, x), z),
    "scatter_add, fewer indices": lambda x, z: x.scatter_add(1, places(z, x)[:1], z),
    "scatter, fewer indices": lambda x, z: x.scatter(1, torch.arange(1)[None], z),
    "added": lambda x, z: x.scatter(1, places(z, x), z, reduce="add"),
    "multiplied": lambda x, z: x.scatter(1, places(z, x), z, reduce="multiply"),
    "added, a number": lambda x, z: x.scatter(1, places(z, x), 2.5, reduce="add"),
}
MENDED = (
    "amax, True", "amin, False", "index_reduce mean, True", "fewer indices, sum", "added",
    "scatter_add, fewer indices", "scatter, fewer indices", "amax of booleans", "sum of float16",
)  # fmt: skip


def compare(function, path) -> None:
    """Exports a function of two matrices, and compares it with torch."""
    shapes = {"x": (2, Dim("t", 1, 5, 7)), "z": (2, Dim("n", 1, 4, 7))}
    spec = ModelSpec(
        "m", lambda _: Of(function), tuple(Input(n, shape) for n, shape in shapes.items()),
        (Output("y"),), Tolerance(1e-5, 1e-5, "a test"),
    )  # fmt: skip
    done = export(spec, None, path / "m.onnx")
    for t, n in itertools.product((1, 2, 7), (1, 3, 7)):
        x, z = (torch.from_numpy(v) for v in spec.sample({"t": t, "n": n}, 3).values())
        compare_op(Of(function), done.path, [x, z], near=1e-5)
        z[0, n // 2], z[1, n // 3], x[0, t // 2] = math.nan, -math.inf, math.nan
        compare_op(Of(function), done.path, [x, z], near=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_it_is_torchs(tmp_path, name) -> None:
    compare(CASES[name], tmp_path)


@pytest.mark.parametrize("name", MENDED)
def test_without_it(tmp_path, monkeypatch, name) -> None:
    for target in scatters.TRANSLATIONS.copy():
        monkeypatch.delitem(scatters.TRANSLATIONS, target)
    with pytest.raises(Exception, match=r"Not equal|no translation|differs|not supported"):
        compare(CASES[name], tmp_path)


@pytest.mark.parametrize(
    ("reduce", "dtype", "words"),
    [("mean", torch.int64, "mean of INT64"), ("sum", torch.bool, "sum of BOOL")],
)
def test_what_is_refused(tmp_path, reduce, dtype, words) -> None:
    with pytest.raises(ExportError, match=rf"scatter_reduce.*{words} can't be exported; cast"):
        compare(reduced(reduce, True, dtype), tmp_path)
