"""Attention as exporters write it, and near misses."""

from __future__ import annotations

from typing import Any

from pipeline.passes.case import Case, Kind

# Q, K^T and V in 4-D: 2 heads of 4 channels
_QKV = "float[b,2,s,4] q, float[b,2,t,4] k, float[b,2,t,4] v"
_SIZES = ((1, 3, 3), (2, 1, 5), (3, 7, 4))
_SHAPES = tuple({"q": (b, 2, s, 4), "k": (b, 2, t, 4), "v": (b, 2, t, 4)} for b, s, t in _SIZES)
_KT = "kt = Transpose<perm=[0,1,3,2]>(k)"
_P = "p = Softmax<axis=-1>(m)"
_Y = "y = MatMul(p, v)"
_FULL = f"a = MatMul(q, kt) m = Mul(a, c) {_P} {_Y}"
# torch.export transposes K in 3-D and puts the root of the scale on both
_KT_3D = (
    "n = Shape(k) n2 = Slice(n, zero, two) k3 = Reshape(k, s3) "
    "u = Transpose<perm=[0,2,1]>(k3) n4 = Concat<axis=0>(n2, four, five) w = Reshape(u, n4)"
)
_BOTH = f"{_KT_3D} kt = Mul(w, r) qr = Mul(q, r) m = MatMul(qr, kt) {_P} {_Y}"
_INTS = "int64[1] zero = {0}, int64[1] one = {1}, int64[1] two = {2}, int64[1] four = {4}"
_TORCH = f"{_INTS}, int64[1] five = {{5}}, int64[3] s3 = {{-1, 5, 4}}"
_STATIC = tuple({"q": (b, 2, s, 4), "k": (b, 2, 5, 4), "v": (b, 2, 5, 4)} for b, s, _ in _SIZES)
_QKV_STATIC = "float[b,2,s,4] q, float[b,2,5,4] k, float[b,2,5,4] v"

# nn.MultiheadAttention: x [b,5,8], 2 heads, one in-projection
_W = ", ".join(f"{(n * 37 % 41 - 20) / 40:g}" for n in range(8 * 24))
_WO = ", ".join(f"{(n * 29 % 31 - 15) / 30:g}" for n in range(64))
_B = ", ".join(f"{n % 7 / 10 - 0.3:g}" for n in range(24))
_MHA = (
    f"{_TORCH}, float[8,24] w0 = {{{_W}}}, float[24] b0 = {{{_B}}}, float[8,8] wo = {{{_WO}}}, "
    "float[8] bo = {0.5, -1, 0, 1, 2, 0.1, -0.2, 3}, int64[4] s4 = {5, -1, 3, 8}, "
    "int64[1] back = {-2}, int64 i0 = {0}, int64 i1 = {1}, int64 i2 = {2}, "
    "int64[3] h3 = {5, -1, 4}, int64[4] h4 = {-1, 2, 5, 4}, int64[2] o2 = {-1, 8}, "
    "int64[3] o3 = {5, -1, 8}, float r = {0.70710678}"
)
_IN = (
    "x1 = Transpose<perm=[1,0,2]>(x) x2 = MatMul(x1, w0) x3 = Add(x2, b0) x4 = Reshape(x3, s4) "
    "x5 = Unsqueeze(x4, zero) x6 = Transpose<perm=[3,1,2,0,4]>(x5) x7 = Squeeze(x6, back) "
)
_HEADS = "".join(
    f"{name}0 = Gather<axis=0>(x7, i{n}) {name}1 = Reshape({name}0, h3) "
    f"{name}2 = Transpose<perm=[1,0,2]>({name}1) "
    for n, name in enumerate("qkv")
)
_TO_4D = "".join(f"{name} = Reshape({name}2, h4) " for name in "qkv")
_OUT = (
    "y0 = MatMul(p, v) y1 = Transpose<perm=[2,0,1,3]>(y0) y2 = Reshape(y1, o2) "
    "y3 = Gemm<transB=1>(y2, wo, bo) y4 = Reshape(y3, o3) y = Transpose<perm=[1,0,2]>(y4)"
)
_MHA_SHAPES = tuple({"x": (b, 5, 8)} for b in (1, 2, 5))

