"""Pooled images that are flattened."""

from __future__ import annotations

from pipeline.passes.case import Case, Kind

_IMAGES = ({"x": (1, 3, 4, 6)}, {"x": (2, 3, 5, 9)}, {"x": (5, 3, 8, 7)})


def _pooled(
    name: str, target: str, kind: Kind = "positive", attrs: str = "", out: str = ""
) -> Case:
    text = (
        f"(float[n,3,h,w] x) => (float[{out or 'n,3'}] y) <int64[2] to = {{{target}}}> "
        f"{{ p = GlobalAveragePool(x) y = Reshape{attrs}(p, to) }}"
    )
    return Case("squeeze_pooled", name, kind, text, _IMAGES)


CASES: tuple[Case, ...] = (
    _pooled("channels", "-1, 3"),
    _pooled("channels, allowzero", "-1, 3", attrs="<allowzero=1>"),
    _pooled("rows are copied", "0, 3"),
    Case(
        "squeeze_pooled", "one row", "positive",
        "(float[1,3,h,w] x) => (float[1,3] y) <int64[2] to = {1, 3}> "
        "{ p = GlobalAveragePool(x) y = Reshape(p, to) }",
        ({"x": (1, 3, 4, 6)}, {"x": (1, 3, 5, 9)}, {"x": (1, 3, 8, 7)}),
    ),
    Case(
        "squeeze_pooled", "channels last", "positive",
        "(float[n,3,h,w] x) => (float[n,3] y) <int64[2] to = {-1, 3}> "
        "{ p = GlobalAveragePool(x) t = Transpose<perm=[0,2,3,1]>(p) r = Relu(t) "
        "b = Transpose<perm=[0,3,1,2]>(r) y = Reshape(b, to) }",
        _IMAGES,
    ),
    Case(
        "squeeze_pooled", "any channels", "positive",
        "(float[n,c,h,w] x) => (float[n,c] y) <int64[2] to = {0, -1}> "
        "{ p = GlobalAveragePool(x) y = Reshape(p, to) }",
        ({"x": (1, 3, 4, 6)}, {"x": (2, 4, 5, 9)}, {"x": (5, 2, 8, 7)}),
    ),
    _pooled("one column", "-1, 1", "near miss", out="m,1"),
    _pooled("one row of all", "1, -1", "near miss", out="1,m"),
    Case(
        "squeeze_pooled", "one row, the rest counted", "near miss",
        "(float[1,3,h,w] x) => (float[1,3] y) <int64[2] to = {1, -1}> "
        "{ p = GlobalAveragePool(x) y = Reshape(p, to) }",
        ({"x": (1, 3, 4, 6)}, {"x": (1, 3, 5, 9)}, {"x": (1, 3, 8, 7)}),
    ),
    Case(
        "squeeze_pooled", "rows and channels join", "near miss",
        "(float[n,4,h,w] x) => (float[m,2] y) <int64[2] to = {-1, 2}> "
        "{ p = GlobalAveragePool(x) y = Reshape(p, to) }",
        tuple({"x": (n, 4, 5, 6)} for n in (1, 2, 5)),
    ),
    Case(
        "squeeze_pooled", "a width that may be 1", "near miss",
        "(float[n,3,1,w] x) => (float[m,3] y) <int64[2] to = {-1, 3}> { y = Reshape(x, to) }",
        ({"x": (1, 3, 1, 1)}, {"x": (2, 3, 1, 4)}, {"x": (5, 3, 1, 7)}),
    ),
    Case(
        "squeeze_pooled", "one axis is left", "near miss",
        "(float[n,3,h,w] x) => (float[n,3,1] y) <int64[3] to = {-1, 3, 1}> "
        "{ p = GlobalAveragePool(x) y = Reshape(p, to) }",
        _IMAGES,
    ),
)  # fmt: skip
