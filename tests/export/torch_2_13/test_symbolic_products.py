"""take_along_dim and kron at every size of the declared ranges."""

from __future__ import annotations

import pytest
import torch
from op_exports import Of, compare_op, spec_of

from pipeline.errors import ConstraintError
from pipeline.export.export import export
from pipeline.spec.dims import Dim

H, W = Dim("h", 1, 3, 6), Dim("w", 1, 7, 12)


def broadcast_indices(x):
    return torch.take_along_dim(x, x[:1].argsort(1), 1)


def broadcast_input(x):
    return torch.take_along_dim(x[:1], x.argsort(1), dim=1)


FUNCTIONS = {
    "sorted": lambda x: x.take_along_dim(x.argsort(1), 1),
    "by name": lambda x: torch.take_along_dim(input=x, indices=x.argsort(dim=-1), dim=-1),
    "the first two of a row": lambda x: x.take_along_dim(x.argsort(1)[:, :1].repeat(1, 2), 1),
    "along the first axis": lambda x: x.take_along_dim(x.argsort(0), 0),
    "flat": lambda x: x.take_along_dim(x.argmax().reshape(1)),
    "one row of indices": broadcast_indices,
    "one row of values": broadcast_input,
    "kron": lambda x: torch.kron(x, x + 1),
    "kron of two ranks": lambda x: torch.kron(x, x[0]) + torch.kron(x[0], x),
    "kron of integers": lambda x: (9 * x).long().kron(torch.tensor([[1, 2], [3, 4]])),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_it_is_torchs_at_every_size(tmp_path, name) -> None:
    spec = spec_of(FUNCTIONS[name], (H, W))
    done = export(spec, None, tmp_path / "m.onnx")
    for h in range(1, 7):
        for w in (1, 2, 7, 12):
            x = torch.from_numpy(spec.sample({"h": h, "w": w}, 3)["x"])
            compare_op(Of(FUNCTIONS[name]), done.path, [x], near=1e-6)


def test_sizes_that_torch_refuses_are_no_gather(tmp_path) -> None:
    """gather would take fewer rows of indices than the input has."""

    def function(x):
        return torch.take_along_dim(x, x[: (x.shape[0] + 1) // 2].argsort(1), 1)

    spec = spec_of(function, (H, W))
    with pytest.raises(ConstraintError):
        export(spec, None, tmp_path / "m.onnx")
