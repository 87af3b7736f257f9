"""Constant nodes that exporters leave."""

from __future__ import annotations

from pipeline.passes.case import Case

_X = ({"x": (1, 3, 4)}, {"x": (2, 3, 5)}, {"x": (5, 3, 9)})

CASES: tuple[Case, ...] = (
    Case(
        "fold_constants",
        "arithmetic of constants",
        "positive",
        "(float[n,3,m] x) => (float[n,3,m] y) <float a = {2.0}, float b = {3.0}>"
        "{ c = Mul(a, b) d = Sqrt(c) y = Mul(x, d) }",
        _X,
    ),
    Case(
        "fold_constants",
        "size of a static axis",
        "positive",
        "(float[n,3,m] x) => (float[n,m,3] y) <int64 one = {1}, int64[1] z = {0}, "
        "int64[1] first = {1}, int64[1] minus = {-1}> { s = Shape(x) "
        "t = Transpose<perm=[0,2,1]>(x) c = Gather(s, one) u = Unsqueeze(c, z) "
        "n = Slice(s, z, first) r = Concat<axis=0>(n, minus, u) y = Reshape(t, r) }",
        _X,
    ),
    Case(
        "fold_constants",
        "dead nodes",
        "positive",
        "(float[n,3,m] x) => (float[n,3,m] y) { d = Exp(x) e = Relu(d) y = Abs(x) }",
        _X,
    ),
    Case(
        "fold_constants",
        "axes as a Constant node",
        "positive",
        "(float[n,3,m] x) => (float[n,m] y) { a = Constant<value_ints=[1]>() "
        "y = ReduceSum<keepdims=0>(x, a) }",
        _X,
    ),
    Case(
        "fold_constants",
        "numbers as attributes of Constant nodes",
        "positive",
        "(float[n,3,m] x) => (float[n,3,m] y) { a = Constant<value_float=2.5>() b = Mul(x, a) "
        "c = Constant<value_floats=[1.5]>() y = Add(b, c) }",
        _X,
    ),
    Case(
        "fold_constants",
        "in a branch of If",
        "positive",
        "(float[n,3,m] x, bool c) => (float[n,3,m] y) { y = If(c) <then_branch = t () => "
        "(float[n,3,m] p) { a = Constant<value = float {2.0}>() q = Exp(a) p = Mul(x, q) }, "
        "else_branch = e () => (float[n,3,m] r) { r = Relu(x) }> }",
        tuple({**shapes, "c": ()} for shapes in _X),
    ),
    Case(
        "fold_constants",
        "read in a body alone",
        "positive",
        "(float[n,3,m] x, bool c) => (float[n,3,m] y) { a = Constant<value = float {2.0}>() "
        "y = If(c) <then_branch = t () => (float[n,3,m] p) { p = Mul(x, a) }, "
        "else_branch = e () => (float[n,3,m] r) { r = Relu(x) }> }",
        tuple({**shapes, "c": ()} for shapes in _X),
    ),
    Case(
        "fold_constants",
        "some static sizes",
        "positive",
        "(float[n,3,4,5] x, float[m] v) => (float[p,q,m] y) "
        "<int64[2] last = {1, 2}, int64[1] minus = {-1}> { s = Shape<start=1>(x) "
        "two = Gather(s, last) t = Shape(v) c = Concat<axis=0>(two, t) y = Expand(v, c) }",
        ({"x": (1, 3, 4, 5), "v": (2,)}, {"x": (3, 3, 4, 5), "v": (7,)}),
    ),
    Case(
        "fold_constants",
        "a slice of some static sizes",
        "positive",
        "(float[n,3,4,5] x) => (int64[2] y) <int64[1] a = {0}, int64[1] b = {2}> "
        "{ s = Shape<start=1>(x) t = Slice(s, a, b) y = Neg(t) }",
        ({"x": (1, 3, 4, 5)}, {"x": (3, 3, 4, 5)}),
    ),
    Case(
        "fold_constants",
        "a size counted from the back, in a branch",
        "positive",
        "(float[n,3,4,5] x, bool c) => (int64[1] y) { y = If(c) <then_branch = t () => "
        "(int64[1] p) { s = Shape<start=-1>(x) p = Neg(s) }, else_branch = e () => (int64[1] r) "
        "{ u = Shape<start=1, end=2>(x) r = Neg(u) }> }",
        ({"x": (1, 3, 4, 5), "c": ()}, {"x": (3, 3, 4, 5), "c": ()}),
        not_for={"tensorrt-8.6": "build: conditionally dependent shape tensors not supported"},
    ),
    Case(
        "fold_constants",
        "a static shape that is an output",
        "near miss",
        "(float[2,3] x) => (int64[2] y, float[2,3] z) { y = Shape(x) z = Relu(x) }",
        ({"x": (2, 3)},),
    ),
    Case(
        "fold_constants",
        "dynamic sizes",
        "near miss",
        "(float[n,3,m] x) => (int64[1] y) { s = Shape<start=0, end=1>(x) y = Neg(s) }",
        _X,
    ),
    Case(
        "fold_constants",
        "half a size through floats",
        "near miss",
        "(float[n,3,m] x) => (float[k,2] y) <float half = {0.5}, int64[1] two = {2}, "
        "float z = {0.25}> { s = Shape<start=2, end=3>(x) f = Cast<to=1>(s) g = Mul(f, half) "
        "i = Cast<to=7>(g) c = Concat<axis=0>(i, two) y = Expand(z, c) }",
        _X,
    ),
    Case(
        "fold_constants",
        "quantised weight",
        "near miss",
        "(float[n,3,m] x) => (float[n,3,m] y) <float s = {0.5}, int8 z = {0}, int8 w = {7}>"
        "{ f = DequantizeLinear(w, s, z) y = Mul(x, f) }",
        _X,
        not_for={"tensorrt-8.6": "build: int8 is not configured in the builder (no INT8 flag)"},
    ),
    Case(
        "fold_constants",
        "an output that is constant",
        "near miss",
        "(float[n,3,m] x) => (float[n,3,m] y, float e) <float a = {2.0}> "
        "{ e = Exp(a) y = Relu(x) }",
        _X,
    ),
    Case(
        "fold_constants",
        "large Expand of a constant",
        "near miss",
        "(float[n,3,m] x) => (float[n,3,m] y, float[400000] e) "
        "<float a = {2.0}, int64[1] k = {400000}> { e = Expand(a, k) y = Relu(x) }",
        _X[:2],
    ),
)
