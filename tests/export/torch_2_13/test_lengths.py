"""len() of a tensor stays symbolic; len() of everything else is Python's."""

from __future__ import annotations

import builtins
import sys
from types import FunctionType

import numpy as np
import onnxruntime
import pytest
import torch

from pipeline.export.export import export
from pipeline.export.torch_2_13.lengths import _len, symbolic_lengths
from pipeline.spec.dims import Dim
from pipeline.spec.model import Input, ModelSpec, Output

B = Dim("b", 1, 3, 9)
NAMES = sys.modules[__name__].__dict__


class Net(torch.nn.Module):
    """Uses the length of a tensor, a list, a tuple of sizes and a module list."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        for n in range(len(self.layers)):
            y = self.layers[n](y)
        rows = y.new_ones(len(y), len(x.shape)) * len([x, y])
        return torch.cat([y.reshape(len(x), -1) / len(x), rows], 1)


def test_a_model_that_takes_len_of_a_tensor_is_right_at_every_size(tmp_path) -> None:
    torch.manual_seed(0)
    model = Net().eval()
    spec = ModelSpec(
        "net",
        lambda seed: model,  # noqa: ARG005
        (Input("x", (B, 4)),),
        (Output("y"),),
    )
    export(spec, None, tmp_path / "m.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx")
    for b in range(1, 10):
        x = torch.randn(b, 4)
        (y,) = session.run(None, {"x": x.numpy()})
        np.testing.assert_allclose(y, model(x).detach().numpy(), atol=1e-5)
    assert "len" not in NAMES


def test_everything_else_has_its_own_length() -> None:
    class Counted(torch.Tensor):
        def __len__(self) -> int:
            return 77

    assert _len(torch.zeros(5, 2)) == 5
    assert _len(torch.zeros(5).as_subclass(Counted)) == 77
    assert [_len(v) for v in ("abc", [1], {}, range(6), torch.Size([2, 3]))] == [3, 1, 0, 6, 2]
    for value in (torch.tensor(1.0), 3):
        with pytest.raises(TypeError) as expected:
            len(value)
        with pytest.raises(TypeError) as found:
            _len(value)
        assert str(found.value) == str(expected.value)


def test_a_module_that_defines_len_keeps_it() -> None:
    own = tuple.__len__
    namespace = {"__name__": "somebody", "len": own, "torch": torch}
    module = type("Own", (Net,), {"forward": FunctionType(Net.forward.__code__, namespace)})()
    with symbolic_lengths(module):
        assert namespace["len"] is own
    assert namespace["len"] is own


def test_the_name_is_put_back_after_the_last_user() -> None:
    with symbolic_lengths(Net()):
        with symbolic_lengths(Net()):
            assert NAMES["len"] is _len
        assert NAMES["len"] is _len
    assert "len" not in NAMES and len is builtins.len
