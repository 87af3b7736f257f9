"""Compress with and without an axis."""

from __future__ import annotations

from typing import Any

from pipeline.passes.case import Case, Kind

_SHAPES = tuple({"x": (n, 4)} for n in (1, 3, 9))
_FIXED = ({"x": (2, 4)},)


def _case(name: str, kind: Kind, text: str, shapes: Any = _SHAPES, **more: Any) -> Case:
    fails: dict[str, Any] = {} if kind == "near miss" else {"rtx-1.7": "parse"}
    return Case("replace_compress", name, kind, text, shapes, fails=fails, **more)


CASES: tuple[Case, ...] = (
    _case(
        "constant condition",
        "positive",
        "(float[n,4] x) => (float[n,2] y) <bool[4] c = {0, 1, 0, 1}>"
        "{ y = Compress<axis = 1>(x, c) }",
    ),
    _case(
        "axis from the back, opset 13, half",
        "positive",
        "(float16[n,4] x) => (float16[n,3] y) <bool[4] c = {1, 1, 0, 1}>"
        "{ y = Compress<axis = -1>(x, c) }",
        opset=13,
    ),
    _case(
        "shorter than the axis",
        "positive",
        "(float[n,4] x) => (float[n,1] y) <bool[2] c = {0, 1}> { y = Compress<axis = 1>(x, c) }",
    ),
    _case(
        "no axis",
        "positive",
        "(float[2,4] x) => (float[3] y) <bool[8] c = {0, 1, 0, 1, 0, 0, 0, 1}>"
        "{ y = Compress(x, c) }",
        _FIXED,
    ),
    _case(
        "inside If",
        "positive",
        "(float[n,4] x, bool c) => (float[n,2] y) <bool[4] a = {0, 1, 0, 1}, bool[2] b = {1, 1}>"
        "{ y = If(c) <then_branch = t () => (float[n,2] p) { p = Compress<axis = 1>(x, a) },"
        "else_branch = e () => (float[n,2] q) { q = Compress<axis = 1>(x, b) }> }",
        tuple({**s, "c": ()} for s in _SHAPES),
    ),
    _case(
        "computed condition",
        "refusal",
        "(float[n,4] x, bool[n] c) => (float[k,4] y) { y = Compress<axis = 0>(x, c) }",
        tuple({**s, "c": s["x"][:1]} for s in _SHAPES),
        reason="depends on the data",
    ),
    _case(
        "Gather already",
        "near miss",
        "(float[n,4] x) => (float[n,2] y) <int64[2] i = {1, 3}> { y = Gather<axis = 1>(x, i) }",
    ),
)
