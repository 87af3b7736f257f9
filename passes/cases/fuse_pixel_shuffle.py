"""Pixel shuffles and unshuffles spelled as reshapes, and near misses.

The bodies are shortened exports of torch (`dynamo=True`: Shape with start and end, repeated sizes;
`dynamo=False`: Gather and Unsqueeze).
"""

from __future__ import annotations

from typing import Any

from pipeline.passes.case import Case, Kind

_UP = ({"x": (1, 8, 2, 3)}, {"x": (2, 8, 5, 4)}, {"x": (3, 8, 9, 16)})
_DOWN = ({"x": (1, 3, 2, 4)}, {"x": (2, 3, 10, 6)}, {"x": (3, 3, 16, 32)})


def _case(name: str, kind: Kind, inits: str, body: str, **more: Any) -> Case:
    inputs = more.pop("inputs", "float[b,8,h,w] x")
    output = more.pop("output", "float[b,2,p,q] y")
    shapes = more.pop("shapes", _UP)
    text = f"({inputs}) => ({output}) <{inits}> {{ {body} }}"
    return Case("fuse_pixel_shuffle", name, kind, text, shapes, **more)


_SLICES = (
    "b = Shape<start=0, end=1>(x) h1 = Shape<start=2, end=3>(x) w1 = Shape<start=3, end=4>(x) "
)
_BIG = "hh = Mul(h1, two) ww = Mul(w1, two) "
_CRD = (
    f"{_SLICES}{_BIG}s = Concat<axis=0>(b, two, two, two, h1, w1) v = Reshape<allowzero=1>(x, s) "
    "t = Transpose<perm=[0, 1, 4, 2, 5, 3]>(v) e = Concat<axis=0>(b, two, hh, ww) "
    "y = Reshape<allowzero=1>(t, e)"
)
_TWO = "int64[1] two = {2}"
_GATHERS = (
    "s = Shape(x) b0 = Gather<axis=0>(s, i0) c0 = Gather<axis=0>(s, i1) h0 = Gather<axis=0>(s, i2) "
    "w0 = Gather<axis=0>(s, i3) "
)
_ZERO_TO_THREE = (
    "int64 i0 = {0}, int64 i1 = {1}, int64 i2 = {2}, int64 i3 = {3}, int64 k = {2}, "
    "int64 kk = {4}, int64[1] z = {0}, int64[1] two = {2}"
)
_SCRIPT_UP = (
    f"{_GATHERS}d = Div(c0, kk) d1 = Cast<to=7>(d) b = Unsqueeze(b0, z) c = Unsqueeze(d1, z) "
    "h1 = Unsqueeze(h0, z) w1 = Unsqueeze(w0, z) "
    "s6 = Concat<axis=0>(b, c, two, two, h1, w1) v = Reshape(x, s6) "
    "t = Transpose<perm=[0, 1, 4, 2, 5, 3]>(v) hm = Mul(h0, k) wm = Mul(w0, k) "
    "h2 = Unsqueeze(hm, z) w2 = Unsqueeze(wm, z) e = Concat<axis=0>(b, c, h2, w2) "
    "y = Reshape(t, e)"
)
_HALVES = "hd = Div(h1, two) wd = Div(w1, two) "
_SPLIT = f"{_SLICES}{_HALVES}s = Concat<axis=0>(b, c, hd, two, wd, two) v = Reshape(x, s) "
_JOIN = "e = Concat<axis=0>(b, c4, hd, wd) y = Reshape(t, e)"
_THREE = "int64[1] two = {2}, int64[1] c = {3}, int64[1] c4 = {12}"
_CDOWN: dict[str, Any] = {
    "inputs": "float[b,3,h,w] x",
    "output": "float[b,12,p,q] y",
    "shapes": _DOWN,
}
# torch.nn.PixelUnshuffle flattens the axes before the image first
_UNSHUFFLE = (
    "front = Shape<start=0, end=-3>(x) image = Shape<start=-3>(x) "
    "s4 = Concat<axis=0>(any, image) f = Reshape(x, s4) cc = Shape<start=1, end=2>(f) "
    "h1 = Shape<start=2, end=3>(f) w1 = Shape<start=3, end=4>(f) hd = Div(h1, two) "
    "wd = Div(w1, two) s = Concat<axis=0>(any, cc, hd, two, wd, two) v = Reshape(f, s) "
    "t = Transpose<perm=[0, 1, 3, 5, 2, 4]>(v) cm = Mul(cc, four) "
    "e = Concat<axis=0>(any, cm, hd, wd) j = Reshape(t, e) back = Shape<start=1>(j) "
    "s5 = Concat<axis=0>(front, back) y = Reshape<allowzero=1>(j, s5)"
)

