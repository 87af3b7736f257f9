"""Model-local functions: called once, called twice, nested, in a branch."""

from __future__ import annotations

from pipeline.passes.case import Case, Kind

_X = ({"x": (1, 3)}, {"x": (4, 3)})
_LAST = (
    '<opset_import: ["" : 18], domain: "local"> last (a) => (b) '
    "{ s = Shape<start=1>(a) f = Cast<to=1>(s) b = Mul(a, f) }"
)
_TWICE = (
    '<opset_import: ["" : 18, "local" : 1], domain: "local"> twice (a) => (b) '
    "{ c = local.last(a) b = local.last(c) }"
)


def _case(name: str, kind: Kind, body: str, *functions: str) -> Case:
    text = f"(float[n,3] x) => (float[n,3] y) {{ {body} }}"
    return Case(
        "inline_functions", name, kind, " ".join((text, *functions)), _X,
        imports={"local": 1} if functions else {},
    )  # fmt: skip


CASES: tuple[Case, ...] = (
    _case("one call", "positive", "r = Relu(x) y = local.last(r)", _LAST),
    _case("two calls", "positive", "r = local.last(x) y = local.last(r)", _LAST),
    _case("nested", "positive", "y = local.twice(x)", _TWICE, _LAST),
    _case("none", "near miss", "y = Relu(x)"),
)
