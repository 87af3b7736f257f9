"""ConvTranspose with output_shape."""

from __future__ import annotations

from pipeline.passes.case import Case, Kind

_X = ({"x": (1, 2, 4, 5)}, {"x": (3, 2, 4, 5)})
_K = "<float[2,1,3,3] k = {1,2,3,4,5,6,7,8,9, 9,7,5,3,1,2,4,6,8}>"


def _case(name: str, attrs: str, kind: Kind = "positive", dims: str = "4,5") -> Case:
    text = (
        f"(float[n,2,{dims}] x) => (float[n,1,p,q] y) {_K} {{ y = ConvTranspose<{attrs}>(x, k) }}"
    )
    return Case(
        "pad_output_shape", name, kind, text, _X, reason="dynamic" if kind == "refusal" else ""
    )


CASES: tuple[Case, ...] = (
    _case("even and uneven", "strides=[2,2], output_shape=[8,10]"),
    _case("SAME_UPPER", 'strides=[2,2], output_shape=[8,10], auto_pad="SAME_UPPER"'),
    _case("SAME_LOWER", 'strides=[2,2], output_shape=[8,10], auto_pad="SAME_LOWER"'),
    _case("output_padding", "strides=[2,2], output_shape=[8,10], output_padding=[1,1]"),
    _case("dilations", "dilations=[2,1], output_shape=[6,6]"),
    _case("no output_shape", "strides=[2,2], pads=[1,1,1,1]", "near miss"),
    _case("dynamic sizes", "strides=[2,2], output_shape=[8,10]", "refusal", "h,w"),
)
