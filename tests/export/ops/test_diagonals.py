"""Diagonals over symbolic sizes, and at offsets that follow a size."""

from __future__ import annotations

import itertools

import pytest
import torch
from op_exports import Of, compare_op, export_op, spec_of

from pipeline.errors import ConstraintError
from pipeline.export.export import export
from pipeline.export.ops import diagonals
from pipeline.export.torch_2_13 import symbolic_steps
from pipeline.spec.dims import Dim

SCATTERED = {
    "a row of a square": lambda x: torch.diagonal_scatter(x @ x.mT, (x @ x.mT)[:, 0], 0, 1, 2),
    "the main diagonal": lambda x: x.diagonal_scatter(x.diagonal(0, 1, 2) + 1, dim1=1, dim2=2),
    "above": lambda x: x.diagonal_scatter(x.diagonal(1, 1, 2) + 1, 1, 1, 2),
    "below": lambda x: x.diagonal_scatter(x.diagonal(-1, 1, 2) + 1, -1, 1, 2),
    "other axes": lambda x: x.diagonal_scatter(x.diagonal(1, -1, 0) + 1, 1, -1, 0),
    "integers": lambda x: x.int().diagonal_scatter(x.int().diagonal() + 1),
    "booleans": lambda x: (x > 0).diagonal_scatter((x < 0).diagonal()),
}


@pytest.mark.parametrize("name", SCATTERED)
def test_diagonal_scatter(tmp_path, name) -> None:
    path = tmp_path / "m.onnx"
    export_op(SCATTERED[name], [torch.randn(3, 4, 5)], path)
    for sizes in ((3, 4, 5), (2, 2, 2), (5, 3, 2), (2, 6, 3)):
        compare_op(SCATTERED[name], path, [torch.randn(*sizes)], near=1e-6)


def written(offset):
    def function(x):
        x = x.clone()
        x.diagonal(offset).mul_(2)
        return x

    return function


def written_at(offset, take=torch.diagonal):
    """Writes in a diagonal whose offset follows a size, and reads it by another view."""

    def function(x):
        x = x.clone()
        seen = take(x, offset=offset(x))
        x += 1
        take(x, offset=offset(x)).mul_(2)
        return torch.cat((x.flatten(), seen))

    return function


def written_in_a_copy(x):
    """``diag`` is no view, so `x` stays."""
    x = x.clone()
    taken = torch.diag(x, x.shape[1] // 2).mul_(2)
    return torch.cat((x.flatten(), taken))


NUMBERS = {
    "main": lambda x: x.diagonal(),
    "above": lambda x: torch.diagonal(x, 2),
    "below": lambda x: x.diagonal(offset=-3),
    "never any": lambda x: x.diagonal(12),
    "of a tensor of three axes": lambda x: torch.diagonal(x[:, None], -1, 2, 0),
    "diag": lambda x: torch.diag(x, 1),
    "diag of a row": lambda x: torch.diag(x[0], 2),
    "booleans": lambda x: (x > 0).diagonal(3),
    "written above": written(3),
    "written below": written(-4),
}
SIZES = {
    "half of the columns": lambda x: x.diagonal(x.shape[1] // 2),
    "below": lambda x: torch.diagonal(x, offset=-(x.shape[0] // 2)),
    "above or below": lambda x: torch.diag(x, x.shape[1] - x.shape[0]),
    "two less than the columns": lambda x: torch.linalg.diagonal(x, offset=x.shape[1] - 2),
    "a square of a row": lambda x: torch.diag(x[0], x.shape[0] - 3),
    "squares": lambda x: x.diag_embed(x.shape[0] // 2),
    "a square of all": lambda x: torch.diagflat(x, -(x.shape[0] // 2)),
    "written": written_at(lambda x: x.shape[1] // 2),
    "written above or below": written_at(lambda x: x.shape[1] - x.shape[0], torch.linalg.diagonal),
    "written in a copy": written_in_a_copy,
    "filled": lambda x: x.clone().fill_diagonal_(2.5),
}


def differing(function, path) -> None:
    """Exports a function of a matrix, and compares it at all sizes, with NaN and infinity.

    Raises:
        ConstraintError: the export is refused.
    """
    spec = spec_of(function, (Dim("h", 1, 4, 6), Dim("w", 1, 5, 6)))
    done = export(spec, None, path / "m.onnx")
    for h, w in itertools.product(range(1, 7), range(1, 7)):
        x = torch.from_numpy(spec.sample({"h": h, "w": w}, 3)["x"])
        x[h // 2, w // 3] = torch.nan
        x[h // 3, w // 2] = torch.inf
        compare_op(Of(function), done.path, [x])


@pytest.mark.parametrize("name", NUMBERS)
def test_each_element_is_torchs_at_all_sizes(tmp_path, name) -> None:
    """The diagonal is empty at some sizes."""
    differing(NUMBERS[name], tmp_path)


def test_without_it_nan_reaches_other_elements(tmp_path, monkeypatch) -> None:
    monkeypatch.delitem(diagonals.TRANSLATIONS, torch.ops.aten.diagonal.default)
    with pytest.raises(AssertionError, match="Not equal"):
        differing(NUMBERS["main"], tmp_path)


@pytest.mark.parametrize("name", SIZES)
def test_an_offset_that_follows_a_size(tmp_path, monkeypatch, name) -> None:
    differing(SIZES[name], tmp_path)
    monkeypatch.setattr(symbolic_steps, "_OTHERS", {})
    with pytest.raises(ConstraintError):
        differing(SIZES[name], tmp_path)
