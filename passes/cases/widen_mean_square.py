"""Squares in half precision: root mean square norms, norms over channels, and lengths.

The inputs stay near 1, where the half-precision form is right too.
"""

from __future__ import annotations

from typing import Any

from pipeline.passes.case import Case, Kind

_SHAPES = tuple({"x": (n, s, 4)} for n, s in ((1, 2), (2, 5), (3, 9)))
_PLANES = tuple({"x": s} for s in ((1, 4, 2, 2), (2, 4, 3, 5), (2, 4, 9, 7)))
# as half-precision bits: 2, 0.01 and 1
_CONSTANTS = "<float16 two = {16384}, float16 eps = {8479}, float16 one = {15360}"


def _case(name: str, body: str, kind: Kind = "positive", dims: str = "n,s,4", **more: Any) -> Case:
    dtype = more.pop("dtype", "float16")
    out = more.pop("out", dims)
    extra = more.pop("extra", ", int64[1] last = {-1}")
    text = f"({dtype}[{dims}] x) => ({dtype}[{out}] y) {_CONSTANTS}{extra}> {{ {body} }}"
    if kind == "positive":
        # it builds on TensorRT-RTX; only a GPU shows that the squares overflow
        more["fails"] = {"rtx-1.7": "none"}
    return Case("widen_mean_square", name, kind, text, more.pop("shapes", _SHAPES), **more)


_RMS = "m = ReduceMean<axes = [-1]>(q) e = Add(m, eps) r = Sqrt(e)"
_RMS_18 = "m = ReduceMean(q, last) e = Add(m, eps) r = Sqrt(e)"

CASES: tuple[Case, ...] = (
    _case("RMS norm, opset 13", f"q = Pow(x, two) {_RMS} y = Div(x, r)", opset=13),
    _case("RMS norm, opset 17", f"q = Mul(x, x) {_RMS} i = Reciprocal(r) y = Mul(x, i)", opset=17),
    _case("RMS norm, opset 18", f"q = Pow(x, two) {_RMS_18} i = Reciprocal(r) y = Mul(x, i)"),
    _case("one over the root", f"q = Pow(x, two) {_RMS_18} i = Div(one, r) y = Mul(x, i)"),
    _case(
        "power of minus a half",
        "q = Pow(x, two) m = ReduceMean(q, last) e = Add(m, eps) i = Pow(e, p) y = Mul(x, i)",
        # -0.5
        extra=", int64[1] last = {-1}, float16 p = {47104}",
    ),
    _case(
        "layer norm below opset 17",
        "u = ReduceMean<axes = [-1]>(x) d = Sub(x, u) q = Pow(d, two) "
        f"{_RMS} y = Div(d, r)",
        opset=16,
    ),
    _case(
        "norm over channels",
        "u = ReduceMean(x, ch) d = Sub(x, u) q = Pow(d, two) m = ReduceMean(q, ch) "
        "e = Add(m, eps) r = Sqrt(e) y = Div(d, r)",
        dims="n,4,h,w",
        shapes=_PLANES,
        extra=", int64[1] ch = {1}",
    ),
    _case(
        "instance norm by hand",
        "u = GlobalAveragePool(x) d = Sub(x, u) q = Mul(d, d) m = GlobalAveragePool(q) "
        "e = Add(m, eps) r = Sqrt(e) y = Div(d, r)",
        dims="n,4,h,w",
        shapes=_PLANES,
        extra="",
    ),
    _case(
        "sum of squares over its count",
        "q = Mul(x, x) m = ReduceSum(q, last) v = Div(m, four) r = Sqrt(v) y = Div(x, r)",
        # 4
        extra=", int64[1] last = {-1}, float16 four = {17408}",
    ),
    _case("length", "r = ReduceL2(x, last) e = Max(r, eps) y = Div(x, e)"),
    _case("ReduceSumSquare", "m = ReduceSumSquare(x, last) r = Sqrt(m) y = Div(x, r)"),
    _case("the mean is the result", "q = Mul(x, x) y = ReduceMean(q, last)", out="n,s,1"),
    _case(
        "square that is used elsewhere",
        f"q = Mul(x, x) {_RMS_18} z = Div(x, r) y = Add(z, q)",
    ),
    Case(
        "widen_mean_square",
        "in the body of If",
        "positive",
        "(float16[n,s,4] x, bool c) => (float16[n,s,4] y) <float16 eps = {8479},"
        "int64[1] last = {-1}> { y = If(c) <then_branch = t () => (float16[n,s,4] p) {"
        "q = Mul(x, x) m = ReduceMean(q, last) e = Add(m, eps) s = Sqrt(e) p = Div(x, s) },"
        "else_branch = f () => (float16[n,s,4] r) { r = Relu(x) }> }",
        tuple({**shapes, "c": ()} for shapes in _SHAPES),
    ),
    _case(
        "float32",
        "q = Mul(x, x) m = ReduceMean(q, last) r = Sqrt(m) y = Div(x, r)",
        "near miss",
        dtype="float",
    ),
    _case(
        "widened already",
        "z = Cast<to = 1>(x) q = Mul(z, z) m = ReduceMean(q, last) r = Sqrt(m) "
        "i = Cast<to = 10>(r) y = Div(x, i)",
        "near miss",
    ),
    _case("mean of a product", "t = Relu(x) q = Mul(x, t) y = ReduceMean(q, last)", "near miss",
          out="n,s,1"),
    _case("mean alone", "m = ReduceMean(x, last) y = Sub(x, m)", "near miss"),
)  # fmt: skip
