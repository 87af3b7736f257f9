"""Findings: every kind is listed with its meaning and its sentence, and the sentences are short."""

from __future__ import annotations

import re
from string import Formatter
from typing import get_args

import pytest

from pipeline.spec.findings import FAILING, NOTES, Kind, Note, NoteKind, note
from pipeline.spec.verdicts import (
    ADVICE,
    CHECKS,
    GOOD_CHECKS,
    ROW_CHANGES,
    VERDICTS,
    AdviceKind,
    Check,
    CheckKind,
    RowChangeKind,
    Verdict,
    VerdictKind,
)

LISTED: list[Kind] = [*NOTES.values(), *VERDICTS.values(), *CHECKS.values()]


def test_every_kind_is_listed() -> None:
    for kinds, table in (
        (NoteKind, NOTES),
        (VerdictKind, VERDICTS),
        (CheckKind, CHECKS),
        (AdviceKind, ADVICE),
        (RowChangeKind, ROW_CHANGES),
    ):
        assert list(get_args(kinds)) == list(table)
    assert NOTES.keys() >= FAILING and CHECKS.keys() >= GOOD_CHECKS


@pytest.mark.parametrize("kind", LISTED, ids=lambda kind: kind.meaning)
def test_sentences_are_short(kind: Kind) -> None:
    assert kind.meaning.endswith(".")
    for text in (kind.meaning, kind.text):
        for sentence in re.split(r"[.;:] ", text):
            assert len(sentence.split()) <= 25, sentence


@pytest.mark.parametrize("kind", NOTES)
def test_a_note_needs_its_facts(kind: NoteKind) -> None:
    names = [name for _, name, _, _ in Formatter().parse(NOTES[kind].text) if name]
    facts = dict.fromkeys(names, 1)
    assert note(kind, **facts).text
    for name in names:
        with pytest.raises(KeyError):
            note(kind, **{key: 1 for key in names if key != name})


def test_facts_are_shown_by_what_they_are() -> None:
    large = note("too-large", need_bytes=3 << 30, limit_bytes=1 << 20)
    assert large.text == "needs about 3.0 GiB, the limit is 1.0 MiB"
    at = note("size-not-compared", sizes={"h": 4, "w": 6})
    assert at.text == "h=4,w=6 was compared before and is not now"
    assert note("sizes-left-to-the-run", names=("y axis 0", "z axis 1")).text.endswith(
        ": y axis 0, z axis 1"
    )


def test_one_finding_at_several_sizes_has_one_subject() -> None:
    first, second = (
        note("memory-not-counted", label=str(n), sizes={"h": n}, count=3) for n in (1, 2)
    )
    other = note("memory-not-counted", label="1", sizes={"h": 1}, count=4)
    assert first.subject == second.subject != other.subject


def test_more_facts_change_the_text_and_not_the_kind() -> None:
    plain = Verdict("not-finite", ("torch", "engine"), "y", facts={"whose": "engine"})
    known = plain.knowing(advice="fp16-overflow", clean="torch", where="first difference: Mul node")
    assert known.kind == plain.kind == "not-finite" and not known.passed
    assert known.what == "engine has NaN or infinity where torch has none"
    assert known.where == "first difference: Mul node"
    advice = ADVICE["fp16-overflow"]
    assert known.do == advice.format(without_overflow="auto, bf16 or tf32")
    assert "auto" not in known.knowing(recipe="half.recipe").do
    assert known.text == f"{known.what}. First difference: Mul node. {known.do}"
    located = plain.knowing(locate={"h": 5, "w": 7})
    assert located.do == "`pipeline locate ARTIFACT --shape h=5,w=7` finds where"


def test_a_stored_text_stays() -> None:
    assert Note("no-batch-dim", {}, "as it was").text == "as it was"
    check = Check("determinism", "engine", "beyond-tolerance", {}, {}, (), "as it was")
    assert check.text == "as it was" and not check.passed
