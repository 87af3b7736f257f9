"""Resizes that get constant scales, near misses, and Resizes that are refused."""

from __future__ import annotations

from typing import Any

from pipeline.passes.case import Case, Kind

_UP = ({"x": (1, 2, 2, 3)}, {"x": (2, 2, 5, 4)}, {"x": (1, 2, 7, 8)})
_TWICE = (
    "<int64[1] k = {2}> { nc = Shape<end=2>(x) hw = Shape<start=2>(x) big = Mul(hw, k) "
    "sizes = Concat<axis=0>(nc, big)"
)


def _resize(name: str, kind: Kind, attrs: str, body: str = _TWICE, **more: Any) -> Case:
    inputs = more.pop("inputs", "float[n,2,h,w] x")
    shapes = more.pop("shapes", _UP)
    last = more.pop("last", "x, , , sizes")
    text = f"({inputs}) => (float[n,2,p,q] y) {body} y = Resize<{attrs}>({last}) }}"
    return Case("scale_resize", name, kind, text, shapes, **more)


_ALIGNED = 'mode="linear", coordinate_transformation_mode="align_corners"'
_PAIR = (
    {"image": (1, 3, 16, 24), "x": (1, 2, 2, 3)},
    {"image": (1, 3, 40, 32), "x": (1, 2, 5, 4)},
)
_RAFT = "<int64[2] nc = {1, 2}> { hw = Shape<start=2>(image) sizes = Concat<axis=0>(nc, hw)"
_RAFT_INPUTS = "float[1,3,h,w] image, float[1,2,a,b] x"
_RAFT_DIMS = {"image": (1, 3, "8*s17", "8*s62"), "x": (1, 2, "s17", "s62")}

CASES: tuple[Case, ...] = (
    _resize("align_corners", "positive", _ALIGNED),
    _resize("half_pixel", "positive", 'mode="linear"'),
    _resize("cubic", "positive", 'mode="cubic", cubic_coeff_a=-0.75'),
    _resize(
        "pytorch_half_pixel",
        "positive",
        'mode="linear", coordinate_transformation_mode="pytorch_half_pixel"',
    ),
    *(
        _resize(
            f"nearest {mode} {nearest}",
            "positive",
            f'mode="nearest", coordinate_transformation_mode="{mode}", nearest_mode="{nearest}"',
        )
        for mode, nearest in (
            ("asymmetric", "floor"),
            ("half_pixel", "round_prefer_floor"),
            ("half_pixel", "round_prefer_ceil"),
            ("align_corners", "ceil"),
        )
    ),
    _resize(
        "sizes of another input",
        "positive",
        _ALIGNED,
        _RAFT,
        inputs=_RAFT_INPUTS,
        shapes=_PAIR,
        dims=_RAFT_DIMS,
    ),
    _resize(
        "sizes through floats",
        "positive",
        'mode="nearest"',
        "<int64[2] nc = {1, 2}, float k = {2.0}, int64 i2 = {2}, int64 i3 = {3}, "
        "int64[1] z = {0}> { s = Shape(x) h = Gather<axis=0>(s, i2) w = Gather<axis=0>(s, i3)"
        "fh = Cast<to=1>(h) fw = Cast<to=1>(w) gh = Mul(fh, k) gw = Mul(fw, k) "
        "rh = Floor(gh) rw = Floor(gw) ih = Cast<to=7>(rh) iw = Cast<to=7>(rw) "
        "uh = Unsqueeze(ih, z) uw = Unsqueeze(iw, z) sizes = Concat<axis=0>(nc, uh, uw)",
        inputs="float[1,2,h,w] x",
        shapes=(_UP[0], _UP[2]),
    ),
    _resize(
        "computed scales",
        "near miss",
        'mode="linear"',
        "<float[2] one = {1.0, 1.0}, int64[1] k = {3}> { hw = Shape<start=2>(x) "
        "big = Mul(hw, k) f = Cast<to=1>(big) g = Cast<to=1>(hw) r = Div(f, g) "
        "scales = Concat<axis=0>(one, r)",
        last="x, , scales",
    ),
    _resize(
        "opset 11, empty roi and scales",
        "positive",
        'mode="nearest"',
        "<float[0] no = {}, int64[4] k = {1, 1, 2, 4}> { s = Shape(x) sizes = Mul(s, k)",
        last="x, no, no, sizes",
        opset=11,
    ),
    Case(
        "scale_resize",
        "in a body of If",
        "positive",
        f"(float[n,2,h,w] x, bool c) => (float[n,2,p,q] y) {_TWICE} y = If(c) <"
        "then_branch = t () => (float[n,2,p,q] a) { a = Resize(x, , , sizes) },"
        "else_branch = e () => (float[n,2,p,q] b) { b = Resize(x, , , sizes) }> }",
        tuple({**shapes, "c": ()} for shapes in _UP),
    ),
    _resize(
        "constant scales",
        "near miss",
        'mode="linear"',
        "<float[4] s = {1, 1, 2, 2}> {",
        last="x, , s",
    ),
    _resize(
        "constant sizes",
        "near miss",
        'mode="linear"',
        "<int64[4] s = {1, 2, 9, 9}> {",
        last="x, , , s",
        shapes=(_UP[0], _UP[2]),
    ),
    _resize(
        "half the size",
        "refusal",
        'mode="linear"',
        _TWICE.replace("Mul", "Div"),
        reason="not a constant whole number",
    ),
    _resize(
        "one more",
        "refusal",
        'mode="linear"',
        _TWICE.replace("Mul", "Add"),
        reason="not a constant whole number",
    ),
    _resize(
        "unrelated sizes",
        "refusal",
        _ALIGNED,
        _RAFT,
        inputs=_RAFT_INPUTS,
        shapes=_PAIR,
        reason="not a constant whole number",
    ),
    _resize(
        "sizes rounded in float",
        "refusal",
        'mode="nearest"',
        "<int64[2] nc = {1, 2}, float[1] k = {49.0}> { hw = Shape<start=2>(x) "
        "f = Cast<to=1>(hw) d = Div(f, k) m = Mul(d, k) c = Cast<to=7>(m) "
        "sizes = Concat<axis=0>(nc, c)",
        inputs="float[1,2,h,w] x",
        shapes=(_UP[0], _UP[2]),
        reason="not a constant whole number",
    ),
    _resize("antialias", "refusal", 'mode="linear", antialias=1', reason="antialias"),
    _resize("axes", "refusal", 'mode="linear", axes=[2, 3]', last="x, , , big", reason="axes"),
    _resize(
        "keep_aspect_ratio_policy",
        "refusal",
        'mode="linear", keep_aspect_ratio_policy="not_larger"',
        reason="keep_aspect",
    ),
    _resize(
        "tf_crop_and_resize",
        "refusal",
        'mode="linear", coordinate_transformation_mode="tf_crop_and_resize"',
        _TWICE.replace("<int64[1]", "<float[8] roi = {0, 0, 0, 0, 1, 1, 0.5, 0.5}, int64[1]"),
        last="x, roi, , sizes",
        reason="tf_crop",
    ),
)
