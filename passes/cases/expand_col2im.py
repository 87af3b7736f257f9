"""Col2Im, as torch's fold writes it."""

from __future__ import annotations

from typing import Any

from pipeline.passes.case import Case, Kind, Shapes


def _fold(name: str, text: str, shapes: tuple[Shapes, ...], **more: Any) -> Case:
    kind: Kind = more.pop("kind", "positive")
    fails = {"rtx-1.7": "parse"} if kind == "positive" else {}
    return Case("expand_col2im", name, kind, text, shapes, **{"fails": fails, **more})


def _of(attributes: str = "", image: str = "5,6", dtype: str = "float", block: str = "2,3") -> str:
    height, width = image.split(",")
    attributes = f"<{attributes}>" if attributes else ""
    return (
        f"({dtype}[n,12,l] x) => ({dtype}[n,2,{height},{width}] y) "
        f"<int64[2] s = {{{image}}}, int64[2] b = {{{block}}}> "
        f"{{ y = Col2Im{attributes}(x, s, b) }}"
    )


def _columns(*sizes: tuple[int, int]) -> tuple[Shapes, ...]:
    return tuple({"x": (n, 12, length)} for n, length in sizes)


_COMPUTED = (
    "(float[n,c,l] x, float[n,m,h,w] z) => (float[n,m,h,w] y) <int64[2] b = {{3, 2}}, "
    "int64[1] two = {{2}}, int64[1] three = {{3}}, int64[1] four = {{4}}> "
    "{{ h = Shape(z) s = Slice(h, two, four) y = Col2Im<{}>(x, s, b) }}"
)


def _computed(*rows: tuple[int, int, int, int, int]) -> tuple[Shapes, ...]:
    return tuple({"x": (n, 6 * m, k), "z": (n, m, h, w)} for n, m, h, w, k in rows)


CASES: tuple[Case, ...] = (
    _fold("plain", _of(), _columns((1, 16), (3, 16))),
    _fold("half", _of(dtype="float16"), _columns((1, 16), (3, 16))),
    _fold("pads", _of("pads=[1,2,0,1]"), _columns((1, 35), (2, 35))),
    _fold("strides that leave a rest", _of("strides=[2,2]"), _columns((1, 4), (2, 4))),
    _fold(
        "strides, pads, dilations",
        _of("strides=[2,3], pads=[2,1,1,2], dilations=[3,2]", "7,8"),
        _columns((1, 12), (2, 12)),
    ),
    _fold(
        "blocks side by side",
        _of("strides=[2,3]", "6,9"),
        _columns((1, 9), (2, 9)),
    ),
    _fold(
        "computed sizes",
        _COMPUTED.format("pads=[0,0,0,0]"),
        _computed((1, 2, 3, 4, 3), (2, 3, 5, 7, 18)),
    ),
    _fold(
        "computed sizes, strides, pads",
        _COMPUTED.format("strides=[2,2], pads=[1,1,1,1]"),
        _computed((1, 2, 3, 4, 6), (2, 3, 6, 7, 12)),
    ),
    _fold(
        "1-D",
        "(float[n,6,l] x) => (float[n,2,7] y) <int64[1] s = {7}, int64[1] b = {3}> "
        "{ y = Col2Im<strides=[2], pads=[1,1]>(x, s, b) }",
        ({"x": (1, 6, 4)}, {"x": (3, 6, 4)}),
    ),
    _fold(
        "3-D",
        "(float[n,8,l] x) => (float[n,1,3,4,5] y) <int64[3] s = {3,4,5}, int64[3] b = {2,2,2}> "
        "{ y = Col2Im(x, s, b) }",
        ({"x": (1, 8, 24)}, {"x": (2, 8, 24)}),
    ),
    _fold(
        "ConvTranspose",
        "(float[n,2,h,w] x) => (float[n,1,p,q] y) <float[2,1,1,1] k = {1, 2}> "
        "{ y = ConvTranspose(x, k) }",
        ({"x": (1, 2, 3, 4)},),
        kind="near miss",
    ),
    _fold(
        "computed blocks",
        "(float[1,4,6] x, int64[2] b) => (float[1,1,3,4] y) <int64[2] s = {3,4}> "
        "{ c = Identity(b) y = Col2Im(x, s, c) }",
        ({"x": (1, 4, 6), "b": (2,)},),
        kind="refusal",
        reason="computed",
        ranges={"b": (2, 3)},
    ),
)
