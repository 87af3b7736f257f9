"""`If` as exporters write it for choices of Python: squeeze, rank checks, static sizes."""

from __future__ import annotations

from typing import Any

from pipeline.passes.case import Case, Failure, Kind, Shapes

_IMAGES = ({"x": (1, 3, 5, 4)}, {"x": (2, 3, 8, 7)})
_ROWS = ({"x": (5, 3, 2)}, {"x": (8, 3, 2)})
_IMAGE = "float[n,3,h,w]"


def _choice(then: str, other: str, type_then: str = _IMAGE, type_else: str = _IMAGE) -> str:
    return (
        f"<then_branch = tb () => ({type_then} tt) {{ {then} }}, "
        f"else_branch = eb () => ({type_else} ee) {{ {other} }}>"
    )


def _case(
    name: str,
    kind: Kind,
    text: str,
    shapes: tuple[Shapes, ...] = _IMAGES,
    fails: Failure = "none",
    **more: Any,
) -> Case:
    return Case("fold_if", name, kind, text, shapes, fails={"rtx-1.7": fails}, **more)


_NONZERO = "z = NonZero(x) f = Cast<to=1>(z) g = ReduceSum(f) ee = Add(x, g)"
_MISFIT = _choice("tt = Reshape(v, shape)", "ee = Identity(v)", "float[p,q]", "float[p,q,r]")
_RESHAPED = _choice("tt = Identity(v)", "ee = Reshape(v, shape)", "float[p,q,r]", "float[p,q]")

