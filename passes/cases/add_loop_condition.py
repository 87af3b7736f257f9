"""Loops without a condition, and Loops whose condition is a network input."""

from __future__ import annotations

from typing import Any

from pipeline.passes.case import Case, Kind

_ROWS = ({"x": (1, 4)}, {"x": (3, 5)})
_CHOSEN = tuple({**shapes, "k": ()} for shapes in _ROWS)


def _case(name: str, inputs: str, condition: str, body: str = "", **more: Any) -> Case:
    """A Loop that doubles x three times, and adds the iteration's number."""
    kind: Kind = more.pop("kind", "positive")
    body = body or "d = Identity(c)"
    text = (
        f"({inputs}) => (float[n,m] y) <int64 t = {{3}}, bool yes = {{1}}> "
        f"{{ y = Loop(t{condition}, x) <body = b (int64 i, bool c, float[n,m] v) => "
        f"(bool d, float[n,m] u) {{ {body} w = Add(v, v) f = Cast<to=1>(i) u = Add(w, f) }}> }}"
    )
    fails = more.pop("fails", "none")
    return Case(
        "add_loop_condition", name, kind, **{"text": text, "shapes": _ROWS, **more},
        fails={"rtx-1.7": fails},
    )  # fmt: skip


CASES: tuple[Case, ...] = (
    _case("none", "float[n,m] x", ",", fails="parse"),
    _case("none, opset 13", "float[n,m] x", ",", fails="parse", opset=13),
    _case("none, read in the body, True after it", "float[n,m] x", ",",
          "o = Not(c) p = Not(o) d = Constant<value = bool {1}>()", fails="parse"),
    _case(
        "none, with what each iteration gives", "", "",
        text="(float[n,m] x) => (float[n,m] y, float[k,n,m] z) <int64 one = {1}> "
        "{ s = Shape(x) t = Gather(s, one) y, z = Loop(t, , x) <body = b "
        "(int64 i, bool c, float[n,m] v) => (bool d, float[n,m] u, float[n,m] r) "
        "{ d = Identity(c) u = Add(v, v) r = Relu(u) }> }",
        fails="parse",
    ),
    _case(
        "none, in a branch", "", "",
        text="(float[n,m] x, bool k) => (float[n,m] y) <int64 t = {3}> { y = If(k) <"
        "then_branch = th () => (float[n,m] a) { a = Loop(t, , x) <body = b "
        "(int64 i, bool c, float[n,m] v) => (bool d, float[n,m] u) "
        "{ d = Identity(c) u = Add(v, v) }> }, "
        "else_branch = el () => (float[n,m] e) { e = Neg(x) }> }",
        shapes=_CHOSEN, fails="parse",
    ),
    _case("a network input", "float[n,m] x, bool k", ", k", shapes=_CHOSEN, fails="build"),
    _case(
        "a network input that others read", "", "",
        text="(float[n,m] x, bool k) => (float[n,m] y, bool z) <int64 t = {3}> "
        "{ z = Not(k) y = Loop(t, k, x) <body = b (int64 i, bool c, float[n,m] v) => "
        "(bool d, float[n,m] u) { d = Identity(c) u = Add(v, v) }> }",
        shapes=_CHOSEN, fails="build",
    ),
    _case("a constant", "float[n,m] x", ", yes", kind="near miss"),
    _case(
        "computed from a network input", "", "",
        text="(float[n,m] x, bool k) => (float[n,m] y) <int64 t = {3}> "
        "{ o = Not(k) y = Loop(t, o, x) <body = b (int64 i, bool c, float[n,m] v) => "
        "(bool d, float[n,m] u) { d = Identity(c) u = Add(v, v) }> }",
        shapes=_CHOSEN, kind="near miss",
    ),
    _case(
        "none, and nobody reads it", "float[n,m] x", ",",
        "d = Constant<value = bool {1}>()", kind="near miss",
    ),
    _case(
        "none, ended by the body", "float[n,m] x", ",", "d = Greater(i, t)",
        kind="refusal", reason="which the ONNX standard ignores and ONNX Runtime obeys",
    ),
)  # fmt: skip
