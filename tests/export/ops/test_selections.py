"""where and masked_fill of booleans, and of numbers."""

from __future__ import annotations

import math

import pytest
import torch
from op_exports import Of, compare_op, spec_of

from pipeline.export.export import export
from pipeline.export.ops import selections
from pipeline.spec.dims import Dim

aten = torch.ops.aten


def diagonal(x):
    m = torch.zeros(x.shape[0], x.shape[0], dtype=torch.bool)
    return m.fill_diagonal_(True)


def in_place(x):
    m = x > 0
    m[:, 1:].masked_fill_(x[:, 1:] < -0.5, True)
    return m


BOOLEANS = {
    "where": lambda x: torch.where(x > 0.2, x > 0.5, x < -0.5),
    "where of one row": lambda x: torch.where(x > 0.2, (x > 0.5)[:1], x < -0.5),
    "where of a number": lambda x: torch.where(x > 0.2, x < 0.6, False),
    "where of two numbers": lambda x: torch.where(x > 0.2, True, False),
    "masked_fill": lambda x: (x > 0).masked_fill(x < -0.5, True),
    "masked_fill by a tensor": lambda x: (x > 0).masked_fill(x < -0.5, (x > 0.9).any()),
    "fill_diagonal_": diagonal,
    "in place": in_place,
}


def put(x):
    y = x.clone()
    y[places(x)] = 7.0
    return y.index_put((places(x),), x[:1], accumulate=True)


def places(x):
    """0 for each row, as int32."""
    return (x[:, 0] > 9).int()


NUMBERS = {
    "an index of int32": lambda x: x[places(x)],
    "an index of int32 in the second axis": lambda x: x[:, places(x)],
    "indices of int32 and int64": lambda x: x[places(x), places(x).long()],
    "int32 in a write": put,
    "where": lambda x: torch.where(x > 0, x, -x),
    "where of a boolean and a float": lambda x: torch.where(x > 0, x, x < -0.5),
    "where of integers": lambda x: torch.where(x > 0, (9 * x).int(), 3),
    "masked_fill": lambda x: x.masked_fill(x < 0, -math.inf),
    "masked_fill of integers": lambda x: (9 * x).long().masked_fill(x < 0, -7),
    "masked_fill by a tensor": lambda x: x.masked_fill(x < 0, x.max()),
    "masked_fill of half precision": lambda x: x.half().masked_fill(x < 0, -6e4),
}


def compare(function, path) -> None:
    spec = spec_of(function, (Dim("h", 1, 3, 6), Dim("w", 1, 5, 9)))
    done = export(spec, None, path / "m.onnx")
    for h, w in ((1, 1), (1, 9), (6, 1), (4, 7), (6, 9)):
        x = torch.from_numpy(spec.sample({"h": h, "w": w}, 3)["x"])
        compare_op(Of(function), done.path, [x])


@pytest.mark.parametrize("name", BOOLEANS)
def test_booleans(tmp_path, name) -> None:
    compare(BOOLEANS[name], tmp_path)


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers(tmp_path, name) -> None:
    compare(NUMBERS[name], tmp_path)


@pytest.mark.parametrize("name", [name for name in NUMBERS if "int32" in name])
def test_without_it_an_index_of_int32_makes_an_invalid_file(tmp_path, monkeypatch, name) -> None:
    for target in (aten.index.Tensor, aten.index_put.default):
        monkeypatch.delitem(selections.TRANSLATIONS, target)
    with pytest.raises(Exception, match=r"int32|ScatterND|GatherND"):
        compare(NUMBERS[name], tmp_path)


@pytest.mark.parametrize("name", ["where", "masked_fill"])
def test_without_it_onnx_runtime_cant_run_the_model(tmp_path, monkeypatch, name) -> None:
    for target in selections.TRANSLATIONS.copy():
        monkeypatch.delitem(selections.TRANSLATIONS, target)
    with pytest.raises(Exception, match=r"NOT_IMPLEMENTED.*Where"):
        compare(BOOLEANS[name], tmp_path)
