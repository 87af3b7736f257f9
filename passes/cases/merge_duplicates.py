"""Duplicate nodes, and near misses."""

from __future__ import annotations

from pipeline.passes.case import Case

_X = ({"x": (1, 3, 4)}, {"x": (2, 3, 5)}, {"x": (5, 3, 9)})

CASES: tuple[Case, ...] = (
    Case(
        "merge_duplicates",
        "sizes read twice",
        "positive",
        "(float[n,3,m] x) => (int64[1] y) { a = Shape<start=2, end=3>(x) "
        "b = Shape<start=2, end=3>(x) y = Add(a, b) }",
        _X,
    ),
    Case(
        "merge_duplicates",
        "chains",
        "positive",
        "(float[n,3,m] x) => (float[n,3,m] y) { a = Relu(x) b = Exp(a) c = Relu(x) d = Exp(c) "
        "y = Add(b, d) }",
        _X,
    ),
    Case(
        "merge_duplicates",
        "both are outputs",
        "positive",
        "(float[n,3,m] x) => (float[n,3,m] y, float[n,3,m] z) { y = Relu(x) z = Relu(x) }",
        _X,
    ),
    Case(
        "merge_duplicates",
        "read in a branch",
        "positive",
        "(float[n,3,m] x, bool c) => (float[n,3,m] y) { a = Relu(x) b = Relu(x) y = If(c) <"
        "then_branch = t () => (float[n,3,m] p) { p = Exp(a) }, "
        "else_branch = e () => (float[n,3,m] r) { r = Neg(b) }> }",
        tuple({**shapes, "c": ()} for shapes in _X),
    ),
    Case(
        "merge_duplicates",
        "two draws",
        "near miss",
        "(float[n,3,m] x) => (float[n,3,m] y) <float one = {1.0}> { a = Sign(x) "
        "b = Clip(a, one, one) c = Bernoulli(b) d = Bernoulli(b) y = Sub(c, d) }",
        _X,
        not_for={"tensorrt-8.6": "it has no Bernoulli: refuse_unsupported"},
    ),
    Case(
        "merge_duplicates",
        "other attributes",
        "near miss",
        "(float[n,3,m] x) => (int64[1] y) { a = Shape<start=0, end=1>(x) "
        "b = Shape<start=2, end=3>(x) y = Add(a, b) }",
        _X,
    ),
    Case(
        "merge_duplicates",
        "other order of inputs",
        "near miss",
        "(float[n,3,m] x, float[n,3,m] z) => (float[n,3,m] y) "
        "{ a = Sub(x, z) b = Sub(z, x) y = Mul(a, b) }",
        tuple({"x": s["x"], "z": s["x"]} for s in _X),
    ),
)
