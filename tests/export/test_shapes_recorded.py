"""Slices have their size at every declared size, whatever torch and the model's branches narrow."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnxruntime
import pytest
import torch
from torch.nn import functional

from pipeline.errors import PipelineError
from pipeline.export.export import export
from pipeline.spec.dims import Dim, Size
from pipeline.spec.model import Input, ModelSpec, Output

attention = functional.scaled_dot_product_attention
A, D = Dim("a", 1, 4, 11), Dim("d", 3, 7, 15)
EIGHTS = Dim("h", 8, 24, 64, multiple_of=8)
Function = Callable[[torch.Tensor], torch.Tensor]


def cropped(x: torch.Tensor) -> torch.Tensor:
    """A sequence is cut to the block's size."""
    return x[:6] if x.shape[0] > 6 else x


def not_cropped(x: torch.Tensor) -> torch.Tensor:
    if x.shape[0] > 5:
        x = x[:100]
    return x[:6].var(0)


def beside_a_branch(last: Function) -> Function:
    def function(x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] >= 6:
            x = x + 0
        return last(x)

    return function


NETS: dict[str, tuple[Size, Function]] = {
    "a crop": (D, lambda x: cropped(x).std(0)),
    "a crop, pooled": (D, lambda x: functional.adaptive_avg_pool1d(cropped(x).T, 3)),
    "a crop, sorted": (D, lambda x: cropped(x).sort(0)[0][-1]),
    "a crop, attended": (D, lambda x: attention(*[cropped(x)[None, None]] * 3).sum((0, 1, 2))),
    "a crop between sums": (D, lambda x: cropped(x * 2) + 1),
    "no crop": (D, not_cropped),
    "the first": (D, beside_a_branch(lambda x: x[:6].std(0))),
    "the last": (D, beside_a_branch(lambda x: x[-6:].std(0))),
    "two slices": (D, beside_a_branch(lambda x: torch.cat([x[:6], x[:2]]).std(0))),
    "from a size": (D, beside_a_branch(lambda x: x[x.shape[0] - 6 :].std(0))),
    "a diagonal": (A, lambda x: x[:2].diagonal().sum()),
    "one less": (A, lambda x: x[: x.shape[0] - 1].sum(0)),
    "without the last two": (A, lambda x: x[:-2].sum(0) + x.shape[0]),
    "of a multiple": (EIGHTS, lambda x: x[:16].var(0)),
    "of a multiple, from a size": (EIGHTS, lambda x: x[x.shape[0] - 20 :].var(0)),
    "of a dim's double": (A * 2 + 1, lambda x: x[:5].var(0)),
}  # fmt: skip


class Net(torch.nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


def exported(size: Size, function: Function, path) -> ModelSpec:
    spec = ModelSpec("net", lambda _: Net(function), (Input("x", (size, 5)),), (Output("y"),))
    assert not export(spec, None, path).refinements
    return spec


def check_every_size(size: Size, function: Function, path) -> None:
    session = onnxruntime.InferenceSession(str(path))
    (dim,) = size.dims
    for n in range(dim.min, dim.max + 1, dim.multiple_of):
        length = n if size is dim else 2 * n + 1
        x = torch.randn(length, 5, generator=torch.Generator().manual_seed(n))
        got, want = session.run(None, {"x": x.numpy()})[0], function(x).numpy()
        assert got.shape == want.shape
        np.testing.assert_allclose(got, want, 1e-5, 1e-5, err_msg=str(length))


@pytest.mark.parametrize("name", NETS)
def test_a_slice_has_its_size_at_every_size(tmp_path, name: str) -> None:
    size, function = NETS[name]
    exported(size, function, tmp_path / "m.onnx")
    check_every_size(size, function, tmp_path / "m.onnx")


def test_a_crop_that_is_written_to_is_refused_with_what_to_write(tmp_path) -> None:
    with pytest.raises(PipelineError) as caught:
        exported(D, lambda x: cropped(x * 2).add_(1), tmp_path / "m.onnx")
    assert "min(6, d) is baked in as 6; if a branch on a size cuts" in str(caught.value)
    assert "without the change in place (y = y + 1)" in str(caught.value)
    exported(D, lambda x: cropped(x * 2) + 1, tmp_path / "m.onnx")


def test_a_power_that_may_be_a_fraction_is_refused(tmp_path) -> None:
    with pytest.raises(PipelineError, match="negative exponent"):
        exported(A, lambda x: torch.ones(3) * 2 ** (x.shape[0] - 3) + 0 * x.sum(), tmp_path / "m")
    exported(A, lambda x: torch.ones(3) * 2 ** (x.shape[0] - 1) + 0 * x.sum(), tmp_path / "m")
