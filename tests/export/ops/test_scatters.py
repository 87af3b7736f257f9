"""diagonal_scatter over symbolic sizes."""

from __future__ import annotations

import pytest
import torch
from op_exports import compare_op, export_op

CASES = {
    "a row of a square": lambda x: torch.diagonal_scatter(x @ x.mT, (x @ x.mT)[:, 0], 0, 1, 2),
    "the main diagonal": lambda x: x.diagonal_scatter(x.diagonal(0, 1, 2) + 1, dim1=1, dim2=2),
    "above": lambda x: x.diagonal_scatter(x.diagonal(1, 1, 2) + 1, 1, 1, 2),
    "below": lambda x: x.diagonal_scatter(x.diagonal(-1, 1, 2) + 1, -1, 1, 2),
    "other axes": lambda x: x.diagonal_scatter(x.diagonal(1, -1, 0) + 1, 1, -1, 0),
    "integers": lambda x: x.int().diagonal_scatter(x.int().diagonal() + 1),
    "booleans": lambda x: (x > 0).diagonal_scatter((x < 0).diagonal()),
}


@pytest.mark.parametrize("name", CASES)
def test_diagonal_scatter(tmp_path, name) -> None:
    path = tmp_path / "m.onnx"
    export_op(CASES[name], [torch.randn(3, 4, 5)], path)
    for sizes in ((3, 4, 5), (2, 2, 2), (5, 3, 2), (2, 6, 3)):
        compare_op(CASES[name], path, [torch.randn(*sizes)], near=1e-6)
