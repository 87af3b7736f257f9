"""decompose_mod: the same remainder for every sign, and no size that seems negative."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import pytest
from pass_harness import PASSES, apply, own, run

P = PASSES["decompose_mod"]


def remainders(divisor: int, dtype: str) -> onnx.ModelProto:
    """``Mod(shift - h, divisor)`` and ``Mod(h - shift, divisor)`` of a size h."""
    cast = "" if dtype == "int64" else "<to=6>"
    op = "Cast" if cast else "Identity"
    return onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 18]> '
        f"g (float[h] x, {dtype}[1] shift) => ({dtype}[1] a, {dtype}[1] b) "
        f"<{dtype} k = {{{divisor}}}> {{ s = Shape(x) h = {op}{cast}(s) "
        "p = Sub(shift, h) q = Sub(h, shift) n = Neg(q) a = Mod(p, k) b = Mod(q, k) }"
    )


@pytest.mark.parametrize("dtype", ["int64", "int32"])
@pytest.mark.parametrize("divisor", [1, 2, 7, 8, -1, -3, -8])
def test_every_dividend_gives_the_remainder_of_the_standard(divisor: int, dtype: str) -> None:
    source = remainders(divisor, dtype)
    after, result = apply(P, source)
    assert len(result.rewritten) == 2
    for shift in (0, 1, 7, 8, 9, 20, 1000, 2**31 - 1 if dtype == "int32" else 2**40):
        feeds = {"x": np.zeros(9, np.float32), "shift": np.array([shift], dtype)}
        want = [np.mod(shift - 9, divisor), np.mod(9 - shift, divisor)]
        for model in (source, after):
            assert [int(value[0]) for value in run(model, feeds)] == want


def test_a_wrong_constant_is_noticed() -> None:
    """With a nonzero number where the remainder is 0, exact multiples are wrong."""
    (case,) = (c for c in own("decompose_mod", "positive") if "as torch writes it" in c.name)
    after, _ = apply(P, case.model())
    zero = next(t for t in after.graph.initializer if t.name.endswith("/zero"))
    zero.CopyFrom(onnx.numpy_helper.from_array(np.array(8), zero.name))
    feeds = case.feeds(case.shapes[0])
    assert run(case.model(), feeds)[0].shape != run(after, feeds)[0].shape


def test_a_negated_dividend_is_not_negated_again() -> None:
    (case,) = (c for c in own("decompose_mod", "positive") if "as torch writes it" in c.name)
    after, _ = apply(P, case.model())
    source = case.model()
    for node in after.graph.node:
        if node.op_type == "Mod":
            (sizes,) = {n.output[0] for n in source.graph.node if n.output[0] == node.input[0]}
            assert sizes in ("h", "w")
