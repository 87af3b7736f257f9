"""LSTM and GRU with a dynamic time axis, after any earlier exports of the process."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch.export._patches import register_lstm_while_loop_decomposition

from pipeline.export.export import export
from pipeline.export.torch_2_13.recurrent import dynamic_time
from pipeline.spec.dims import Dim
from pipeline.spec.model import Input, ModelSpec, Output, Tolerance

T = Dim("t", 2, 10, 64)


class First(torch.nn.Module):
    def __init__(self, layer) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)[0]


def spec_of(layer, time) -> ModelSpec:
    return ModelSpec(
        "recurrent", lambda _: First(layer), (Input("x", (3, time, 4)),), (Output("y"),),
        Tolerance(1e-5, 1e-5, "a test"),
    )  # fmt: skip


@pytest.mark.parametrize("kind", [torch.nn.LSTM, torch.nn.GRU])
def test_time_is_dynamic_the_second_time_too(tmp_path, kind) -> None:
    torch.manual_seed(0)
    layer = kind(4, 5, batch_first=True, bidirectional=True)
    spec = spec_of(layer, T)
    # an earlier export without pipeline
    torch.export.export(First(layer).eval(), (torch.zeros(3, 6, 4),)).run_decompositions()
    for _ in range(2):
        done = export(spec, None, tmp_path / "m.onnx")
        assert list(done.output_shapes["y"]) == [3, "t", 10]
        session = onnxruntime.InferenceSession(str(done.path))
        for t in (2, 3, 6, 64):
            feeds = spec.sample({"t": t}, 3)
            want = done.module(torch.from_numpy(feeds["x"])).detach().numpy()
            got = session.run(None, feeds)[0]
            assert got.shape == want.shape
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    kinds = [n.op_type for n in onnx.load(done.path).graph.node]
    assert kinds.count(kind.__name__) == 1


def test_torchs_own_loop_has_no_effect_after_an_export_without_it() -> None:
    """The op caches its dispatch; `dynamic_time` clears the cache."""
    module = First(torch.nn.LSTM(4, 5, batch_first=True)).eval()
    shapes = ({1: torch.export.Dim.DYNAMIC(min=2, max=64)},)

    def time(loop) -> object:
        torch.export.export(module, (torch.zeros(3, 6, 4),))
        with torch.no_grad(), loop():
            program = torch.export.export(module, (torch.zeros(3, 6, 4),), dynamic_shapes=shapes)
        (output,) = (n.args[0][0] for n in program.graph.nodes if n.op == "output")
        return output.meta["val"].shape[1]

    with pytest.raises(Exception, match=r"specialized it to be a constant \(6\)"):
        pytest.fail(
            f"torch {torch.__version__} gives {time(register_lstm_while_loop_decomposition)}: "
            "the piece 'recurrent' need not make it forget any more"
        )
    assert isinstance(time(dynamic_time), torch.SymInt)


def test_torch_is_left_as_it_was() -> None:
    operator = torch.ops.aten.lstm.input
    before = dict(operator.py_kernels)
    with dynamic_time():
        assert dict(operator.py_kernels) != before
    assert dict(operator.py_kernels) == before
    assert not operator._dispatch_cache
