"""Small graphs for every pass: ones to rewrite, near misses to leave alone, ones to refuse."""

from __future__ import annotations

from onnx_case import Case, Kind, Shapes
from resize_cases import SCALE_RESIZE

__all__ = ["CASES", "Case", "Shapes"]

_IMAGES = ({"x": (1, 3, 2, 4)}, {"x": (2, 3, 5, 7)}, {"x": (3, 3, 9, 8)})


def _shape(name: str, kind: Kind, attrs: str, length: int) -> Case:
    text = f"(float[n,3,h,w] x) => (int64[{length}] s) {{ s = Shape{attrs}(x) }}"
    return Case("slice_shape", name, kind, text, _IMAGES)


SLICE_SHAPE = (
    _shape("middle", "positive", "<start=1, end=3>", 2),
    _shape("one size", "positive", "<start=2, end=3>", 1),
    _shape("end only", "positive", "<end=2>", 2),
    _shape("negative", "positive", "<start=-3, end=-1>", 2),
    _shape("clamped", "positive", "<start=-9, end=3>", 3),
    _shape("whole", "positive", "<start=-4, end=9>", 4),
    _shape("start 0", "positive", "<start=0>", 4),
    _shape("empty", "positive", "<start=3, end=1>", 0),
    Case(
        "slice_shape",
        "rank unknown",
        "positive",
        "(float[n,3,h,w] x) => (int64[k] s, int64[m] t) "
        "{ y = Relu(x) s = Shape<start=-2>(y) t = Shape<start=1, end=-1>(y) }",
        _IMAGES,
    ),
    Case(
        "slice_shape",
        "in the bodies of If",
        "positive",
        "(float[n,3,h,w] x, bool c) => (int64[k] s) { s = If(c) <"
        "then_branch = t () => (int64[k] a) { a = Shape<start=2>(x) },"
        "else_branch = e () => (int64[k] b) { b = Shape<end=2>(x) }> }",
        tuple({**shapes, "c": ()} for shapes in _IMAGES),
    ),
    Case(
        "slice_shape",
        "in the body of Loop",
        "positive",
        "(float[n,3,h,w] x) => (float[n,3,h,w] y) <int64 three = {3}, bool yes = {1}>"
        "{ y = Loop(three, yes, x) <body = b (int64 i, bool c, float[n,3,h,w] v) => "
        "(bool d, float[n,3,h,w] u) { d = Identity(c) s = Shape<start=2, end=3>(v) "
        "f = Cast<to=1>(s) u = Add(v, f) }> }",
        _IMAGES,
    ),
    Case(
        "slice_shape",
        "sizes of a Resize",
        "positive",
        "(float[n,3,h,w] x, float[n,3,a,b] y) => (float[n,3,a,b] z) {"
        "nc = Shape<end=2>(x) hw = Shape<start=2>(y) sizes = Concat<axis=0>(nc, hw)"
        'z = Resize<mode="linear">(x, , , sizes) }',
        (
            {"x": (1, 3, 2, 4), "y": (1, 3, 3, 5)},
            {"x": (2, 3, 5, 7), "y": (2, 3, 8, 9)},
        ),
    ),
    _shape("no attributes", "near miss", "", 4),
    Case(
        "slice_shape",
        "Shape and Slice already",
        "near miss",
        "(float[n,3,h,w] x) => (int64[2] s) <int64[1] two = {2}, int64[1] four = {4}>"
        "{ all = Shape(x) s = Slice(all, two, four) }",
        _IMAGES,
    ),
)

_CONSTANTS = "<float[3] a = {0.5, 1.5, -2.0}, float[3] b = {0.25, -1.0, 3.0}>"
_NORM = "y = InstanceNormalization<epsilon=0.01>(x, a, b)"


def _norm(name: str, kind: Kind, dims: str, shapes: tuple[tuple[int, ...], ...], **more) -> Case:
    text = more.pop("text", f"(float[{dims}] x) => (float[{dims}] y) {_CONSTANTS} {{ {_NORM} }}")
    return Case(
        "decompose_instance_norm", name, kind, text, tuple({"x": shape} for shape in shapes), **more
    )


