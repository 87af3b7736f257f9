"""OneHot, EyeLike and ArgMax with dynamic sizes or only one axis."""

from __future__ import annotations

from typing import Any

from pipeline.passes.case import Case, Failure, Kind, Shapes

_ROWS = ({"x": (2, 5)}, {"x": (3, 9)})
_INDICES = ({"x": (2, 5), "i": (2, 3)}, {"x": (3, 9), "i": (4, 3)})
_LINE = ({"x": (5,)}, {"x": (9,)})


def _case(
    name: str,
    kind: Kind,
    text: str,
    fails: Failure,
    shapes: tuple[Shapes, ...] = _ROWS,
    **more: Any,
) -> Case:
    return Case("expand_one_hot", name, kind, text, shapes, fails={"rtx-1.7": fails}, **more)


def _one_hot(axis: str, values: str = "float[2] v = {-2, 3}", kind: str = "float") -> str:
    return (
        f"(float[n,m] x, int64[k,l] i) => ({kind}[p,q,r] y) <int64 one = {{1}}, {values}> {{"
        f"s = Shape(x) d = Gather(s, one) y = OneHot{axis}(i, d, v) }}"
    )


CASES: tuple[Case, ...] = (
    _case("depth of a size", "positive", _one_hot(""), "build", _INDICES, ranges={"i": (-12, 12)}),
    _case(
        "axis 0",
        "positive",
        _one_hot("<axis=0>", "int64[2] v = {0, 1}", "int64"),
        "build",
        _INDICES,
        opset=13,
    ),
    _case(
        "axis 1, depth of rank 1",
        "positive",
        "(float[n,m] x, int64[k,l] i) => (float[p,q,r] y) <int64[1] one = {1}, float[2] v = {0, 1}>"
        "{ s = Shape(x) d = Gather(s, one) y = OneHot<axis=-2>(i, d, v) }",
        "build",
        _INDICES,
        ranges={"i": (-12, 12)},
    ),
    _case("eye", "positive", "(float[n,m] x) => (float[n,m] y) { y = EyeLike(x) }", "parse"),
    _case(
        "eye off the diagonal, int64, as torch.eye writes it",
        "positive",
        "(float[n,m] x) => (int64[p,q] y, float[p,q] z) { s = Shape(x) "
        "o = ConstantOfShape<value=float[1] {0}>(s) y = EyeLike<k=2, dtype=7>(o) "
        "z = EyeLike<k=-1>(o) }",
        "parse",
    ),
    _case(
        "argmax of one axis",
        "positive",
        "(float[m] x) => (int64[1] y, int64 z) { y = ArgMax(x) "
        "z = ArgMax<axis=-1, keepdims=0>(x) }",
        "parse",
        _LINE,
    ),
    _case(
        "argmin of one axis, the last of equals",
        "positive",
        "(float[m] x) => (int64 y, int64[1] z) { f = Floor(x) "
        "y = ArgMin<keepdims=0, select_last_index=1>(f) z = ArgMin(f) }",
        "parse",
        _LINE,
    ),
    _case(
        "depth that is static in the end",
        "near miss",
        "(float[n,9] x) => (float[p,q] y) <int64 one = {1}, float[2] v = {0, 1}> { s = Shape(x) "
        "d = Gather(s, one) i = ArgMax<axis=1, keepdims=0>(x) y = OneHot(i, d, v) }",
        "none",
        ({"x": (2, 9)}, {"x": (3, 9)}),
    ),
    _case(
        "eye of static sizes",
        "near miss",
        "(float[2,5] x) => (float[2,5] y) { y = EyeLike(x) }",
        "none",
        ({"x": (2, 5)},),
    ),
    _case(
        "argmax of two axes",
        "near miss",
        "(float[n,m] x) => (int64[1,m] y) { y = ArgMax<axis=0>(x) }",
        "none",
    ),
    _case(
        "depth of data",
        "refusal",
        "(float[n,m] x, int64[k,l] i) => (float[p,q,r] y) <float[2] v = {0, 1}> { "
        "d = ReduceMax<keepdims=0>(i) e = Abs(d) y = OneHot(i, e, v) }",
        "build",
        _INDICES,
        reason="constant",
        ranges={"i": (1, 5)},
    ),
    _case(
        "an opset whose Unsqueeze has its axes as an attribute",
        "refusal",
        "(float[m] x) => (int64[1] y) { y = ArgMax(x) }",
        "parse",
        _LINE,
        opset=12,
        reason="opset 13",
    ),
)