CASES: tuple[Case, ...] = (
    _case("CRD from torch.export", "positive", _TWO, _CRD),
    _case(
        "DCR from torch.export",
        "positive",
        _TWO,
        _CRD.replace("[0, 1, 4, 2, 5, 3]", "[0, 3, 4, 1, 5, 2]"),
    ),
    _case("CRD from torch.jit", "positive", _ZERO_TO_THREE, _SCRIPT_UP, opset=13),
    _case(
        "CRD with the batch left open",
        "positive",
        f"{_TWO}, int64[1] any = {{-1}}",
        _CRD.replace("(b, two, two, two, h1", "(any, two, two, two, h1"),
    ),
    _case(
        "CRD by threes in half precision",
        "positive",
        "int64[1] two = {3}",
        _CRD.replace("(b, two, two, two, h1", "(b, one, two, two, h1")
        .replace("(b, two, hh", "(b, one, hh")
        .replace("b = Shape", "one = Div(two, two) b = Shape", 1),
        inputs="float16[b,9,h,w] x",
        output="float16[b,1,p,q] y",
        shapes=({"x": (1, 9, 2, 3)}, {"x": (2, 9, 7, 4)}),
    ),
    _case(
        "unshuffle by view",
        "positive",
        _THREE,
        f"{_SPLIT} t = Transpose<perm=[0, 1, 3, 5, 2, 4]>(v) {_JOIN}",
        **_CDOWN,
    ),
    _case(
        "space to depth by view",
        "positive",
        _THREE,
        f"{_SPLIT} t = Transpose<perm=[0, 3, 5, 1, 2, 4]>(v) {_JOIN}",
        **_CDOWN,
    ),
    _case(
        "torch.nn.PixelUnshuffle",
        "positive",
        "int64[1] any = {-1}, int64[1] two = {2}, int64[1] four = {4}",
        _UNSHUFFLE,
        dims={"x": ("b", 3, "2*_h", "2*_w")},
        **_CDOWN,
    ),
    Case(
        "fuse_pixel_shuffle",
        "in a body of If",
        "positive",
        f"(float[b,8,h,w] x, bool f) => (float[b,2,p,q] y) <{_TWO}> {{ y = If(f) <"
        f"then_branch = m () => (float[b,2,p,q] y1) {{ {_CRD.replace('y = ', 'y1 = ')} }}, "
        'else_branch = n () => (float[b,2,p,q] y2) { y2 = DepthToSpace<blocksize=2, mode="DCR">(x)'
        " }> }",
        tuple({**shapes, "f": ()} for shapes in _UP),
    ),
    _case(
        "PixelUnshuffle of sizes that may be odd",
        "near miss",  # a batch of 2 with height 3 would look like a batch of 3
        "int64[1] any = {-1}, int64[1] two = {2}, int64[1] four = {4}",
        _UNSHUFFLE,
        **_CDOWN,
    ),
    _case(
        "DepthToSpace itself",
        "near miss",
        _TWO,
        'y = DepthToSpace<blocksize=2, mode="CRD">(x)',
    ),
    _case(
        "constant shapes",
        "near miss",
        "int64[6] s = {0, 2, 2, 2, 3, 5}, int64[4] e = {0, 2, 6, 10}",
        "v = Reshape(x, s) t = Transpose<perm=[0, 1, 4, 2, 5, 3]>(v) y = Reshape(t, e)",
        inputs="float[b,8,3,5] x",
        output="float[b,2,6,10] y",
        shapes=({"x": (1, 8, 3, 5)}, {"x": (2, 8, 3, 5)}),
    ),
    _case(
        "channel shuffle",
        "near miss",
        "int64[1] g = {4}, int64[1] r = {2}, int64[1] c = {8}",
        f"{_SLICES}s = Concat<axis=0>(b, g, r, h1, w1) v = Reshape(x, s) "
        "t = Transpose<perm=[0, 2, 1, 3, 4]>(v) e = Concat<axis=0>(b, c, h1, w1) "
        "y = Reshape(t, e)",
        output="float[b,8,h,w] y",
    ),
    _case(
        "window partition",
        "near miss",
        "int64[1] two = {2}, int64[1] c = {3}, int64[3] e = {-1, 4, 3}",
        f"{_SPLIT} t = Transpose<perm=[0, 2, 4, 3, 5, 1]>(v) y = Reshape(t, e)",
        inputs="float[b,3,h,w] x",
        output="float[k,4,3] y",
        shapes=_DOWN,
    ),
    _case(
        "patch embedding",
        "near miss",
        "int64[1] two = {2}, int64[1] c = {3}, int64[1] c4 = {12}, int64[1] any = {-1}",
        f"{_SPLIT} t = Transpose<perm=[0, 1, 3, 5, 2, 4]>(v) e = Concat<axis=0>(b, c4, any) "
        "y = Reshape(t, e)",
        inputs="float[b,3,h,w] x",
        output="float[b,12,k] y",
        shapes=_DOWN,
    ),
    _case(
        "space to batch",
        "near miss",
        _THREE,
        f"{_SPLIT} t = Transpose<perm=[0, 1, 3, 5, 2, 4]>(v) "
        "four = Mul(two, two) bb = Mul(b, four) e = Concat<axis=0>(bb, c, hd, wd) "
        "y = Reshape(t, e)",
        inputs="float[b,3,h,w] x",
        output="float[k,3,p,q] y",
        shapes=_DOWN,
    ),
    _case(
        "sizes swapped",
        "near miss",  # right for square images only
        _TWO,
        _CRD.replace("(b, two, hh, ww)", "(b, two, ww, hh)"),
    ),
    _case(
        "sizes of another tensor",
        "near miss",
        _TWO,
        _CRD.replace("h1 = Shape<start=2, end=3>(x)", "h1 = Shape<start=2, end=3>(z)"),
        inputs="float[b,8,h,w] x, float[b,8,i,w] z",
        shapes=tuple({**shapes, "z": shapes["x"]} for shapes in _UP),
    ),
)
