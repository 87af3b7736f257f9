"""Floor division and modulo of sizes are Python's where the sizes are small."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from torch.nn import functional

from pipeline.errors import ExportError
from pipeline.export.export import export
from pipeline.spec.dims import Dim, Size
from pipeline.spec.model import Input, ModelSpec, Output

A, B = Dim("a", 1, 4, 11), Dim("b", 5, 7, 9)
EIGHTS = Dim("h", 8, 24, 64, multiple_of=8)
Z = Dim("z", 0, 4, 11)


def rolled(count: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.roll(torch.arange(50.0), count, 0) + 0 * x.sum()


def behind_a_branch(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    k = 0
    if y.shape[0] > 6:
        k = (x.shape[0] - 2) // 4
    return rolled(k, x + y.sum())


def of_a_branch(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """torch narrows the size by the branch, whose sides agree at the border."""
    n = (x.shape[0] // 8 - 3) // 2 + 1
    k = n if n > 0 else 0
    return rolled(k, x + y.sum())


def in_a_tensor(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    n = torch.ceil((torch.tensor(x.shape[0]) - 5) / torch.tensor(4)).int()
    return rolled(n, x + y.sum())


Function = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
NETS: dict[str, tuple[Size, Function]] = {
    "a shift": (A, lambda x, y: rolled((x.shape[0] - 2) // 4, x + y.sum())),
    "a modulo": (A, lambda x, y: rolled((x.shape[0] - 5) % 3, x + y.sum())),
    "a pad": (A, lambda x, y: functional.pad(x + y.sum(), (0, 3 - ((x.shape[0] - 2) // 2) * 2))),
    "a value": (A, lambda x, y: torch.full((2,), (x.shape[0] - 2) // 2 + 1) + x.sum() + y.sum()),
    "a subtraction": (A, lambda x, y: torch.ones(9) - (x.shape[0] - 2) // 2 + (x.sum() + y.sum())),
    "a divisor": (A, lambda x, y: rolled(20 // (x.shape[0] + 1), x + y.sum())),
    "a divisor from a declared size": (A, lambda x, y: rolled(20 // (y.shape[0] - 4), x + y.sum())),
    "a multiple": (EIGHTS, lambda x, y: rolled((x.shape[0] - 12) // 5, x + y.sum())),
    "a multiple, divided": (EIGHTS, lambda x, y: rolled((x.shape[0] // 8 - 3) // 2, x + y.sum())),
    "of no element": (Z, lambda x, y: rolled((x.shape[0] - 1) // 4, x + y.sum())),
    "a roll of no element": (
        Z, lambda x, y: torch.roll(x, (x.shape[0] // 3, 1), (0, 1)) + 0 * y.sum()
    ),
    "a flat roll of no element": (Z, lambda x, y: torch.roll(x, x.shape[0] // 3) + 0 * y.sum()),
    "a roll of no element by numbers": (
        Z, lambda x, y: torch.roll(x, (2, -1), (0, -1)) + 0 * y.sum()
    ),
    "a roll of a slice of no element": (A, lambda x, y: torch.roll(x[1:], 3, 0) + 0 * y.sum()),
    "of a dim's half": (A * 2 + 1, lambda x, y: rolled((x.shape[0] // 2 - 2) // 4, x + y.sum())),
    "behind a branch": (A, behind_a_branch),
    "of a branch": (EIGHTS, of_a_branch),
    "in a tensor": (A, in_a_tensor),
}  # fmt: skip


class Net(torch.nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.function(x, y)


def spec_of(size: Size, function: Function) -> ModelSpec:
    inputs = (Input("x", (size, 7)), Input("y", (B, 3)))
    return ModelSpec("net", lambda _: Net(function), inputs, (Output("z"),))


@pytest.mark.parametrize("name", NETS)
def test_a_negative_number_of_sizes_is_rounded_down(tmp_path, name: str) -> None:
    size, function = NETS[name]
    spec = spec_of(size, function)
    done = export(spec, None, tmp_path / "m.onnx")
    assert not done.refinements
    session = onnxruntime.InferenceSession(str(tmp_path / "m.onnx"))
    (dim,) = size.dims
    for n, b in itertools.product(range(dim.min, dim.max + 1, dim.multiple_of), (5, 7, 9)):
        shapes = [(2 * n + 1 if size is not dim else n, 7), (b, 3)]
        x, y = (torch.randn(shape, generator=torch.Generator().manual_seed(n)) for shape in shapes)
        feeds = {"x": x.numpy(), "y": y.numpy()}
        names = [one.name for one in session.get_inputs()]
        got = session.run(None, {name: feeds[name] for name in names})[0]
        np.testing.assert_allclose(got, function(x, y).numpy(), 1e-5, 1e-5, err_msg=f"{n}, {b}")


def test_a_divisor_that_may_be_negative_is_refused(tmp_path) -> None:
    spec = spec_of(Z, lambda x, y: rolled(20 // (2 * x.shape[0] - 3), x + y.sum()))
    with pytest.raises(ExportError, match="may be negative"):
        export(spec, None, tmp_path / "m.onnx")