CASES: tuple[Case, ...] = (
    _case(
        "static dim, NonZero in the dead branch",
        "positive",
        f"({_IMAGE} x) => ({_IMAGE} y) <int64 one = {{1}}, int64 three = {{3}}> {{"
        "s = Shape(x) d = Gather(s, one) c = Equal(d, three) "
        f"y = If(c) {_choice('tt = Relu(x)', _NONZERO)} }}",
        fails="parse",
    ),
    _case(
        "squeeze of a dim that is 2, as TorchScript writes it",
        "positive",
        "(float[a,3,2] x) => (float[a,3,2] y) <int64[1] axis = {2}, int64[2] shape = {7, -1}> {"
        "v = Relu(x) s = Shape(v) d = Gather<axis=0>(s, axis) one = Constant<value=int64[1] {1}>() "
        f"c = Equal(d, one) y = If(c) {_MISFIT} }}",
        _ROWS,
        fails="build",
        opset=13,
    ),
    _case(
        "a size compared with itself",
        "positive",
        "(float[a,3,b] x) => (float[a,3,b] y) <int64 two = {2}, int64[2] shape = {7, -1}> {"
        "v = Relu(x) s = Shape(x) d = Gather(s, two) t = Shape(v) e = Gather(t, two) "
        f"c = Equal(d, e) y = If(c) {_RESHAPED} }}",
        ({"x": (5, 3, 2)}, {"x": (8, 3, 4)}),
        fails="build",
    ),
    _case(
        "float constants compared",
        "positive",
        "(float[a,3,2] x) => (float[a,3,2] y) "
        "<float a0 = {2.5}, float one = {1}, int64[2] shape = {2, -1}> {"
        f"c = Greater(a0, one) v = Relu(x) y = If(c) {_RESHAPED} }}",
        _ROWS,
        fails="build",
    ),
    _case(
        "rank check",
        "positive",
        f"({_IMAGE} x) => ({_IMAGE} y) <int64 four = {{4}}> {{ s = Shape(x) r = Size(s) "
        f"c = Equal(r, four) y = If(c) {_choice('tt = Relu(x)', 'ee = Neg(x)')} }}",
        opset=16,
    ),
    _case(
        "And with one side that decides",
        "positive",
        f"({_IMAGE} x, bool b) => ({_IMAGE} y) <bool no = {{0}}> {{ n = Not(b) a = And(n, no) "
        f"c = Or(a, no) y = If(c) {_choice('tt = Relu(x)', 'ee = Neg(x)')} }}",
        tuple({**shapes, "b": ()} for shapes in _IMAGES),
    ),
    _case(
        "all sizes equal, by a reduction",
        "positive",
        "(float[a,3,2] x) => (float[a,3,2] y) <int64[2] want = {3, 2}, int64[1] one = {1}, "
        "int64[1] three = {3}, int64[2] shape = {2, -1}> { s = Shape(x) d = Slice(s, one, three) "
        "e = Equal(d, want) f = Cast<to=6>(e) g = ReduceMin<keepdims=0>(f) c = Cast<to=9>(g) "
        f"v = Relu(x) y = If(c) {_RESHAPED} }}",
        _ROWS,
    ),
    _case(
        "nested, and both branches with the same names",
        "positive",
        f"({_IMAGE} x) => ({_IMAGE} y) <bool yes = {{1}}> {{ y = If(yes) "
        f"<then_branch = a () => ({_IMAGE} u) {{ t = Neg(x) no = Not(yes) u = If(no) "
        f"<then_branch = b () => ({_IMAGE} p) {{ k = Relu(t) p = Neg(k) }}, "
        f"else_branch = c () => ({_IMAGE} p) {{ k = Abs(t) p = Add(k, t) }}> }}, "
        f"else_branch = d () => ({_IMAGE} u) {{ t = Relu(x) u = Neg(t) }}> }}",
    ),
    _case(
        "in the body of Loop, with weights of its own, twice",
        "positive",
        f"({_IMAGE} x) => ({_IMAGE} y) <int64 three = {{3}}, bool yes = {{1}}> {{"
        f"y = Loop(three, yes, x) <body = b (int64 i, bool c, {_IMAGE} v) => "
        f"(bool d, {_IMAGE} u) {{ d = Identity(c) m = If(yes) "
        f"<then_branch = p () => ({_IMAGE} q) <float gain = {{0.5}}> {{ q = Mul(v, gain) }}, "
        f"else_branch = r () => ({_IMAGE} q) {{ q = Neg(v) }}> u = If(yes) "
        f"<then_branch = p2 () => ({_IMAGE} q) <float gain = {{0.25}}> {{ q = Mul(m, gain) }}, "
        f"else_branch = r2 () => ({_IMAGE} q) {{ q = Neg(m) }}> }}> }}",
    ),
    _case(
        "several outputs, some from outside",
        "positive",
        f"({_IMAGE} x) => ({_IMAGE} y, {_IMAGE} z, {_IMAGE} t) <bool no = {{0}}> {{ v = Relu(x) "
        f"y, z, t = If(no) <then_branch = a () => ({_IMAGE} p, {_IMAGE} q, {_IMAGE} r) "
        "{ p = Neg(v) q = Neg(p) r = Abs(v) }, "
        f"else_branch = b () => ({_IMAGE} p2, {_IMAGE} q2, {_IMAGE} r2) "
        "{ p2 = Identity(v) q2 = Neg(p2) r2 = Neg(q2) }> }",
    ),
    _case(
        "a constant condition around a live If",
        "positive",
        f"({_IMAGE} x, bool b) => ({_IMAGE} y) <bool yes = {{1}}> {{ y = If(yes) "
        f"<then_branch = a () => ({_IMAGE} u) {{ t = Neg(x) u = If(b) "
        f"<then_branch = p () => ({_IMAGE} q) {{ q = Relu(t) }}, "
        f"else_branch = r () => ({_IMAGE} q2) {{ q2 = Abs(t) }}> }}, "
        f"else_branch = d () => ({_IMAGE} w) {{ w = Relu(x) }}> }}",
        tuple({**shapes, "b": ()} for shapes in _IMAGES),
    ),
    _case(
        "the condition is an input",
        "near miss",
        f"({_IMAGE} x, bool c) => ({_IMAGE} y) "
        f"{{ y = If(c) {_choice('tt = Relu(x)', 'ee = Neg(x)')} }}",
        tuple({**shapes, "c": ()} for shapes in _IMAGES),
    ),
    _case(
        "a dynamic size decides",
        "near miss",
        f"({_IMAGE} x) => ({_IMAGE} y) <int64 two = {{2}}, int64 six = {{6}}> {{ s = Shape(x) "
        "d = Gather(s, two) c = Less(d, six) "
        f"y = If(c) {_choice('tt = Relu(x)', 'ee = Neg(x)')} }}",
    ),
    _case(
        "data decide",
        "near miss",
        f"({_IMAGE} x) => ({_IMAGE} y) <float zero = {{0}}> {{ m = ReduceMax<keepdims=0>(x) "
        f"c = Greater(m, zero) y = If(c) {_choice('tt = Relu(x)', 'ee = Neg(x)')} }}",
    ),
    _case(
        "float sizes decide",
        "near miss",
        f"({_IMAGE} x) => ({_IMAGE} y) <int64 two = {{2}}, float third = {{0.33333334}}, "
        "float one = {1}> { s = Shape(x) d = Gather(s, two) f = Cast<to=1>(d) g = Mul(f, third) "
        "e = Div(g, f) c = Less(e, third) "
        f"y = If(c) {_choice('tt = Relu(x)', 'ee = Neg(x)')} }}",
    ),
    _case(
        "squeeze of a dynamic dim, as TorchScript writes it",
        "refusal",
        "(float[n,c,6,5] x) => (float[n,d,6,5] y) { axis = Constant<value=int64[1] {1}>() "
        "s = Shape(x) d = Gather<axis=0>(s, axis) one = Constant<value=int64[1] {1}>() "
        "b = Equal(d, one) z = If(b) <then_branch = p () => (float[n,6,5] q) { "
        "ax = Constant<value=int64[1] {1}>() q = Squeeze(x, ax) }, "
        "else_branch = r () => (float[n,c,6,5] q2) { q2 = Identity(x) }> "
        "shape = Constant<value=int64[4] {0, -1, 6, 5}>() y = Reshape(z, shape) }",
        ({"x": (1, 2, 6, 5)}, {"x": (3, 4, 6, 5)}),
        fails="build",
        reason="Make that dim static",
        opset=17,
    ),
)
