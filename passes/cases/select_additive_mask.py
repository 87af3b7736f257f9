"""Attention with one query, as in decoding, with a mask that is added to the scores."""

from __future__ import annotations

from pipeline.passes.case import Case, Kind

_LOW = "{-3.4028234663852886e38}"
_NO_KERNEL = "build: Could not find any implementation for node {ForeignNode[...]}"


def _case(
    name: str,
    body: str,
    constant: str = _LOW,
    kind: Kind = "positive",
    queries: int | str = 1,
    not_for: str = "",
) -> Case:
    """Attention with 4 heads. `body` computes the weights p from scores and a mask [b, t]."""
    text = (
        f"(float[b,4,{queries},8] q, float[b,4,t,8] k, float[b,4,t,8] v, int64[b,t] mask) => "
        f"(float[b,4,{queries},8] y) "
        f"<float zero = {{0}}, float c = {constant}, int64[2] axes = {{1, 2}}, "
        "int64[1] axes1 = {1}, int64[1] three = {3}> "
        "{ kt = Transpose<perm=[0,1,3,2]>(k) scores = MatMul(q, kt) some = Cast<to=9>(mask) "
        f"on = Unsqueeze(some, axes) {body} y = MatMul(p, v) }}"
    )
    shapes = tuple(
        {
            "q": (b, 4, queries if isinstance(queries, int) else s, 8),
            "k": (b, 4, t, 8),
            "v": (b, 4, t, 8),
            "mask": (b, t),
        }
        for b, s, t in ((2, 1, 7), (3, 2, 20), (8, 5, 101))
    )
    reason = "may reach other rows of the batch" if kind == "refusal" else ""
    known = {"tensorrt-8.6": not_for} if not_for else {}
    return Case("select_additive_mask", name, kind, text, shapes, reason, not_for=known)


_ADD = "m = Where(on, zero, c) s = Add(scores, m) p = Softmax<axis=-1>(s)"

