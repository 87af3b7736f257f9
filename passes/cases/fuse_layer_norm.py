"""Layer norms as exporters write them, and other norms.

The half-precision inputs stay near 1, where the unchanged chain is right too.
"""

from __future__ import annotations

from typing import Any

from pipeline.passes.case import Case, Kind

_SHAPES = tuple({"x": (n, s, 4)} for n, s in ((1, 2), (2, 5), (3, 9)))
_ONES = {
    "float": ("0.5, 1.5, -2, 3", "0.25, -1, 3, 0.5", "2", "0.01"),
    # the same numbers as half-precision bits
    "float16": ("14336, 15872, 49152, 16896", "13312, 48128, 16896, 14336", "16384", "8479"),
}
_TAIL = "n = Div(d, s) g = Mul(n, a) y = Add(g, b)"


def _means(opset: int) -> str:
    if opset < 18:
        return "m = ReduceMean<axes = [-1]>(x) d = Sub(x, m) {} v = ReduceMean<axes = [-1]>(q)"
    return "m = ReduceMean(x, last) d = Sub(x, m) {} v = ReduceMean(q, last)"


def _norm(name: str, kind: Kind = "positive", dtype: str = "float", **more: Any) -> Case:
    a, b, two, epsilon = _ONES[dtype]
    opset = more.get("opset", 18)
    square = more.pop("square", "q = Pow(d, two)")
    root = more.pop("root", "e = Add(v, eps) s = Sqrt(e)")
    tail = more.pop("tail", _TAIL)
    means = more.pop("means", _means(opset))
    extra = more.pop("extra", "")
    if kind == "positive" and dtype == "float16":
        # it builds on TensorRT-RTX; only a GPU shows that the squares overflow
        more["fails"] = {"rtx-1.7": "none"}
    text = (
        f"({dtype}[n,s,4] x) => ({dtype}[n,s,4] y) <int64[1] last = {{-1}},"
        f"{dtype}[4] a = {{{a}}}, {dtype}[4] b = {{{b}}}, {dtype} two = {{{two}}},"
        f"{dtype} eps = {{{epsilon}}}{extra}> {{ {means.format(square)} {root} {tail} }}"
    )
    return Case("fuse_layer_norm", name, kind, text, more.pop("shapes", _SHAPES), **more)


_INVERSE = "e = Add(eps, v) t = Sqrt(e) s = Reciprocal(t)"

CASES: tuple[Case, ...] = (
    _norm("opset 17", opset=17),
    _norm("opset 18, axes as input"),
    _norm("half", dtype="float16"),
    _norm("half, opset 17", dtype="float16", opset=17),
    _norm("square by Mul", square="q = Mul(d, d)"),
    _norm("centred twice", square="d2 = Sub(x, m) q = Pow(d2, two)"),
    _norm("no bias", tail="n = Div(d, s) y = Mul(n, a)"),
    _norm("neither scale nor bias", tail="y = Div(d, s)"),
    _norm("neither, in half", tail="y = Div(d, s)", dtype="float16"),
    _norm("inverse root", root=_INVERSE, tail="n = Mul(d, s) g = Mul(a, n) y = Add(b, g)"),
    _norm(
        "powers",
        root="e = Add(v, eps) s = Pow(e, half)",
        extra=", float half = {0.5}",
    ),
    _norm(
        "two axes",
        means="m = ReduceMean(x, both) d = Sub(x, m) {} v = ReduceMean(q, both)",
        tail="y = Div(d, s)",
        extra=", int64[2] both = {1, 2}",
        shapes=tuple({"x": (n, 3, 4)} for n in (1, 2, 5)),
        dims={"x": ("n", 3, 4), "y": ("n", 3, 4)},
    ),
    _norm(
        "scale that is used elsewhere",
        tail="n = Div(d, s) g = Mul(n, a) z = Add(n, g) y = Add(z, b)",
    ),
    Case(
        "fuse_layer_norm",
        "in the body of If",
        "positive",
        "(float[n,s,4] x, bool c) => (float[n,s,4] y) <float two = {2}, float eps = {0.01},"
        "int64[1] last = {-1}> { y = If(c) <then_branch = t () => (float[n,s,4] p) {"
        "m = ReduceMean(x, last) d = Sub(x, m) q = Pow(d, two) v = ReduceMean(q, last)"
        "e = Add(v, eps) s = Sqrt(e) p = Div(d, s) },"
        "else_branch = f () => (float[n,s,4] r) { r = Relu(x) }> }",
        tuple({**shapes, "c": ()} for shapes in _SHAPES),
    ),
    _norm("opset 16", "near miss", opset=16),
    _norm(
        "another axis",
        "near miss",
        means="m = ReduceMean(x, mid) d = Sub(x, m) {} v = ReduceMean(q, mid)",
        extra=", int64[1] mid = {1}",
    ),
    _norm("fourth power", "near miss", square="q = Pow(d, four)", extra=", float four = {4}"),
    _norm("root mean square", "near miss", square="q = Mul(x, x)"),
    _norm("no root", "near miss", root="s = Add(v, eps)"),
    _norm(
        "mean of something else",
        "near miss",
        means="r = Relu(x) m = ReduceMean(r, last) d = Sub(x, m) {} v = ReduceMean(q, last)",
    ),
    _norm(
        "variance over fewer axes",
        "near miss",
        means="m = ReduceMean(x, both) d = Sub(x, m) {} v = ReduceMean(q, last)",
        tail="y = Div(d, s)",
        extra=", int64[2] both = {1, 2}",
        shapes=tuple({"x": (n, 3, 4)} for n in (1, 2, 5)),
        dims={"x": ("n", 3, 4), "y": ("n", 3, 4)},
    ),
    _norm(
        "normalised size is dynamic",
        "near miss",
        tail="y = Div(d, s)",
        shapes=tuple({"x": (2, 3, c)} for c in (2, 4, 9)),
        dims={"x": ("n", "s", "c"), "y": ("n", "s", "c")},
    ),
    _norm(
        "double",
        "near miss",
        dtype="float",
        extra=", double dtwo = {2}",
        means="w = Cast<to = 11>(x) m = ReduceMean(w, last) d = Sub(w, m) q = Pow(d, dtwo)"
        " v = ReduceMean(q, last) {}",
        square="",
        root="s = Sqrt(v)",
        tail="n = Div(d, s) y = Cast<to = 1>(n)",
    ),
)
