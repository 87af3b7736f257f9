"""LSTM, GRU and RNN with a dynamic time axis, after any earlier exports of the process."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from op_exports import compare_op, export_op
from torch.export._patches import register_lstm_while_loop_decomposition

from pipeline.export.export import export
from pipeline.export.torch_2_13.recurrent import _rnn, dynamic_time
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


LAYERS = {
    "LSTM": lambda: torch.nn.LSTM(4, 5, batch_first=True, bidirectional=True),
    "GRU": lambda: torch.nn.GRU(4, 5, batch_first=True, bidirectional=True),
    "RNN": lambda: torch.nn.RNN(4, 5, batch_first=True, bidirectional=True),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_time_is_dynamic_the_second_time_too(tmp_path, kind) -> None:
    torch.manual_seed(0)
    layer = LAYERS[kind]()
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
    assert kinds.count(kind) == 1


@pytest.mark.parametrize("nonlinearity", ["tanh", "relu"])
@pytest.mark.parametrize("options", [{}, {"bias": False, "num_layers": 2, "bidirectional": True}])
def test_rnn(tmp_path, nonlinearity, options) -> None:
    """All outputs, from a given state, over a dynamic time and a dynamic batch."""
    torch.manual_seed(0)
    layer = torch.nn.RNN(4, 5, nonlinearity=nonlinearity, **options).eval()
    count = layer.num_layers * (2 if layer.bidirectional else 1)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x):
            start = x[0, :, :1].expand(count, x.shape[1], 5)
            return self.layer(x, start)

    path, module = tmp_path / "m.onnx", Model()
    model = export_op(module, [torch.randn(6, 3, 4)], path, [[0, 1]])
    assert [n.op_type for n in model.graph.node].count("RNN") == layer.num_layers
    for sizes in ((1, 1), (2, 5), (64, 2)):
        compare_op(module, path, [torch.randn(*sizes, 4)], near=1e-5)


@pytest.mark.parametrize("options", [{}, {"bias": False, "num_layers": 2, "bidirectional": True}])
@pytest.mark.parametrize("batch_first", [False, True])
def test_lstm_with_a_projection(tmp_path, options, batch_first) -> None:
    """All outputs, from given states that differ, over a dynamic time and a dynamic batch."""
    torch.manual_seed(0)
    layer = torch.nn.LSTM(4, 6, proj_size=3, batch_first=batch_first, **options).eval()
    count = layer.num_layers * (2 if layer.bidirectional else 1)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer
            self.scales = torch.nn.Parameter(torch.randn(count, 1, 6))

        def forward(self, x):
            first = x[:, 0] if batch_first else x[0]
            cells = self.scales * first[None, :, :1]
            found, (hidden, cell) = self.layer(x, (cells[:, :, :3].sin(), cells))
            return found, hidden, cell

    path, module = tmp_path / "m.onnx", Model()
    model = export_op(module, [torch.randn(6, 3, 4)], path, [[0, 1]])
    assert [n.op_type for n in model.graph.node].count("LSTM") == layer.num_layers
    for sizes in ((1, 1), (2, 5), (64, 2), (2, 64)):
        compare_op(module, path, [torch.randn(*sizes, 4)], near=1e-5)


def test_the_loop_is_torchs_rnn() -> None:
    """The loop that replaces torch's decomposition computes the same."""
    torch.manual_seed(0)
    for nonlinearity, activation in (("tanh", torch.tanh), ("relu", torch.relu)):
        layer = torch.nn.RNN(4, 5, 2, nonlinearity=nonlinearity, bidirectional=True).eval()
        x, state = torch.randn(7, 3, 4), torch.randn(4, 3, 5)
        weights = [getattr(layer, name) for name in layer._flat_weights_names]
        with torch.no_grad():
            found = _rnn(activation, x, state, weights, True, 2, 0.0, False, True, False)
            torch.testing.assert_close(found, layer(x, state))


@pytest.mark.parametrize("kind", [torch.nn.GRU, torch.nn.RNN])
def test_a_batch_that_was_fixed_before_is_dynamic(kind) -> None:
    size = torch.export.Dim.DYNAMIC(min=1, max=64)

    def export_with(axes):
        layer = kind(4, 5).eval()
        with torch.no_grad(), dynamic_time():
            shapes = (dict.fromkeys(axes, size),)
            return torch.export.export(layer, (torch.zeros(6, 3, 4),), dynamic_shapes=shapes)

    export_with([0])  # without the reset of dynamo, the next export makes 3 a constant
    (output,) = (n.args[0][0] for n in export_with([0, 1]).graph.nodes if n.op == "output")
    assert [type(s) for s in output.meta["val"].shape] == [torch.SymInt, torch.SymInt, int]


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