CASES: tuple[Case, ...] = (
    _case("the lowest float", _ADD),
    _case("minus infinity", _ADD, "{-inf}"),
    _case("minus 10000", _ADD, "{-10000}"),
    _case("mask first", "m = Where(on, zero, c) s = Add(m, scores) p = Softmax<axis=-1>(s)"),
    _case("other way round",
          "off = Not(on) m = Where(off, c, zero) s = Add(scores, m) p = Softmax<axis=-1>(s)"),
    _case("read twice", "m = Where(on, zero, c) s0 = Add(scores, m) w = Softmax<axis=-1>(s0) "
          "z = Abs(scores) t = Add(z, m) u = Softmax<axis=-1>(t) p = Add(w, u)", "{-10000}"),
    _case("any number of queries", _ADD, queries="s"),
    _case("neither branch 0", "one = Constant<value_float=1.0>() m = Where(on, one, c) "
          "s = Add(scores, m) p = Softmax<axis=-1>(s)", "{-10000}"),
    _case("no softmax", "m = Where(on, zero, c) p = Add(scores, m)", "{-2}",
          not_for=_NO_KERNEL),
    _case("moved on its way", "m0 = Where(some, zero, c) m1 = Unsqueeze(m0, axes) "
          "m2 = Cast<to=1>(m1) m = Identity(m2) s0 = Add(scores, m) s = Cast<to=1>(s0) "
          "p = Softmax<axis=-1>(s)"),
    _case("zeros of the mask's shape", "n = Shape(on) z = Expand(zero, n) m = Where(on, z, c) "
          "s = Add(scores, m) p = Softmax<axis=-1>(s)"),
    _case("filled zeros", "n = Shape(on) n4 = Shape(scores) z = ConstantOfShape(n) "
          "m0 = Where(on, z, c) m1 = Expand(m0, n4) m = Reshape(m1, n4) s = Add(scores, m) "
          "p = Softmax<axis=-1>(s)"),
    _case("zeros of another shape", "n = Shape(scores) z = Expand(zero, n) m = Where(on, z, c) "
          "s = Add(scores, m) p = Softmax<axis=-1>(s)", kind="refusal"),
    _case("a part of a longer mask", "long = Concat<axis=-1>(on, on) m0 = Where(long, zero, c) "
          "n0 = Shape(mask) n = Gather<axis=0>(n0, axes1) first = Sub(axes1, axes1) "
          "m = Slice(m0, first, n, three) s = Add(scores, m) p = Softmax<axis=-1>(s)"),
    _case("a sum of two masks", "n0 = ReduceMax<keepdims=1>(mask) off = Less(mask, n0) "
          "o = Unsqueeze(off, axes) m0 = Where(on, zero, c) m1 = Where(o, zero, c) "
          "m = Add(m0, m1) s = Add(scores, m) p = Softmax<axis=-1>(s)"),
    _case("a sum of a mask and a bias", "f = Cast<to=1>(mask) b = Unsqueeze(f, axes) "
          "m0 = Where(on, zero, c) m1 = Cast<to=1>(m0) m = Add(b, m1) s = Add(scores, m) "
          "p = Softmax<axis=-1>(s)", "{-10000}", "refusal"),
    _case("one after the other", "n0 = ReduceMax<keepdims=1>(mask) off = Less(mask, n0) "
          "o = Unsqueeze(off, axes) m0 = Where(on, zero, c) m1 = Where(o, zero, c) "
          "s0 = Add(scores, m0) s = Add(s0, m1) p = Softmax<axis=-1>(s)"),
    _case("a sum that is read elsewhere", "m0 = Where(on, zero, c) o = Not(on) "
          "m1 = Where(o, zero, c) m = Add(m0, m1) s = Add(scores, m) w = Softmax<axis=-1>(s) "
          "v0 = Mul(m, zero) p = Add(w, v0)", "{-10000}", "refusal"),
    _case("a sum of masks that cancel", "one = Constant<value_float=10000.0>() o = Not(on) "
          "m0 = Where(on, zero, one) m1 = Where(o, zero, c) m = Add(m0, m1) s = Add(scores, m) "
          "p = Softmax<axis=-1>(s)", "{-10000}"),
    _case("a sum without a mask", "f = Cast<to=1>(mask) b = Unsqueeze(f, axes) m = Add(b, c) "
          "s = Add(scores, m) p = Softmax<axis=-1>(s)", "{-2}", "refusal"),
    _case("a cast that rounds", "d0 = Constant<value = double {0.0}>() "
          "d1 = Constant<value = double {-0.1}>() m0 = Where(on, d0, d1) m = Cast<to=1>(m0) "
          "s = Add(scores, m) p = Softmax<axis=-1>(s)", "{-10000}", "refusal"),
    _case("selects already", "s = Where(on, scores, c) p = Softmax<axis=-1>(s)", kind="near miss"),
    _case("a product of the mask", "f = Cast<to=1>(on) m = Mul(f, c) s = Add(scores, m) "
          "p = Softmax<axis=-1>(s)", "{-10000}", "refusal"),
    _case("a product of the mask, eight queries", "f = Cast<to=1>(on) m = Mul(f, c) "
          "s = Add(scores, m) p = Softmax<axis=-1>(s)", "{-10000}", "near miss", 8),
    _case("a product of the mask, any number of queries", "f = Cast<to=1>(on) m = Mul(f, c) "
          "eight = Constant<value_float=8.0>() scaled = Div(scores, eight) "
          "s = Add(scaled, m) p = Softmax<axis=-1>(s)",
          "{-10000}", "refusal", "s"),
    _case("neither softmax nor product behind", "m = Where(on, zero, c) s = Add(scores, m) "
          "p = Sigmoid(s)", "{-2}", "near miss", not_for=_NO_KERNEL),
    _case("a branch that varies", "low = Mul(scores, c) m = Where(on, zero, low) "
          "s = Add(scores, m) p = Softmax<axis=-1>(s)", "{-2}", "refusal"),
    _case("a bias before the scale", "f = Cast<to=1>(mask) b = Unsqueeze(f, axes) "
          "eight = Constant<value_float=8.0>() biased = Add(scores, b) scaled = Div(biased, eight) "
          "m = Where(on, zero, c) s = Add(scaled, m) p = Softmax<axis=-1>(s)", kind="refusal"),
    _case("a constant bias", "bias = Constant<value = float[1,4,1,1] {0.5, -0.5, 1.0, -1.0}>() "
          "s = Add(scores, bias) p = Softmax<axis=-1>(s)", kind="near miss"),
    _case("more masks than are selected", "n0 = ReduceMax<keepdims=1>(mask) off = Less(mask, n0) "
          "o = Unsqueeze(off, axes) o1 = Not(on) m0 = Where(on, zero, c) m1 = Where(o, zero, c) "
          "m2 = Where(o1, zero, c) m3 = Add(m0, m1) m = Add(m3, m2) s = Add(scores, m) "
          "p = Softmax<axis=-1>(s)", "{-10}", "refusal"),
)  # fmt: skip
