"""Remainders of sizes that TensorRT-RTX treats as negative sizes, and remainders of data."""

from __future__ import annotations

from pipeline.passes.case import Case, Failure, Kind, Shapes

_IMAGES = ({"x": (1, 4, 5, 4)}, {"x": (2, 4, 8, 7)}, {"x": (1, 4, 40, 33)})
# a wrong remainder shows at exact multiples
_MULTIPLES = ({"x": (1, 4, 8, 8)}, {"x": (1, 4, 16, 9)}, {"x": (2, 4, 96, 64)})
_CONSTANTS = (
    "int64 two = {2}, int64 three = {3}, int64 k = {8}, int64 seven = {7}, int64 zero = {0}, "
    "int64 minus = {-1}, int64 odd = {-3}, int64[1] at = {0}, int64[6] none = {0, 0, 0, 0, 0, 0}"
)


def _padded(pads: str, more: str = "", mode: str = "nearest") -> str:
    """`pads` computes `ph` and `pw` from the sizes `h` and `w`. A pooled tensor is resized to the
    size of the padded tensor, as in a feature pyramid."""
    return (
        f"(float[n,4,h,w] x) => (float[n,4,a,b] y) <{_CONSTANTS}{more}> {{ s = Shape(x) "
        f"h = Gather(s, two) w = Gather(s, three) {pads} hu = Unsqueeze(ph, at) "
        "wu = Unsqueeze(pw, at) p = Concat<axis=0>(none, hu, wu) q = Pad(x, p) "
        f'r = Shape(q) v = GlobalAveragePool(q) y = Resize<mode="{mode}">(v, , , r) }}'
    )


def _both(pad: str) -> str:
    return " ".join(pad.replace("_", axis) for axis in "hw")


def _case(
    name: str,
    kind: Kind,
    text: str,
    fails: Failure,
    shapes: tuple[Shapes, ...] = _IMAGES,
    opset: int = 18,
) -> Case:
    return Case("decompose_mod", name, kind, text, shapes, opset=opset, fails={"rtx-1.7": fails})


