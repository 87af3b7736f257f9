"""Hardmax over axes of dynamic and of static size."""

from __future__ import annotations

from typing import Any

from pipeline.passes.case import Case, Failure, Kind, Shapes

_MATRICES: tuple[Shapes, ...] = ({"x": (2, 3)}, {"x": (5, 4)})


def _hard(name: str, kind: Kind, text: str, rtx: Failure, **more: Any) -> Case:
    shapes = more.pop("shapes", _MATRICES)
    return Case("expand_hardmax", name, kind, text, shapes, fails={"rtx-1.7": rtx}, **more)


def _of(attributes: str = "", x: str = "n,m", dtype: str = "float") -> str:
    return f"({dtype}[{x}] x) => ({dtype}[{x}] y) {{ y = Hardmax{attributes}(x) }}"


CASES: tuple[Case, ...] = (
    _hard("last axis", "positive", _of(), "build"),
    _hard("first axis, opset 13", "positive", _of("<axis=0>"), "build", opset=13),
    _hard(
        "middle axis", "positive", _of("<axis=-2>", "n,k,4"), "build",
        shapes=({"x": (2, 3, 4)}, {"x": (3, 6, 4)}),
    ),
    _hard("only axis", "positive", _of(x="n"), "parse", shapes=({"x": (2,)}, {"x": (5,)})),
    _hard(
        "static axis", "positive", _of(x="n,4"), "none",
        shapes=({"x": (2, 4)}, {"x": (5, 4)}),
    ),
    _hard("Softmax", "near miss", _of().replace("Hardmax", "Softmax"), "none"),
    _hard("opset 12", "refusal", _of("<axis=1>"), "build", opset=12, reason="opset 13"),
)  # fmt: skip
