"""Sign and Pow of integers, at negative numbers too."""

from __future__ import annotations

from typing import Any

from pipeline.passes.case import Case, Kind

_X = ({"x": (2, 3)}, {"x": (5, 40)})
_RANGE = {"x": (-9, 10)}


def _case(name: str, body: str, dtype: str = "int64", kind: Kind = "positive", **more: Any) -> Case:
    text = f"({dtype}[n,m] x) => ({dtype}[n,m] y) {body}"
    if dtype.startswith("int"):
        more = {"ranges": _RANGE, **more}
    return Case("expand_integer_ops", name, kind, text, _X, **more)


CASES: tuple[Case, ...] = (
    _case("Sign of int64", "{ y = Sign(x) }"),
    _case("Sign of int32, opset 13", "{ y = Sign(x) }", "int32", opset=13),
    _case("Sign as DeBERTa uses it", "{ s = Sign(x) a = Abs(x) y = Mul(s, a) }"),
    _case("Pow by 2", "<int64 k = {2}> { y = Pow(x, k) }"),
    _case("Pow of int32 by 5.0", "<float k = {5.0}> { y = Pow(x, k) }", "int32"),
    _case("Pow by 1", "<int64 k = {1}> { y = Pow(x, k) }"),
    _case(
        "Pow by 8 within If",
        """<int64 k = {8}, bool c = {1}> {
        d = ReduceMin<keepdims=0>(x) z = Sub(d, d) t = Equal(z, d) y = If(t) <
        then_branch = t () => (int64[n,m] p) { p = Pow(x, k) },
        else_branch = e () => (int64[n,m] q) { q = Neg(x) }> }""",
    ),
    _case("Sign of floats", "{ y = Sign(x) }", "float", "near miss"),
    _case("Pow of floats", "<float k = {2.0}> { y = Pow(x, k) }", "float", "near miss"),
    _case("Pow by 0", "<int64 k = {0}> { y = Pow(x, k) }", kind="refusal", reason="from 1 to 64"),
    _case(
        "Pow by a tensor",
        "{ k = Abs(x) y = Pow(x, k) }",
        kind="refusal",
        reason="one constant exponent",
        ranges={"x": (0, 3)},
    ),
)
