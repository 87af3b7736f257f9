"""Strided and dilated transposed convolutions, as torch exports ConvTranspose1d to 3d."""

from __future__ import annotations

from typing import Any

from pipeline.passes.case import Case, Kind

_IMAGES = tuple({"x": (n, 2, h, w)} for n, h, w in ((1, 3, 4), (2, 5, 4), (2, 6, 7)))
_BOTH = "strides=[2,2], dilations=[2,2]"


def _case(
    name: str, attributes: str, kind: Kind = "positive", channels: int = 1, **more: Any
) -> Case:
    dtype = more.pop("dtype", "float")
    text = (
        f"({dtype}[n,2,h,w] x) => ({dtype}[n,{channels},p,q] y) "
        f"<{dtype}[2,1,2,3] k = {{1,2,3,4,5,6,7,8,9,10,11,12}}> "
        f"{{ y = ConvTranspose<{attributes}>(x, k) }}"
    )
    fails = {"rtx-1.7": "none" if kind == "near miss" else "build"}
    return Case(
        "spread_deconv", name, kind, **{"text": text, "shapes": _IMAGES, "fails": fails, **more}
    )


CASES: tuple[Case, ...] = (
    _case("plain", _BOTH),
    _case("half, opset 17", _BOTH, dtype="float16", opset=17),
    _case("opset 13", _BOTH + ", pads=[1,0,2,1], kernel_shape=[2,3]", opset=13),
    _case("stride and dilation on two axes", "strides=[2,1], dilations=[1,3]"),
    _case("groups", _BOTH + ", group=2", channels=2),
    _case("output_padding", _BOTH + ", output_padding=[1,0], pads=[1,1,1,1]"),
    _case("auto_pad SAME_UPPER", _BOTH + ', auto_pad="SAME_UPPER"'),
    _case("auto_pad SAME_LOWER", _BOTH + ', auto_pad="SAME_LOWER"'),
    _case("auto_pad VALID", _BOTH + ', auto_pad="VALID"'),
    _case(
        "output_shape",
        "",
        text="(float[n,2,5,4] x) => (float[n,1,p,q] y) <float[2,1,2,2] k = {1,2,3,4,5,6,7,8}> "
        f"{{ y = ConvTranspose<{_BOTH}, output_shape=[10,8]>(x, k) }}",
        shapes=({"x": (1, 2, 5, 4)}, {"x": (3, 2, 5, 4)}),
    ),
    _case(
        "bias, a kernel that two read",
        "",
        text="(float[n,2,h,w] x) => (float[n,1,p,q] y, float[n,1,r,s] z) "
        "<float[2,1,2,2] k = {1,2,3,4,5,6,7,8}, float[1] b = {3}> "
        f"{{ y = ConvTranspose<{_BOTH}>(x, k, b) z = ConvTranspose(x, k) }}",
    ),
    _case(
        "1-D",
        "",
        text="(float[n,2,l] x) => (float[n,1,p] y) <float[2,1,2] k = {1,2,3,4}> "
        "{ y = ConvTranspose<strides=[3], dilations=[2]>(x, k) }",
        shapes=({"x": (1, 2, 3)}, {"x": (2, 2, 7)}),
    ),
    _case(
        "3-D",
        "",
        text="(float[n,1,d,h,w] x) => (float[n,1,p,q,r] y) <float[1,1,1,2,2] k = {1,2,3,4}> "
        "{ y = ConvTranspose<strides=[2,2,1], dilations=[1,2,2]>(x, k) }",
        shapes=({"x": (1, 1, 2, 3, 4)}, {"x": (2, 1, 3, 4, 5)}),
    ),
    _case("strided", "strides=[2,2]", "near miss"),
    _case("dilated", "dilations=[2,2]", "near miss"),
    _case(
        "Conv",
        "",
        "near miss",
        text="(float[n,1,h,w] x) => (float[n,2,p,q] y) <float[2,1,2,2] k = {1,2,3,4,5,6,7,8}> "
        f"{{ y = Conv<{_BOTH}>(x, k) }}",
        shapes=({"x": (1, 1, 5, 6)}, {"x": (2, 1, 8, 7)}),
    ),
    _case(
        "computed kernel",
        "",
        "refusal",
        text="(float[n,2,h,w] x, float[2,1,2,2] k) => (float[n,1,p,q] y) "
        f"{{ c = Relu(k) y = ConvTranspose<{_BOTH}>(x, c) }}",
        shapes=tuple({**shapes, "k": (2, 1, 2, 2)} for shapes in _IMAGES),
        reason="computed",
    ),
)