_PLANES = ((1, 3, 2, 4), (2, 3, 5, 7), (3, 3, 9, 1))
# ONNX text takes half-precision constants as their bits: 0.5, 1.5, -2 and 0.25, -1, 3
_HALF = "<float16[3] a = {14336, 15872, 49152}, float16[3] b = {13312, 48128, 16896}>"

DECOMPOSE_INSTANCE_NORM = (
    _norm("2-D", "positive", "n,3,h,w", _PLANES),
    _norm("1-D", "positive", "n,3,l", ((1, 3, 2), (2, 3, 9), (3, 3, 17))),
    _norm("3-D", "positive", "n,3,d,h,w", ((1, 3, 2, 1, 2), (2, 3, 3, 4, 5), (2, 3, 4, 7, 5))),
    _norm(
        "no epsilon",
        "positive",
        "n,3,h,w",
        _PLANES,
        text=f"(float[n,3,h,w] x) => "
        f"(float[n,3,h,w] y) {_CONSTANTS} {{ y = InstanceNormalization(x, a, b) }}",
    ),
    _norm(
        "half",
        "positive",
        "",
        _PLANES,
        text=f"(float16[n,3,h,w] x) => (float16[n,3,h,w] y) {_HALF} {{ {_NORM} }}",
    ),
    _norm(
        "rank from the output",
        "positive",
        "",
        _PLANES,
        text=f"(float[n,3,h,w] x) => "
        f"(float[n,3,h,w] y) {_CONSTANTS} {{ r = Relu(x) y = InstanceNormalization(r, a, b) }}",
    ),
    _norm(
        "inside If",
        "positive",
        "",
        (),
        text="(float[n,3,h,w] x, bool c) => (float[n,3,h,w] y)"
        f"{_CONSTANTS} {{ y = If(c) <then_branch = t () => (float[n,3,h,w] p) "
        "{ p = InstanceNormalization(x, a, b) }, else_branch = e () => (float[n,3,h,w] q) "
        "{ q = InstanceNormalization(x, b, a) }> }",
    ),
    _norm(
        "LayerNormalization",
        "near miss",
        "",
        _PLANES[:1],
        text="(float[n,3,2,4] x) => "
        "(float[n,3,2,4] y) <float[4] a = {1, 2, 3, 4}> { y = LayerNormalization(x, a) }",
    ),
    _norm(
        "BatchNormalization",
        "near miss",
        "",
        _PLANES,
        text="(float[n,3,h,w] x) => "
        "(float[n,3,h,w] y) <float[3] a = {0.5, 1.5, 2.0}>"
        "{ y = BatchNormalization(x, a, a, a, a) }",
    ),
    _norm(
        "one value a channel",
        "refusal",
        "n,3,1,1",
        ((1, 3, 1, 1), (2, 3, 1, 1)),
        reason="one value a channel",
    ),
    _norm(
        "rank unknown",
        "refusal",
        "",
        _PLANES,
        reason="rank",
        text=f"(float[n,3,h,w] x) => "
        f"(float[n,3,h,w] y) {_CONSTANTS} "
        "{ r = Relu(x) s = InstanceNormalization(r, a, b) y = Relu(s) }",
    ),
)
DECOMPOSE_INSTANCE_NORM = tuple(
    Case(**{**vars(case), "shapes": tuple({"x": s, "c": ()} for s in _PLANES)})
    if case.name == "inside If"
    else case
    for case in DECOMPOSE_INSTANCE_NORM
) + tuple(
    Case(
        "decompose_instance_norm",
        f"computed scale and bias, opset {opset}, {kind}",
        "positive",
        f"({kind}[n,3,h,w] x, {kind}[3] a, {kind}[3] b) => ({kind}[n,3,h,w] y) {{ {_NORM} }}",
        tuple({"x": shape, "a": (3,), "b": (3,)} for shape in _PLANES),
        opset=opset,
    )
    for opset, kind in ((12, "float"), (18, "float"), (18, "float16"))
)

CASES = (*SLICE_SHAPE, *DECOMPOSE_INSTANCE_NORM, *SCALE_RESIZE)
