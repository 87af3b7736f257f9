"""A guard is called proved only where it holds at every size, seen by trying every one."""

from __future__ import annotations

import itertools

import pytest

from pipeline.export import proof
from pipeline.export.proof import evidence, proved
from pipeline.probe.evaluate import holds

H, W = range(135, 700), range(136, 700, 8)
GUARDS = [
    # (guard, holds everywhere, is of a form that is proved from its period)
    ("Eq(Mod(h + Mod(-h, 8), 8), 0)", True, True),
    ("Eq(8*((h//8)) + Mod(h, 8), h)", True, True),
    ("((h//8)*w <= h*w) & Ne(h*w, 0)", True, True),
    ("And(h >= 135, Ne(Mod(w, 8), 3))", True, True),
    ("Eq(PythonMod(w, 8), h - h)", True, True),
    ("4*((h + 3)//4) - h < 4", True, True),
    ("h*w < 480000", False, True),
    ("Eq(Mod(w, 16), 0)", False, True),
    ("Ne(Mod(h, 64), 63)", False, True),
    ("Ne(h, 400)", False, True),
    ("Eq(h, 400) | Ne(h, 400)", True, False),
    ("h*h > 4", True, False),
    ("IntTrueDiv(h, 2) > 4.5", True, False),
    ("Ne(Mod(h, 8), 9) | (h < 9)", True, False),
]


def everywhere(guard: str) -> bool:
    return all(
        holds(guard, {"h": h, "w": w}) for h, w in itertools.product(H, W if "w" in guard else [0])
    )


@pytest.mark.parametrize(("guard", "true", "of_the_form"), GUARDS)
def test_proofs_agree_with_every_size(monkeypatch, guard, true, of_the_form) -> None:
    values = {"h": H, "w": W} if "w" in guard else {"h": H}
    assert everywhere(guard) == true
    assert proved(guard, values) == true  # at every size
    monkeypatch.setattr(proof, "_MOST", 1 << 14)  # fewer than there are, enough for the periods
    if max(map(len, values.values())) ** len(values) > 1 << 14:
        assert proved(guard, values) == (true and of_the_form)
    elif not true:
        assert not proved(guard, values)


def test_ranges_too_long_to_try_are_proved_from_the_period() -> None:
    long = {"h": range(1, 1 << 40), "w": range(8, 1 << 40, 8)}
    assert proved("Eq(Mod(h + Mod(-h, 8), 8) + Mod(w, 8), 0)", long)
    assert not proved("Eq(Mod(h, 8), 0)", long)
    assert not proved("h*w < 1000", long)
    assert not proved("Ne(h, 123456789)", long)
    assert not proved("h*h*w > 0", long)  # true, but of another form
    assert not proved("unknown(h) > w", long)


def test_what_is_said_tells_a_proof_from_a_sample() -> None:
    assert evidence(9, 9, ["h"], is_proved=True) == "proved: it holds at all 9 sizes of h"
    said = evidence(10**9, 9, ["h", "w"], is_proved=True)
    assert said == "proved: it holds over a full period at both ends of the range of h and w"
    said = evidence(10**9, 9, ["h", "w"], is_proved=False)
    assert said == "holds at all 9 sizes of h and w that were evaluated, of 1000000000"
    assert "proved" not in said
