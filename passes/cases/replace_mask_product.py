"""Masks times infinity.

Every element is masked here, since the unchanged graph gives NaN for the others. The test of the
pass compares those with torch.
"""

from __future__ import annotations

from typing import Any

from pipeline.passes.case import Case, Kind

_SHAPES = tuple({"x": s, "m": s} for s in ((1, 2), (3, 5), (8, 7)))
# as bits: -inf, 1 and -1000
_HALF = "<float16 c = {64512}, float16 one = {15360}, float16 low = {58320}>"
_TRUE, _MANY = {"m": (1, 2)}, {"m": (1, 5)}


def _case(name: str, kind: Kind, body: str, mask: str = "bool", **more: Any) -> Case:
    # TensorRT-RTX builds it; only a GPU shows the numbers
    fails: dict[str, Any] = {"rtx-1.7": "none"} if kind == "positive" else {}
    dtype, constants = more.pop("dtype", "float16"), more.pop("constants", _HALF)
    text = f"({dtype}[h,w] x, {mask}[h,w] m) => ({dtype}[h,w] y) {constants} {{ {body} }}"
    more = {"ranges": _TRUE, "shapes": _SHAPES, "fails": fails, **more}
    return Case("replace_mask_product", name, kind, text, **more)


_ADD = "b = Max(w, low) y = Add(x, b)"

CASES: tuple[Case, ...] = (
    _case("boolean mask", "positive", f"f = Cast<to = 10>(m) w = Mul(f, c) {_ADD}"),
    _case(
        "one minus a boolean mask",
        "positive",
        f"n = Not(m) f = Cast<to = 10>(n) g = Sub(one, f) w = Mul(g, c) {_ADD}",
    ),
    _case(
        "integer mask, opset 13",
        "positive",
        f"f = Cast<to = 10>(m) w = Mul(c, f) {_ADD}",
        mask="int64",
        ranges=_MANY,
        opset=13,
    ),
    _case(
        "integer mask minus one",
        "positive",
        # the mask is 2 to 4 here, so that no product is 0 times infinity
        f"f = Cast<to = 10>(m) g = Sub(f, one) w = Mul(g, c) {_ADD}",
        mask="int64",
        ranges={"m": (2, 5)},
    ),
    _case(
        "one minus an integer mask",
        "positive",
        "f = Cast<to = 10>(m) g = Sub(one, f) w = Mul(g, c) b = Min(w, one) y = Add(x, b)",
        mask="int64",
        ranges={"m": (2, 5)},
    ),
    _case(
        "mask with axes added",
        "positive",
        "f = Cast<to = 1>(m) h = Cast<to = 10>(f) u = Unsqueeze(h, ax) w = Mul(u, c)"
        "b = Max(w, low) s = Squeeze(b, ax) y = Add(x, s)",
        constants=_HALF[:-1] + ", int64[1] ax = {1}>",
    ),
    _case(
        "float32",
        "positive",
        f"f = Cast<to = 1>(m) w = Mul(f, z) {_ADD}",
        dtype="float",
        constants="<float k = {-1}, float zero = {0}, float[1] z = {-inf}, float low = {-1000}>",
    ),
    _case(
        "finite constant",
        "near miss",
        "f = Cast<to = 10>(m) w = Mul(f, low) y = Add(x, w)",
    ),
    _case("Where with infinity", "near miss", f"w = Where(m, c, one) {_ADD}"),
    _case("not known to be a mask", "near miss", "e = Exp(x) w = Mul(e, c) y = Max(w, low)"),
)
