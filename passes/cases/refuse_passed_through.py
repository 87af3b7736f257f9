"""Networks with an output that is an input."""

from __future__ import annotations

from pipeline.passes.case import Case, Failure, Kind

_ROWS = ({"x": (1, 4)}, {"x": (3, 5)})


def _case(name: str, text: str, kind: Kind = "refusal", fails: Failure = "build") -> Case:
    return Case(
        "refuse_passed_through", name, kind, text, _ROWS,
        reason="return a copy" if kind == "refusal" else "", fails={"rtx-1.7": fails},
    )  # fmt: skip


CASES: tuple[Case, ...] = (
    _case("input as output", "(float[n,m] x) => (float[n,m] y, float[n,m] x) { y = Relu(x) }"),
    _case(
        "copy of the input",
        "(float[n,m] x) => (float[n,m] y, float[n,m] z) { y = Relu(x) z = Identity(x) }",
        "near miss",
        "none",
    ),
)
