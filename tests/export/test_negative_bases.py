"""A power of a negative number with a size as its exponent, at every size."""

from __future__ import annotations

import onnxruntime
import pytest
import torch

from pipeline.export.export import export
from pipeline.export.negative_bases import module_of
from pipeline.export.program import ProgramModule
from pipeline.spec.dims import Dim
from pipeline.spec.model import ModelSpec
from pipeline.spec.tensors import Input, Output


class Signs(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (-1) ** (x.shape[1] + 1)


def program() -> torch.export.ExportedProgram:
    shapes = ({1: torch.export.Dim.DYNAMIC},)
    return torch.export.export(Signs(), (torch.ones(2, 9),), dynamic_shapes=shapes)


def test_torch_reads_it_in_another_way() -> None:
    again = program().module(check_guards=False)(torch.ones(2, 9))
    assert not torch.equal(again, torch.ones(2, 9)), (
        f"torch {torch.__version__} no longer needs 'negative_bases': delete it"
    )


@pytest.mark.parametrize("n", [8, 9])
def test_the_module_of_a_program_has_the_models_sign(n: int) -> None:
    x = torch.ones(2, n)
    assert torch.equal(module_of(program())(x), Signs()(x))
    assert torch.equal(ProgramModule(program())(x), Signs()(x))  # the reference of a .pt2 file


def test_no_size_is_excluded(tmp_path) -> None:
    """A batch of 1 was, for the module of the program had another sign there."""
    shape = (Dim("b", 1, 2, 4), Dim("t", 8, 9, 20))
    spec = ModelSpec("m", lambda _: Signs(), (Input("x", shape),), (Output("y"),))
    assert not export(spec, None, tmp_path / "m.onnx").refinements
    session = onnxruntime.InferenceSession(str(tmp_path / "m.onnx"))
    for b in (1, 4):
        for t in range(8, 21):
            x = torch.randn(b, t)
            (got,) = session.run(None, {"x": x.numpy()})
            assert torch.equal(torch.from_numpy(got), Signs()(x))
