"""Scatter with a reduction: index_add, index_put, scatter_add and scatter_reduce of torch."""

from __future__ import annotations

from typing import Any

from pipeline.passes.case import Case, Kind, Shapes

_SMALL: Shapes = {"x": (3, 4), "i": (2, 4), "u": (2, 4)}
_LARGE = {"x": (6, 4), "i": (9, 4), "u": (9, 4)}
_ROWS = ({"x": (3, 4), "i": (2, 1), "u": (2, 4)}, {"x": (6, 4), "i": (9, 1), "u": (9, 4)})


def _scatter(name: str, text: str, shapes: tuple[Shapes, ...], **more: Any) -> Case:
    kind: Kind = more.pop("kind", "positive")
    fails = {"rtx-1.7": "parse"} if kind == "positive" else {}
    more = {"ranges": {"i": (-3, 3)}, "fails": fails, **more}
    return Case("expand_scatter", name, kind, text, shapes, **more)


def _elements(
    reduction: str, dtype: str, dims: str = "n,4 k,4", axis: int = 0, init: str = ""
) -> str:
    x, i = dims.split()
    attribute = f', reduction="{reduction}"' if reduction else ""
    return (
        f"({dtype}[{x}] x, int64[{i}] i, {dtype}[{i}] u) => ({dtype}[{x}] y) {init} "
        f"{{ y = ScatterElements<axis={axis}{attribute}>(x, i, u) }}"
    )


def _tuples(reduction: str, dtype: str, x: str = "n,4", i: str = "k,1", u: str = "k,4") -> str:
    attribute = f'<reduction="{reduction}">' if reduction else ""
    return (
        f"({dtype}[{x}] x, int64[{i}] i, {dtype}[{u}] u) => ({dtype}[{x}] y) "
        f"{{ y = ScatterND{attribute}(x, i, u) }}"
    )


_VOLUME = (
    {"x": (2, 3, 4, 5), "i": (4, 2), "u": (4, 4, 5)},
    {"x": (3, 4, 2, 7), "i": (9, 2), "u": (9, 2, 7)},
)
_IF = (
    "(float[n,4] x, int64[k,1] i, float[k,4] u, bool c) => (float[n,4] y) { y = If(c) "
    "<then_branch = t () => (float[n,4] p) "
    '{ p = ScatterND<reduction="add">(x, i, u) }, '
    "else_branch = e () => (float[n,4] q) { q = Identity(x) }> }"
)

CASES: tuple[Case, ...] = (
    *(
        _scatter(f"elements {r} {dtype}", _elements(r, dtype), (_SMALL, _LARGE))
        for r in ("add", "mul", "max", "min")
        for dtype in ("float", "int64")
    ),
    *(
        _scatter(f"tuples {r} {dtype}", _tuples(r, dtype), _ROWS)
        for r in ("add", "mul", "max", "min")
        for dtype in ("float", "int32")
    ),
    *(
        _scatter(f"elements {r}, opset 16", _elements(r, "float"), (_SMALL, _LARGE), opset=16)
        for r in ("add", "mul")
    ),
    *(
        _scatter(f"tuples {r}, opset 16", _tuples(r, "float"), _ROWS, opset=16)
        for r in ("add", "mul")
    ),
    _scatter(
        "elements static",
        _elements("add", "float", "6,4 3,4"),
        ({"x": (6, 4), "i": (3, 4), "u": (3, 4)},),
    ),
    _scatter(
        "elements last axis",
        _elements("add", "float", "n,h,w n,h,k", -1),
        (
            {"x": (1, 2, 3), "i": (1, 2, 5), "u": (1, 2, 5)},
            {"x": (2, 4, 7), "i": (2, 4, 3), "u": (2, 4, 3)},
        ),
    ),
    _scatter(
        "elements middle axis of smaller updates",
        _elements("max", "float", "5,h,6 3,k,6", 1),
        (
            {"x": (5, 3, 6), "i": (3, 2, 6), "u": (3, 2, 6)},
            {"x": (5, 7, 6), "i": (3, 9, 6), "u": (3, 9, 6)},
        ),
    ),
    _scatter(
        "elements of updates whose size is not known to be smaller",
        _elements("add", "float", "n,c k,m"),
        (
            {"x": (3, 4), "i": (2, 4), "u": (2, 4)},
            {"x": (6, 5), "i": (7, 3), "u": (7, 3)},
        ),
    ),
    _scatter(
        "elements of one axis",
        _elements("add", "int64", "n k"),
        ({"x": (3,), "i": (5,), "u": (5,)}, {"x": (6,), "i": (2,), "u": (2,)}),
    ),
    _scatter(
        "elements by int32 indices",
        _elements("add", "float").replace("int64", "int32"),
        (_SMALL, _LARGE),
    ),
    _scatter(
        "tuples of the full depth",
        _tuples("add", "float", "n,m", "k,2", "k"),
        ({"x": (3, 4), "i": (5, 2), "u": (5,)}, {"x": (6, 3), "i": (9, 2), "u": (9,)}),
    ),
    _scatter(
        "tuples of planes",
        _tuples("add", "float", "a,b,h,w", "k,2", "k,h,w"),
        _VOLUME,
        ranges={"i": (-2, 2)},
    ),
    _scatter(
        "tuples of planes, min",
        _tuples("min", "float", "a,b,h,w", "k,2", "k,h,w"),
        _VOLUME,
        ranges={"i": (-2, 2)},
    ),
    _scatter(
        "tuples in two axes",
        _tuples("add", "float", "n,4", "j,k,1", "j,k,4"),
        (
            {"x": (3, 4), "i": (2, 3, 1), "u": (2, 3, 4)},
            {"x": (6, 4), "i": (3, 4, 1), "u": (3, 4, 4)},
        ),
    ),
    _scatter(
        "tuples in If",
        _IF,
        tuple({**shapes, "c": ()} for shapes in _ROWS),
    ),
    _scatter(
        "tuples counted into zeros",
        "(int64[k] i) => (int64[6] y) <int64[1] last = {-1}, int64 one = {1}, int64[k,1] t, "
        "int64[6] zeros = {0,0,0,0,0,0}> { s = Shape(i) u = Expand(one, s) "
        't = Unsqueeze(i, last) y = ScatterND<reduction="add">(zeros, t, u) }',
        ({"i": (3,)}, {"i": (20,)}),
    ),
    _scatter("elements none", _elements("", "float"), (_SMALL,), kind="near miss"),
    _scatter("elements none by name", _elements("none", "float"), (_SMALL,), kind="near miss"),
    _scatter(
        "tuples none",
        _tuples("", "float"),
        ({"x": (3, 4), "i": (1, 1), "u": (1, 4)},),
        kind="near miss",
    ),
    _scatter(
        "too many pairs",
        _elements("add", "float", "20000,1 20000,1"),
        ({"x": (20000, 1), "i": (20000, 1), "u": (20000, 1)},),
        kind="refusal",
        reason="pairs",
    ),
    _scatter(
        "integers of 8 bits",
        _elements("add", "uint8"),
        (_SMALL,),
        kind="refusal",
        reason="uint8",
    ),
    _scatter(
        "rank unknown",
        "(float[n,4] x, int64[k,4] i, float[k,4] u, int64[m] s) => (float[n,4] y) { "
        'r = Reshape(x, s) y = ScatterElements<axis=0, reduction="add">(r, i, u) }',
        ({**_SMALL, "x": (4, 4), "s": (2,)},),
        ranges={"i": (-3, 3), "s": (4, 5)},
        kind="refusal",
        reason="rank of r",
    ),
)
