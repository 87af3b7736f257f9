"""Numbers computed from sizes, with several readers."""

from __future__ import annotations

from pipeline.passes.case import Case, Kind

_IMAGES = ({"x": (1, 3, 4, 6)}, {"x": (2, 3, 5, 9)}, {"x": (2, 3, 8, 7)})


def _case(name: str, body: str, kind: Kind = "positive") -> Case:
    text = (
        "(float[n,3,h,w] x) => (float[n,3,h,w] y) "
        "<int64 one = {1}, int64 two = {2}, int64 three = {3}, int64[1] last = {-1}> "
        f"{{ sizes = Shape(x) w0 = Gather(sizes, three) w1 = Sub(w0, one) {body} }}"
    )
    return Case("repeat_casts", name, kind, text, _IMAGES)


# Two lookups in an all-pairs correlation and a convolution between them, as in RAFT.
_LOOKUPS = Case(
    "repeat_casts",
    "two lookups",
    "positive",
    """(float[1,8,h,w] f, float[1,2,h,w] p) => (float[1,2,h,w] y) <
    float two = {2}, float one = {1}, int64 one_ = {1}, int64 i2 = {2}, int64 i3 = {3},
    int64[1] m1 = {-1}, int64[1] n1 = {1}, int64[1] n9 = {9}, int64[3] flat = {0, 8, -1},
    int64[4] each = {-1, 1, 1, 2}, int64[2] halves = {1, 1},
    float[1,3,3,2] window = {-1,-1, 0,-1, 1,-1, -1,0, 0,0, 1,0, -1,1, 0,1, 1,1},
    float[2,9,1,1] k = {0.1,-0.2,0.3,-0.1,0.2,-0.3,0.1,0.2,-0.1,
                        -0.2,0.1,0.1,0.3,-0.1,0.2,-0.3,0.1,0.2}> {
    s = Shape(f) hl = Gather(s, i2) wl = Gather(s, i3) h1 = Sub(hl, one_) w1 = Sub(wl, one_)
    hf = Cast<to=1>(h1) wf = Cast<to=1>(w1)
    hv = Reshape(hl, m1) wv = Reshape(wl, m1)
    g = Relu(f) a = Reshape(g, flat) b = Transpose<perm=[0,2,1]>(a) c = MatMul(b, a)
    vs = Concat<axis=0>(m1, n1, hv, wv) v = Reshape(c, vs) ws = Concat<axis=0>(n1, hv, wv, n9)
    t1 = Transpose<perm=[0,2,3,1]>(p) r1 = Reshape(t1, each) o1 = Add(r1, window)
    x1, y1 = Split<axis=3>(o1, halves)
    x1a = Mul(x1, two) x1b = Div(x1a, wf) x1c = Sub(x1b, one)
    y1a = Mul(y1, two) y1b = Div(y1a, hf) y1c = Sub(y1b, one)
    g1 = Concat<axis=-1>(x1c, y1c) l1 = GridSample<align_corners=1>(v, g1) z1 = Reshape(l1, ws)
    u1 = Transpose<perm=[0,3,1,2]>(z1) c1 = Conv(u1, k) p2 = Add(p, c1)
    t2 = Transpose<perm=[0,2,3,1]>(p2) r2 = Reshape(t2, each) o2 = Add(r2, window)
    x2, y2 = Split<axis=3>(o2, halves)
    x2a = Mul(x2, two) x2b = Div(x2a, wf) x2c = Sub(x2b, one)
    y2a = Mul(y2, two) y2b = Div(y2a, hf) y2c = Sub(y2b, one)
    g2 = Concat<axis=-1>(x2c, y2c) l2 = GridSample<align_corners=1>(v, g2) z2 = Reshape(l2, ws)
    u2 = Transpose<perm=[0,3,1,2]>(z2) c2 = Conv(u2, k) y = Add(p2, c2) }""",
    (
        {"f": (1, 8, 6, 9), "p": (1, 2, 6, 9)},
        {"f": (1, 8, 12, 10), "p": (1, 2, 12, 10)},
        {"f": (1, 8, 16, 20), "p": (1, 2, 16, 20)},
    ),
    ranges={"f": (-1, 1), "p": (0, 5)},
    precision="fp16",
)

CASES: tuple[Case, ...] = (
    _LOOKUPS,
    _case("two readers", "f = Cast<to=1>(w1) a = Div(x, f) b = Relu(a) y = Div(b, f)"),
    _case("read twice by one", "f = Cast<to=1>(w1) g = Mul(f, f) a = Mul(x, g) y = Sub(a, f)"),
    _case("a vector of one",
          "v = Reshape(w0, last) f = Cast<to=1>(v) a = Mul(x, f) y = Add(a, f)"),
    _case("one reader", "f = Cast<to=1>(w1) y = Mul(x, f)", "near miss"),
    _case("integers", "f = Cast<to=6>(w1) g = Add(f, f) i = Cast<to=6>(two) h0 = Sub(f, i) "
          "s0 = Add(g, h0) s = Cast<to=1>(s0) y = Mul(x, s)", "near miss"),
    _case("all positions of an axis",
          "zero = Constant<value_int=0>() r = Range(zero, w0, one) f = Cast<to=1>(r) "
          "a = Mul(x, f) y = Add(a, f)", "near miss"),
)  # fmt: skip