# 3-D: batch times heads as the first axis
_FLAT = "".join(
    f"{name}0 = Reshape({name}, split) {name}1 = Transpose<perm=[0,2,1,3]>({name}0) "
    f"{name}2 = Reshape({name}1, flat_{name}) "
    for name in "qkv"
)
_FLAT_SIZES = (
    "int64[4] split = {0, 0, 2, 4}, int64[3] flat_q = {-1, 3, 4}, int64[3] flat_k = {-1, 5, 4}, "
    "int64[3] flat_v = {-1, 5, 4}, int64[4] rise = {-1, 2, 3, 4}, int64[3] join = {0, 0, 8}, "
    "int64[4] scores4 = {-1, 2, 3, 5}, int64[3] scores3 = {-1, 3, 5}, float c = {0.5}"
)
_FLAT_QKV = "float[b,3,8] q, float[b,5,8] k, float[b,5,8] v"
_FLAT_KT = "kt = Transpose<perm=[0,2,1]>(k2) a = MatMul(q2, kt)"
_FLAT_Y = (
    "y0 = MatMul(p, v2) y1 = Reshape(y0, rise) y2 = Transpose<perm=[0,2,1,3]>(y1) "
    "y = Reshape(y2, join)"
)
_FLAT_SHAPES = tuple({"q": (b, 3, 8), "k": (b, 5, 8), "v": (b, 5, 8)} for b in (1, 2, 5))


def _case(
    name: str,
    body: str,
    constants: str = "float c = {0.5}",
    kind: Kind = "positive",
    **rest: Any,
) -> Case:
    """A case on Q, K and V in 4-D, or on other `inputs`, and on `more` of them."""
    inputs = rest.pop("inputs", _QKV) + rest.pop("more", "")
    outputs = rest.pop("outputs", "float[b,2,s,4] y")
    text = f"({inputs}) => ({outputs}) <{constants}> {{ {body} }}"
    return Case("shape_attention", name, kind, text, rest.pop("shapes", _SHAPES), **rest)


def _with(name: str, *shape: str | int, shapes: Any = _SHAPES) -> Any:
    """The shapes with one more input, of the sizes b, s, t or numbers."""
    return tuple(
        {
            **each,
            name: tuple(
                {"b": each["q"][0], "s": each["q"][2], "t": each["k"][2]}[d]
                if isinstance(d, str)
                else d
                for d in shape
            ),
        }
        for each in shapes
    )


def _mha(name: str, body: str, kind: Kind = "positive", **rest: Any) -> Case:
    more = {"inputs": "float[b,5,8] x", "outputs": "float[b,5,8] y", "shapes": _MHA_SHAPES}
    return _case(name, body, rest.pop("constants", _MHA), kind, **{**more, **rest})


def _flat(name: str, body: str, kind: Kind = "positive", **rest: Any) -> Case:
    more = {"inputs": _FLAT_QKV, "outputs": "float[b,3,8] y", "shapes": _FLAT_SHAPES}
    return _case(name, body, _FLAT_SIZES, kind, **{**more, **rest})