CASES: tuple[Case, ...] = (
    _case(
        "pad to a multiple, -h % 8 as torch writes it",
        "positive",
        _padded(_both("n_ = Neg(_) p_ = Mod(n_, k)")),
        "build",
        _MULTIPLES,
    ),
    _case("h % 8", "positive", _padded(_both("p_ = Mod(_, k)"), mode="linear"), "build", opset=13),
    _case(
        "8 - h % 8",
        "positive",
        _padded(_both("m_ = Mod(_, k) p_ = Sub(k, m_)")),
        "build",
        opset=16,
    ),
    _case(
        "(8 - h % 8) % 8 of a sum",
        "positive",
        _padded(_both("a_ = Add(_, seven) m_ = Mod(a_, k) d_ = Sub(k, m_) p_ = Mod(d_, k)")),
        "build",
    ),
    _case(
        "halves of the padding on both sides",
        "positive",
        f"(float[n,4,h,4] x) => (float[n,4,a,b] y) <{_CONSTANTS}, int64[2] front = {{0, 0}}, "
        "int64[3] between = {0, 0, 0}> { s = Shape(x) h = Gather(s, two) n = Neg(h) "
        "m = Mod(n, k) top = Div(m, two) rest = Sub(m, top) tu = Unsqueeze(top, at) "
        "ru = Unsqueeze(rest, at) p = Concat<axis=0>(front, tu, between, ru, at) q = Pad(x, p) "
        'r = Shape(q) v = GlobalAveragePool(q) y = Resize<mode="linear">(v, , , r) }',
        "build",
        ({"x": (1, 4, 8, 4)}, {"x": (2, 4, 11, 4)}, {"x": (1, 4, 100, 4)}),
    ),
    _case(
        "a 1-D shape, each axis by its own",
        "positive",
        "(float[n,4,h,w] x) => (float[n,4,a,b] y) <int64[1] two = {2}, int64[1] four = {4}, "
        "int64[6] none = {0, 0, 0, 0, 0, 0}, int64[2] k = {8, 5}> { s = Shape(x) "
        "hw = Slice(s, two, four) m = Mod(hw, k) p = Concat<axis=0>(none, m) q = Pad(x, p) "
        'r = Shape(q) v = GlobalAveragePool(q) y = Resize<mode="nearest">(v, , , r) }',
        "build",
    ),
    _case(
        "signs of both kinds",
        "positive",
        f"(float[n,4,h,w] x) => (int64 a, int64 b, int64 c, int64 d) <{_CONSTANTS}> {{"
        "s = Shape(x) h = Gather(s, two) g = Sub(seven, h) n = Neg(h) a = Mod(h, odd) "
        "b = Mod(n, odd) c = Mod(g, odd) d = Mod(g, seven) }",
        "none",
    ),
    _case(
        "int32, and the product of all sizes",
        "positive",
        "(float[n,4,h,w] x) => (int32 a, int64 b) <int32 k = {-7}, int64 five = {5}> {"
        "s = Size(x) t = Cast<to=6>(s) n = Neg(t) a = Mod(n, k) b = Mod(s, five) }",
        "none",
    ),
    _case(
        "in the body of Loop",
        "positive",
        "(float[n,4,h,w] x) => (float[n,4,h,w] y) <int64 two = {2}, int64 k = {4}, bool yes = {1}>"
        "{ y = Loop(two, yes, x) <body = b (int64 i, bool c, float[n,4,h,w] v) => "
        "(bool d, float[n,4,h,w] u) { d = Identity(c) s = Shape(v) h = Gather(s, two) "
        "m = Mod(h, k) f = Cast<to=1>(m) u = Add(v, f) }> }",
        "none",
    ),
    _case(
        "written so already",
        "near miss",
        _padded(
            _both("m_ = Mod(_, k) e_ = Equal(m_, zero) d_ = Sub(k, m_) p_ = Where(e_, zero, d_)")
        ),
        "none",
    ),
    _case(
        "padding by floor division",
        "near miss",
        _padded(
            _both("a_ = Add(_, seven) d_ = Div(a_, k) m_ = Mul(d_, k) p_ = Sub(m_, _)"),
        ),
        "none",
    ),
    # a Where here, and TensorRT-RTX 1.7.1 fails at Swin3D: "Assertion bound >= 0 failed"
    _case(
        "where torch.roll cuts a tensor in two",
        "near miss",
        "(float[n,4,h,w] x) => (float[n,4,h,w] y) <int64[1] three = {3}, int64[1] zero = {0}, "
        "int64[1] axis = {2}> { s = Shape(x) h = Gather(s, axis) at = Mod(three, h) "
        "a = Slice(x, at, h, axis) b = Slice(x, zero, at, axis) y = Concat<axis=2>(a, b) }",
        "none",
        ({"x": (1, 4, 5, 4)}, {"x": (2, 4, 3, 7)}, {"x": (1, 4, 2, 3)}),
    ),
    _case(
        "data",
        "near miss",
        "(int64[n,m] x) => (int64[n,m] y) <int64 k = {5}> { y = Mod(x, k) }",
        "none",
        ({"x": (1, 4)}, {"x": (3, 9)}),
    ),
    _case(
        "a row of data",
        "near miss",
        "(int64[n] x) => (int64[n] y) <int64 k = {5}> { v = Neg(x) y = Mod(v, k) }",
        "none",
        ({"x": (4,)}, {"x": (9,)}),
    ),
    _case(
        "fmod of floats",
        "near miss",
        "(float[n,m] x) => (float[n,m] y) <float k = {0.7}> { y = Mod<fmod=1>(x, k) }",
        "none",
        ({"x": (1, 4)}, {"x": (3, 9)}),
    ),
)
