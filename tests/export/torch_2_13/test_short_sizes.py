"""Long sizes and conditions are replaced by short ones only if they are equal at every size."""

from __future__ import annotations

import contextlib
import threading
import time

import numpy as np
import onnxruntime
import pytest
import sympy
import torch
from torch.fx.experimental.sym_node import SymNode
from torch.nn import functional
from torch.utils._sympy.functions import CeilToInt, FloorDiv, IntTrueDiv, Max, Mod

from pipeline.errors import ExportError
from pipeline.export import torch_2_13, torch_call
from pipeline.export.export import export
from pipeline.export.torch_2_13 import short_sizes as module
from pipeline.export.torch_2_13.short_sizes import short_sizes, shorter
from pipeline.export.torch_call import Task
from pipeline.machine.resources import Stopwatch
from pipeline.spec.dims import Dim
from pipeline.spec.model import Input, ModelSpec, Output, Tolerance

S, T = sympy.Symbol("s0", integer=True, positive=True), sympy.Symbol("s1", integer=True)
H, W = Dim("h", 9, 24, 72), Dim("w", 10, 31, 64)
HIGH, WIDE = Dim("h", 17, 24, 80), Dim("w", 18, 31, 72)
TORCHS = SymNode.__init__


def same_padding(size, kernel=3, stride=2):
    """The output size of a convolution with TensorFlow's padding."""
    pad = Max(0, stride * (CeilToInt(IntTrueDiv(size, stride)) - 1) + kernel - size)
    return FloorDiv(size + pad - kernel, stride) + 1


def windows(size, side=7):
    return size + Mod(side - Mod(size, side), side)


def numbers(expr, sizes):
    return [int(expr.xreplace({S: sympy.Integer(n)})) for n in sizes]


@pytest.mark.parametrize(
    ("expr", "want"),
    [
        (same_padding(S), "((s0 + 1)//2)"),
        (same_padding(same_padding(S), kernel=5), "((s0 + 3)//4)"),
        (windows(FloorDiv(S + 3, 4)), "7*(((s0 + 27)//28))"),
        (Max(0, 2 * CeilToInt(IntTrueDiv(S, 2)) + 1 - S), "-s0 + 2*(((s0 + 1)//2)) + 1"),
        (windows(windows(S)) - windows(S) + S, "s0"),
        (Max(3, Mod(windows(S), 7) + 3), "3"),
        (Max(0, S - 60) + Max(0, 3 - FloorDiv(S, 9)) + 5, None),  # no quotient
    ],
)
def test_a_size_is_shorter_and_equal(expr, want) -> None:
    got = shorter(expr, (("s0", H),))
    assert str(got) == (str(expr) if want is None else want)
    assert numbers(got, range(9, 73)) == numbers(expr, range(9, 73))


def test_one_size_that_differs_is_enough() -> None:
    """The largest declared size differs; all smaller sizes are equal."""
    for expr in (same_padding(S) + Max(0, S - 71), windows(S) - windows(S) % 7 + Max(0, S - 71)):
        assert shorter(expr, (("s0", H),)) is expr
    condition = sympy.Gt(same_padding(S) + Mod(S, 2), 4)
    assert shorter(condition, (("s0", H),)) is sympy.true
    assert shorter(sympy.Ne(same_padding(S) + FloorDiv(S, 70), 37), (("s0", H),)) is not sympy.true
    several = Max(FloorDiv(4 * S * T, 4 * T), Max(0, S + T - 135))
    assert str(several) != "s0"
    assert shorter(several, (("s0", H), ("s1", W))) == S
    several = FloorDiv(4 * S * T, 3 * T + Max(1, 64 - T)) + Max(0, S + T - 135)
    assert shorter(several, (("s0", H), ("s1", W))) is several


def test_the_declared_sizes_count() -> None:
    expr = Mod(S, 8) + Mod(S + 8, 4) + FloorDiv(S, 2)
    assert shorter(expr, (("s0", H),)) is expr
    got = shorter(expr, (("s0", Dim("h", 8, 24, 80, 8)),))
    assert got.count_ops() < expr.count_ops()
    assert numbers(got, range(8, 81, 8)) == numbers(expr, range(8, 81, 8))
    two = Dim("a", 1, 2, 9) + Dim("b", 0, 2, 70)
    assert str(shorter(same_padding(S), (("s0", two),))) == "((s0 + 1)//2)"


def test_other_ranges_of_an_equal_expression_count() -> None:
    """As in a second conversion in one process."""
    small, large = (2 * Dim("h", 4, 8, most) for most in (16, 64))
    assert small == large
    assert shorter(S < 40, (("s0", small),)) == sympy.true
    assert shorter(S < 40, (("s0", large),)) == (S < 40)


def test_too_many_sizes_are_left_alone() -> None:
    expr = same_padding(S)
    assert shorter(expr, (("s0", Dim("h", 1, 64, 1 << 18)),)) is not expr
    assert shorter(expr, (("s0", Dim("h", 1, 64, 1 << 20)),)) is expr
    # int64 would lose the highest bits
    big = FloorDiv((1 << 62) * (S + 3), 1 << 62) + Mod(S, 5) * 0 + Max(1, S)
    assert shorter(big, (("s0", H),)) is big


@pytest.mark.parametrize("kind", ["a quotient off by one", "a wrong symbol"])
def test_a_wrong_fit_is_not_taken(monkeypatch, kind) -> None:
    if kind == "a wrong symbol":
        monkeypatch.setattr(module, "_as_quotient", lambda expr, _: next(iter(expr.free_symbols)))
    else:
        right = module._line
        monkeypatch.setattr(
            module, "_line", lambda *args: right(*args) and (*right(*args)[:1], 0, right(*args)[2])
        )
    expr = same_padding(S)
    assert shorter(expr, (("s0", H),)) is expr