CASES: tuple[Case, ...] = (
    _case("scale after the product", f"{_KT} {_FULL}"),
    _case("divided after the product", f"{_KT} a = MatMul(q, kt) m = Div(a, c) {_P} {_Y}",
          "float[1] c = {2}"),
    _case("scale on K", f"{_KT} kc = Mul(kt, c) m = MatMul(q, kc) {_P} {_Y}"),
    _case("roots on both, K transposed in 3-D", _BOTH, f"{_TORCH}, float[1] r = {{0.70710678}}",
          inputs=_QKV_STATIC, shapes=_STATIC),
    _case("K transposed in 3-D",
          f"{_KT_3D} qc = Mul(q, c) m = MatMul(qc, w) {_P} {_Y}", f"{_TORCH}, float c = {{0.5}}",
          inputs=_QKV_STATIC, shapes=_STATIC),
    _case("the root of a size",
          f"{_KT} n = Shape<start=3, end=4>(q) f = Cast<to=1>(n) r = Sqrt(f) "
          f"a = MatMul(q, kt) m = Div(a, r) {_P} {_Y}", "float unused = {0}"),
    _case("the root of a size that only its Reshape tells",
          "n = Shape(x) b0 = Slice(n, zero, one) s0 = Slice(n, one, two) c0 = Slice(n, two, three) "
          "d0 = Div(c0, two) sizes = Concat<axis=0>(b0, s0, two, d0) h = Reshape(x, sizes) "
          "q = Transpose<perm=[0,2,1,3]>(h) kt = Transpose<perm=[0,2,3,1]>(h) hn = Shape(h) "
          "l = Slice(hn, three, four) f = Cast<to=1>(l) r = Sqrt(f) a = MatMul(q, kt) "
          f"m = Div(a, r) {_P} y0 = MatMul(p, q) y1 = Transpose<perm=[0,2,1,3]>(y0) "
          "y = Reshape(y1, join)",
          f"{_INTS}, int64[1] three = {{3}}, int64[3] join = {{0, 0, 8}}",
          inputs="float[b,s,8] x", outputs="float[b,s,8] y",
          shapes=tuple({"x": (b, s, 8)} for b, s, _ in _SIZES)),
    _case("half", f"{_KT} {_FULL}", "float16 c = {14336}",
          inputs=_QKV.replace("float", "float16"), outputs="float16[b,2,s,4] y"),
    _case("a mask after the scale",
          f"{_KT} a = MatMul(q, kt) m0 = Mul(a, c) m = Add(m0, mask) {_P} {_Y}",
          more=", float[b,1,s,t] mask", shapes=_with("mask", "b", 1, "s", "t")),
    _case("a mask of the keys",
          f"{_KT} a = MatMul(q, kt) m0 = Mul(a, c) m = Add(mask, m0) {_P} {_Y}",
          more=", float[t] mask", shapes=_with("mask", "t")),
    _case("a boolean mask and a guard against NaN",
          f"{_KT} a = MatMul(q, kt) m0 = Mul(a, c) m = Where(mask, m0, low) "
          f"p0 = Softmax<axis=-1>(m) bad = IsNaN(p0) p = Where(bad, zero, p0) {_Y}",
          "float c = {0.5}, float low = {-inf}, float zero = {0}",
          more=", bool[b,1,s,t] mask", shapes=_with("mask", "b", 1, "s", "t")),
    _case("a selected mask, which reads the scores twice",
          f"{_KT} a = MatMul(q, kt) m0 = Mul(a, c) m1 = Add(m0, low) "
          f"m = Where(mask, m0, m1) {_P} {_Y}",
          "float c = {0.5}, float low = {-10000}",
          more=", bool[1,2,s,t] mask", shapes=_with("mask", 1, 2, "s", "t")),
    _case("causal",
          f"{_KT} n = Shape(q) n1 = Gather<axis=0>(n, i) j = Range(o, n1, l) "
          "row = Unsqueeze(j, right) m1 = Shape(k) m2 = Gather<axis=0>(m1, i) h = Range(o, m2, l) "
          "on = GreaterOrEqual(row, h) "
          f"a = MatMul(q, kt) m0 = Mul(a, c) m = Where(on, m0, low) {_P} {_Y}",
          "int64 i = {2}, int64 o = {0}, int64 l = {1}, int64[1] right = {1}, "
          "float low = {-10000}, float c = {0.5}"),
    _case("scaled scores as an output", f"{_KT} {_FULL}",
          outputs="float[b,2,s,4] y, float[b,2,s,t] m"),
    _case("weights as an output", f"{_KT} {_FULL}", outputs="float[b,2,s,4] y, float[b,2,s,t] p"),
    _case("grouped queries",
          "k5 = Unsqueeze(k, two) n = Shape(k) n0 = Slice(n, zero, two) n1 = Slice(n, two, four) "
          "n5 = Concat<axis=0>(n0, two, n1) k6 = Expand(k5, n5) g = Mul(n0, grow) "
          "n4 = Concat<axis=0>(g, n1) k7 = Reshape(k6, n4) v5 = Unsqueeze(v, two) "
          "v6 = Expand(v5, n5) v7 = Reshape(v6, n4) kt = Transpose<perm=[0,1,3,2]>(k7) "
          f"a = MatMul(q, kt) m = Mul(a, c) {_P} y = MatMul(p, v7)",
          f"{_INTS}, float c = {{0.5}}, int64[2] grow = {{1, 2}}",
          inputs=_QKV.replace("b,2,s", "b,4,s"), outputs="float[b,4,s,4] y",
          shapes=tuple({**each, "q": (each["q"][0], 4, *each["q"][2:])} for each in _SHAPES)),
    _case("heads of a longer axis",
          "q0 = Reshape(q, h) q1 = Transpose<perm=[0,2,1,3]>(q0) "
          "kv1, kv2 = Split<axis=-1>(kv, parts) k0 = Reshape(kv1, h) "
          "k1 = Transpose<perm=[0,2,1,3]>(k0) kt = Transpose<perm=[0,1,3,2]>(k1) "
          "v0 = Reshape(kv2, h) v1 = Transpose<perm=[0,2,1,3]>(v0) "
          f"a = MatMul(q1, kt) m = Mul(a, c) {_P} y0 = MatMul(p, v1) "
          "y1 = Transpose<perm=[0,2,1,3]>(y0) y = Reshape(y1, o)",
          "float c = {0.5}, int64[4] h = {0, 0, 2, 4}, int64[3] o = {0, 0, 8}, "
          "int64[2] parts = {8, 8}",
          inputs="float[b,s,8] q, float[b,t,16] kv", outputs="float[b,s,8] y",
          shapes=tuple({"q": (b, s, 8), "kv": (b, t, 16)} for b, s, t in _SIZES)),
    _case("in a body",
          "y = If(f) <then_branch = m () => (float[b,2,s,4] y1) { "
          f"{_KT} {_FULL.replace('y = ', 'y1 = ')} }}, "
          "else_branch = n () => (float[b,2,s,4] y2) { y2 = Identity(q) }>",
          more=", bool f", shapes=tuple({**each, "f": ()} for each in _SHAPES)),
    _mha("nn.MultiheadAttention",
         f"{_IN}{_HEADS}{_TO_4D}{_BOTH.replace(_Y, _OUT)}"),
    _mha("nn.MultiheadAttention, a mask",
         f"{_IN}{_HEADS}{_TO_4D}"
         + _BOTH.replace("m = MatMul", "n0 = MatMul").replace(_P, f"m = Add(n0, mask) {_P}")
         .replace(_Y, _OUT),
         more=", float[5,5] mask", shapes=tuple({**each, "mask": (5, 5)} for each in _MHA_SHAPES)),
    _mha("nn.MultiheadAttention in 3-D",
         f"{_IN}{_HEADS} q = Mul(q2, c) kt = Transpose<perm=[0,2,1]>(k2) m = MatMul(q, kt) {_P} "
         "y0 = MatMul(p, v2) y1 = Transpose<perm=[1,0,2]>(y0) y2 = Reshape(y1, o2) "
         "y3 = Gemm<transB=1>(y2, wo, bo) y4 = Reshape(y3, o3) y = Transpose<perm=[1,0,2]>(y4)",
         constants=f"{_MHA}, float c = {{0.5}}"),
    _flat("3-D", f"{_FLAT}{_FLAT_KT} m = Mul(a, c) {_P} {_FLAT_Y}"),
    _flat("3-D, a mask for every head",
          f"{_FLAT}{_FLAT_KT} mask = Reshape(mask0, scores3) m0 = Mul(a, c) m = Add(m0, mask) "
          f"{_P} {_FLAT_Y}",
          more=", float[b,2,3,5] mask0",
          shapes=tuple({**each, "mask0": (each["q"][0], 2, 3, 5)} for each in _FLAT_SHAPES)),
    _flat("3-D, a mask for all heads",
          f"{_FLAT}{_FLAT_KT} m0 = Mul(a, c) m = Add(m0, mask) {_P} {_FLAT_Y}",
          more=", float[1,3,5] mask",
          shapes=tuple({**each, "mask": (1, 3, 5)} for each in _FLAT_SHAPES)),
    _flat("3-D, the mask in 4-D",
          f"{_FLAT}{_FLAT_KT} a4 = Reshape(a, scores4) m4 = Add(a4, mask) m = Reshape(m4, scores3) "
          f"{_P} {_FLAT_Y}",
          more=", float[b,1,3,5] mask",
          shapes=tuple({**each, "mask": (each["q"][0], 1, 3, 5)} for each in _FLAT_SHAPES)),
    _case("the form itself", f"{_KT} qc = Mul(q, c) m = MatMul(qc, kt) {_P} {_Y}",
          kind="near miss"),
    _case("no scale", f"{_KT} m = MatMul(q, kt) {_P} {_Y}", kind="near miss"),
    _case("softmax over the queries",
          f"{_KT} a = MatMul(q, kt) m = Mul(a, c) p = Softmax<axis=2>(m) {_Y}", kind="near miss"),
    _case("scores that are read before the scale", f"{_KT} {_FULL}", kind="near miss",
          outputs="float[b,2,s,4] y, float[b,2,s,t] a"),
    _case("a scale that is an input", f"{_KT} {_FULL}", "float unused = {0}", "near miss",
          more=", float c", shapes=tuple({**each, "c": ()} for each in _SHAPES)),
    _case("a scale for each head", f"{_KT} {_FULL}", "float[2,1,1] c = {0.5, 2}", "near miss"),
    _case("a scale behind the mask",
          f"{_KT} a = MatMul(q, kt) m0 = Add(a, mask) m = Mul(m0, c) {_P} {_Y}", kind="near miss",
          more=", float[b,1,s,t] mask", shapes=_with("mask", "b", 1, "s", "t")),
    _case("divided by the scores", f"{_KT} a = MatMul(q, kt) e = Exp(a) m = Div(c, e) {_P} {_Y}",
          kind="near miss"),
    _case("a scale that half precision would lose", f"{_KT} {_FULL}", "float c = {0.000001}",
          "near miss"),
    _case("a sum of two products",
          f"{_KT} a = MatMul(q, kt) d = MatMul(e, kt) a1 = Mul(a, c) d1 = Mul(d, c) "
          f"m = Add(a1, d1) {_P} {_Y}",
          kind="near miss", more=", float[b,2,s,4] e", shapes=_with("e", "b", 2, "s", 4)),
    _case("no softmax", f"{_KT} a = MatMul(q, kt) p = Mul(a, c) {_Y}", kind="near miss"),
    _case("one head in 3-D",
          f"kt = Transpose<perm=[0,2,1]>(k) qc = Mul(q, c) m = MatMul(qc, kt) {_P} {_Y}",
          kind="near miss", inputs="float[b,s,4] q, float[b,t,4] k, float[b,t,4] v",
          outputs="float[b,s,4] y",
          shapes=tuple({n: (d[0], *d[2:]) for n, d in each.items()} for each in _SHAPES)),
    _flat("3-D, weights as an output: it stays 3-D",
          f"{_FLAT} qc = Mul(q2, c) kt = Transpose<perm=[0,2,1]>(k2) m = MatMul(qc, kt) "
          f"{_P} {_FLAT_Y}",
          outputs="float[b,3,8] y, float[n,3,5] p"),
    _case("opset 12", f"{_KT} {_FULL}", kind="near miss", opset=12),
)  # fmt: skip
