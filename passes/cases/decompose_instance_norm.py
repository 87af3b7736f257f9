"""InstanceNormalization in all its forms."""

from __future__ import annotations

from typing import Any

from pipeline.passes._case import Case, Kind

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
# ONNX text takes half-precision constants as their bits: 0.5, 1.5, -2 and 0.25, -1, 3
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
CASES: tuple[Case, ...] = tuple(
    Case(**{**vars(case), "shapes": tuple({"x": s, "c": ()} for s in _PLANES)})
    if case.name == "inside If"
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