class Same(torch.nn.Module):
    """Convolutions with TensorFlow's padding, as in timm."""

    def __init__(self, count: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convs = torch.nn.ModuleList(
            torch.nn.Conv2d(3, 3, 5 if n % 2 else 3, 2) for n in range(count)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for conv in self.convs:
            (k, _), (h, w) = conv.kernel_size, x.shape[-2:]
            pads = [max((-(n // -2) - 1) * 2 + k - n, 0) for n in (h, w)]
            left = [pads[1] // 2, pads[1] - pads[1] // 2, pads[0] // 2, pads[0] - pads[0] // 2]
            x = conv(functional.pad(x, left))
        return x


def spec_of(count: int) -> ModelSpec:
    return ModelSpec(
        "same", lambda _: Same(count), (Input("x", (Dim("b", 1, 2, 3), 3, HIGH, WIDE)),),
        (Output("y"),), Tolerance(1e-4, 1e-5, "a test"),
    )  # fmt: skip


def differing(spec, run) -> int:
    """The number of sizes at which the numbers differ: every residue of 32, and the ends."""
    net, wrong = spec.build(None).eval(), 0
    for h in [*range(17, 50), 79, 80]:
        x = spec.sample({"b": 1 + h % 3, "h": h, "w": 18 + (7 * h) % 55}, 3)["x"]
        with torch.no_grad():
            want = net(torch.from_numpy(x)).numpy()
        got = run(x)
        wrong += got.shape != want.shape or not np.allclose(got, want, rtol=1e-4, atol=1e-5)
    return wrong


def test_in_onnx_runtime_at_every_residue(tmp_path) -> None:
    spec = spec_of(4)
    done = export(spec, None, tmp_path / "m.onnx")
    assert done.spec.dims == spec.dims
    session = onnxruntime.InferenceSession(str(done.path))
    assert differing(spec, lambda x: session.run(None, {"x": x})[0]) == 0


def test_a_wrong_one_would_show_in_the_numbers(monkeypatch) -> None:
    """The left padding is 1 at odd sizes and 0 at even sizes. The example has odd sizes."""
    spec = spec_of(1)
    pads: list[str] = []

    def wrong(expr, symbols):
        if numbers_of(expr) == {0, 1}:
            pads.append(str(expr))
            return sympy.Integer(1)
        return shorter(expr, symbols)

    def numbers_of(expr) -> set[int]:
        if expr.is_Relational or expr.is_Boolean or len(expr.free_symbols) != 1:
            return set()
        (symbol,) = expr.free_symbols
        return {int(expr.xreplace({symbol: sympy.Integer(n)})) for n in range(18, 73)}

    def differing_with(function) -> int:
        monkeypatch.setattr(module, "shorter", function)
        monkeypatch.setattr(module, "_LONG", 5)
        program = torch_call.torch_export(
            Task(spec, spec.build(None).eval(), 0, Stopwatch()),
            {"b": 2, "h": 41, "w": 43},
            relaxed=True,
        ).program
        return differing(spec, lambda x: program.module()(torch.from_numpy(x)).detach().numpy())

    assert differing_with(shorter) == 0
    assert differing_with(wrong) > 0
    assert len(pads) >= 2


def test_it_is_undone() -> None:
    with pytest.raises(ZeroDivisionError), short_sizes({}), short_sizes({}):
        assert SymNode.__init__ is not TORCHS
        raise ZeroDivisionError
    assert SymNode.__init__ is TORCHS

    entered, left = threading.Event(), threading.Event()

    def other() -> None:
        with short_sizes({}):
            entered.set()
            left.wait(10)

    thread = threading.Thread(target=other)
    with short_sizes({}):
        thread.start()
        assert entered.wait(10)
    assert SymNode.__init__ is not TORCHS  # the graph still has the other one
    left.set()
    thread.join()
    assert SymNode.__init__ is TORCHS


class Counted(torch.nn.Module):
    """A size that depends only on the data, in a long expression."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n = x.flatten().nonzero().shape[0]
        return x.new_zeros(max(0, 0) + (n + 3) // 2 * 2 + (n + 1) // 3 + (n + 5) // 7)


def test_what_only_the_data_decide_is_left_alone() -> None:
    inputs, outputs = (Input("x", (3, HIGH)),), (Output("y"),)
    spec = ModelSpec("m", lambda _: Counted(), inputs, outputs, Tolerance(1e-4, 1e-5, "a test"))
    task = Task(spec, Counted(), 0, Stopwatch())
    program = torch_call.torch_export(task, {"h": 41}).program
    (shape,) = (n.args[0][0].meta["val"].shape for n in program.graph.nodes if n.op == "output")
    assert "u0" in str(shape[0])
    assert str(shape[0].node.expr).count("//") == 3


def test_torch_alone_takes_many_times_longer(monkeypatch) -> None:
    spec, seconds = spec_of(3), {}
    net = spec.build(None).eval()
    for way in ("warm", "short", "torch"):
        if way == "torch":
            pieces = tuple(piece for piece in torch_2_13.PIECES if piece.name != "short_sizes")
            monkeypatch.setattr(torch_2_13, "PIECES", pieces)
        start = time.process_time()
        with contextlib.suppress(ExportError if way == "torch" else ()):  # "not all values of h"
            torch_call.torch_export(Task(spec, net, 0, Stopwatch()), {"b": 2, "h": 41, "w": 38})
        seconds[way] = time.process_time() - start
    print(seconds)
    assert seconds["torch"] > 3 * seconds["short"], (
        f"torch {torch.__version__} is as fast without the piece 'short_sizes': delete it"
    )
