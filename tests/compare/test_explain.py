"""A failed comparison names the node, the pass, or the sizes that the model accepts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from pipeline.convert.driver import run
from pipeline.errors import CompareError, ConstraintError, InputError
from pipeline.spec.config import Config
from pipeline.spec.dims import Dim
from pipeline.spec.model import Input, ModelSpec, Output, Tolerance

WRONG_PASS = '''
"""Doubles what a Mul multiplies by."""

import onnx_graphsurgeon as gs
from pipeline.passes import Change, PassResult


def run(graph):
    done = []
    for node in [n for n in graph.nodes if n.op == "Mul" and not n.name.endswith("/twice")]:
        place = next(k for k, t in enumerate(node.inputs) if isinstance(t, gs.Constant))
        old = node.inputs[place]
        node.inputs[place] = gs.Constant(f"{node.name}/doubled", old.values * 2)
        done.append(Change(node.name, "Mul", "doubled"))
        node.name += "/twice"
    return PassResult(tuple(done))
'''


class Scaled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.conv(x)) * torch.tensor([0.5, 0.6, 0.7, 0.8]).view(4, 1, 1)


class Particular(torch.nn.Module):
    """Refuses sizes in a way that leaves no trace in an export."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_exporting() and x.shape[2] % 8:
            raise ValueError("heights are multiples of 8")  # the line of Particular
        return x * 2


def spec(module: type[torch.nn.Module], **options) -> ModelSpec:
    def build(_: Path | None) -> torch.nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return module()

    h, w = Dim("h", 16, 32, 64), Dim("w", 16, 32, 64)
    return ModelSpec(
        "m", build, (Input("x", (1, 3, h, w)),), (Output("y"),),
        Tolerance(1e-4, 1e-5, "a test"), **options,
    )  # fmt: skip


def test_a_wrong_pass_is_named_with_the_node_and_the_sizes(tmp_path: Path) -> None:
    path = tmp_path / "double.py"
    path.write_text(WRONG_PASS)
    with pytest.raises(CompareError) as caught:
        run(Config(spec(Scaled), out=tmp_path / "a", passes=(path,)))
    text = str(caught.value)
    for word in (
        "rewritten differs from exported",
        "h=16,w=16",
        "Mul",
        "double",
        "test_explain.py",
    ):
        assert word in text
    assert not (tmp_path / "a").exists()


def test_a_weight_that_is_no_number_is_named(tmp_path: Path) -> None:
    class Broken(Scaled):
        def __init__(self) -> None:
            super().__init__()
            self.conv.bias.data[2] = torch.nan

    with pytest.raises(CompareError) as caught:
        run(Config(spec(Broken), out=tmp_path / "a", quick=True))
    text = str(caught.value)
    assert "The weight conv.bias itself has NaN or infinity" in text and "--range" not in text


@pytest.mark.parametrize("tolerance", [None, Tolerance(1e-4, 1e-4, "a test")])
def test_a_weight_of_an_onnx_file_that_is_no_number_is_named(
    tmp_path: Path, tolerance: Tolerance | None
) -> None:
    # with a tolerance, the comparison finds it; without one, the measurement of the tolerance
    body = "(float[b,3] x) => (float[b,3] y) { y = Add(x, odd) }"
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 18]> g {body}')
    odd = np.array([1, np.nan, 2], np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(odd, "odd"))
    onnx.save(model, tmp_path / "m.onnx")
    with pytest.raises((CompareError, InputError)) as caught:
        run(
            Config(
                str(tmp_path / "m.onnx"),
                out=tmp_path / "a",
                dims=("b=1:2:4",),
                tolerance=tolerance,
            )
        )
    text = str(caught.value)
    assert "The weight odd itself has NaN" in text and "--range" not in text


def test_sizes_that_only_the_model_refuses_are_told(tmp_path: Path) -> None:
    with pytest.raises(ConstraintError) as caught:
        run(Config(spec(Particular), out=tmp_path / "a"))
    text = str(caught.value)
    for word in (
        "torch fails at",
        "h must be a multiple of 8",
        "line of Particular",
        "multiple_of=8",
    ):
        assert word in text


def test_and_are_kept_where_the_dim_may_be_narrowed(tmp_path: Path) -> None:
    report = run(Config(spec(Particular, refine_dims=True), out=tmp_path / "a"))
    assert report.ok
    (h, w) = report.manifest.interface.dims.values()
    assert (h.min, h.max, h.multiple_of, w.multiple_of) == (16, 64, 8, 1)
