"""CastLike to several dtypes, and to an unknown dtype."""

from __future__ import annotations

from pipeline.passes.case import Case

_X = ({"x": (2, 3)}, {"x": (5, 4)})


def _to(name: str, dtype: str, like: str, opset: int = 18) -> Case:
    text = f"(float[n,m] x) => ({dtype}[n,m] y) <{like}> {{ y = CastLike(x, k) }}"
    return Case("replace_cast_like", name, "positive", text, _X, opset=opset)


CASES: tuple[Case, ...] = (
    _to("to int64", "int64", "int64 k = {1}"),
    _to("to int32, opset 15", "int32", "int32[2] k = {1, 2}", opset=15),
    _to("to half", "float16", "float16 k = {15360}"),
    Case(
        "replace_cast_like",
        "like a tensor of the graph",
        "positive",
        "(float[n,m] x, int32[n] i) => (int32[n,m] y) { j = Neg(i) y = CastLike(x, j) }",
        ({"x": (2, 3), "i": (2,)}, {"x": (5, 4), "i": (5,)}),
    ),
    Case(
        "replace_cast_like",
        "inside If",
        "positive",
        "(float[n,m] x, bool c) => (int64[n,m] y) <int64 k = {1}> { y = If(c) <"
        "then_branch = t () => (int64[n,m] p) { p = CastLike(x, k) }, "
        "else_branch = e () => (int64[n,m] q) { r = Neg(x) q = CastLike(r, k) }> }",
        tuple({**shapes, "c": ()} for shapes in _X),
    ),
    Case(
        "replace_cast_like",
        "Cast",
        "near miss",
        "(float[n,m] x) => (int64[n,m] y) { y = Cast<to=7>(x) }",
        _X,
    ),
)
