"""InstanceNormalization in all its forms."""

from __future__ import annotations

from typing import Any

from pipeline.passes.case import Case, Kind

_CONSTANTS = "<float[3] a = {0.5, 1.5, -2.0}, float[3] b = {0.25, -1.0, 3.0}>"
_NORM = "y = InstanceNormalization<epsilon=0.01>(x, a, b)"


def _norm(
    name: str, kind: Kind, dims: str, shapes: tuple[tuple[int, ...], ...], **more: Any
) -> Case:
    text = more.pop("text", f"(float[{dims}] x) => (float[{dims}] y) {_CONSTANTS} {{ {_NORM} }}")
    return Case(
        "decompose_instance_norm", name, kind, text, tuple({"x": shape} for shape in shapes), **more
    )


_PLANES = ((1, 3, 2, 4), (2, 3, 5, 7), (3, 3, 9, 1))
# ONNX text writes half-precision constants as bits: 0.5, 1.5, -2 and 0.25, -1, 3
_HALF = "<float16[3] a = {14336, 15872, 49152}, float16[3] b = {13312, 48128, 16896}>"

_BASE = (
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
        "scale and bias by Expand, sizes of channels unknown",
        "positive",
        "",
        _PLANES,
        text="(float[n,c,h,w] x) => (float[n,c,h,w] y) <float one = {1}, float zero = {0},"
        "int64[1] i = {1}> { s = Shape(x) k = Gather(s, i) a = Expand(one, k) b = Expand(zero, k)"
        f" {_NORM} }}",
    ),
    _norm(
        "scale and bias by ConstantOfShape",
        "positive",
        "",
        _PLANES,
        text="(float[n,3,h,w] x) => (float[n,3,h,w] y) <int64[1] i = {1}> { s = Shape(x)"
        "k = Gather(s, i) a = ConstantOfShape<value = float[1] {1}>(k) b = ConstantOfShape(k)"
        f" {_NORM} }}",
    ),
    _norm(
        "GroupNorm by torch's exporter",
        "positive",
        "",
        ((1, 6, 2, 4), (2, 6, 5, 7), (3, 6, 9, 1)),
        text="(float[n,6,h,w] x) => (float[n,6,h,w] y) <int64[3] t = {0, 2, -1},"
        "float[2] a = {1, 1}, float[2] b = {0, 0}, float[6,1,1] g = {1, 2, 3, 4, 5, 6},"
        "float[6,1,1] c = {6, 5, 4, 3, 2, 1}> { r = Reshape(x, t)"
        "q = InstanceNormalization<epsilon = 0.01>(r, a, b) s = Shape<start = 0>(x)"
        "p = Reshape(q, s) m = Mul(p, g) y = Add(m, c) }",
    ),
    _norm(
        "half, 1-D",
        "positive",
        "",
        ((1, 3, 2), (2, 3, 9), (3, 3, 17)),
        text=f"(float16[n,3,l] x) => (float16[n,3,l] y) {_HALF} {{ {_NORM} }}",
    ),
    _norm(
        "running statistics, as torch exports them",
        "near miss",
        "",
        _PLANES,
        text="(float[n,3,h,w] x) => (float[n,3,h,w] y) <float[3] u = {1, 1, 1}, float[3] z ="
        " {0, 0, 0}, float[3] m = {0.5, -1, 2}, float[3] v = {1, 2, 0.5}, int64[2] t = {1, -1}>"
        "{ k = Shape<start = 0, end = 1>(x) s = Shape<start = 2>(x) d = Concat<axis = 0>(t, s)"
        "r = Reshape(x, d) a = Tile(u, k) b = Tile(z, k) c = Tile(m, k) e = Tile(v, k)"
        "f = BatchNormalization(r, a, b, c, e) all = Shape(x) y = Reshape<allowzero = 1>(f, all) }",
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
        reason="one value per channel",
    ),
    _norm(
        "rank unknown",
        "refusal",
        "",
        (),
        reason="rank",
        text="(float[n,3,h,w] x, bool c) => (float[k] y) <int64[1] flat = {-1},"
        "int64[3] rows = {0, 0, -1}, float[3] a = {0.5, 1.5, -2.0}, float[3] b = {0, 1, 2}>"
        "{ r = If(c) <then_branch = t () => (float[n,3,h,w] p) { p = Relu(x) },"
        "else_branch = e () => (float[n,3,l] q) { q = Reshape(x, rows) }>"
        " s = InstanceNormalization(r, a, b) y = Reshape(s, flat) }",
    ),
)
CASES: tuple[Case, ...] = tuple(
    Case(**{**vars(case), "shapes": tuple({"x": s, "c": ()} for s in _PLANES)})
    if case.name in ("inside If", "rank unknown")
    else case
    for case in _BASE
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
