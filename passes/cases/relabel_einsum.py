"""Einsum equations with capital letters."""

from __future__ import annotations

from pipeline.passes.case import Case, Kind

_XY = ({"x": (2, 3, 4), "y": (2, 3, 5)}, {"x": (3, 2, 6), "y": (3, 2, 4)})


def _case(name: str, equation: str, result: str, kind: Kind = "positive") -> Case:
    text = (
        f"(float[a,b,c] x, float[a,b,d] y) => (float[{result}] z) "
        f'{{ z = Einsum<equation="{equation}">(x, y) }}'
    )
    if kind == "positive":
        return Case("relabel_einsum", name, kind, text, _XY, fails={"rtx-1.7": "parse"})
    return Case("relabel_einsum", name, kind, text, _XY)


CASES: tuple[Case, ...] = (
    _case("two sizes of one axis", "bch,bcH->bhH", "a,c,d"),
    _case("capitals alone", "BCH,BCK->BHK", "a,c,d"),
    _case("spaces", "bch, bcH -> bhH", "a,c,d"),
    _case("small letters", "bch,bck->bhk", "a,c,d", "near miss"),
)
