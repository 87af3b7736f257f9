"""Floor divisions by negative numbers, which torch merges in the wrong direction."""

from __future__ import annotations

import threading

import pytest
import sympy
import torch
from torch.utils._sympy.functions import FloorDiv

from pipeline.export.torch_2_13.negative_divisors import positive_divisors

S = sympy.Symbol("s0", integer=True, positive=True)
SIZES = list(range(9, 30))


def numbers(expr: sympy.Expr) -> list[int]:
    return [int(expr.xreplace({S: sympy.Integer(n)})) for n in SIZES]


def test_rounding_up_by_a_negative_divisor() -> None:
    half = FloorDiv(S, 2)
    right = [n // 2 // -2 for n in SIZES]
    assert numbers(FloorDiv(half, -2)) != right, (
        f"torch {torch.__version__} no longer needs the piece 'negative_divisors': delete it"
    )
    with positive_divisors():
        assert numbers(FloorDiv(half, -2)) == right
    assert numbers(FloorDiv(half, -2)) != right  # torch's function again


class Rounded(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.new_zeros(-(x.shape[1] // 2 // -2))


def test_what_torch_kept_from_an_earlier_export_is_forgotten() -> None:
    """`SymNode` caches the result of each operation for the whole process."""

    def size() -> str:
        shapes = ({1: torch.export.Dim.DYNAMIC(min=20, max=60)},)
        program = torch.export.export(Rounded(), (torch.zeros(3, 31),), dynamic_shapes=shapes)
        (output,) = (n.args[0][0] for n in program.graph.nodes if n.op == "output")
        return str(output.meta["val"].shape[0])

    torchs = size()
    assert torchs.count("//") == 1
    with positive_divisors():
        assert size().count("//") == 2
    assert size().count("//") == 1


def test_it_is_undone_by_the_last_user() -> None:
    def own() -> object:
        return FloorDiv.__dict__["eval"].__func__

    torchs = own()
    with pytest.raises(ZeroDivisionError), positive_divisors(), positive_divisors():
        assert own() is not torchs
        raise ZeroDivisionError
    assert own() is torchs

    entered, left = threading.Event(), threading.Event()

    def other() -> None:
        with positive_divisors():
            entered.set()
            left.wait(10)

    thread = threading.Thread(target=other)
    with positive_divisors():
        thread.start()
        assert entered.wait(10)
    assert own() is not torchs  # the graph still has the other division
    left.set()
    thread.join()
    assert own() is torchs
