"""`Shape` with start or end, in every form."""

from __future__ import annotations

from pipeline.passes.case import Case, Kind

_IMAGES = ({"x": (1, 3, 2, 4)}, {"x": (2, 3, 5, 7)}, {"x": (3, 3, 9, 8)})


def _shape(name: str, kind: Kind, attrs: str, length: int) -> Case:
    text = f"(float[n,3,h,w] x) => (int64[{length}] s) {{ s = Shape{attrs}(x) }}"
    return Case("slice_shape", name, kind, text, _IMAGES)


CASES: tuple[Case, ...] = (
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
        not_for={"tensorrt-8.6": "build: conditionally dependent shape tensors not supported"},
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
