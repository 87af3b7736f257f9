"""How `pipeline passes --still-needed` judges, and what it leaves out."""

from __future__ import annotations

from dataclasses import replace

import pytest
from pass_harness import PASSES, own

from pipeline.build.try_graph import Outcome
from pipeline.commands.still_needed import Trial, _answer, _is_measured, still_needed
from pipeline.machine.target import TARGETS, Versions, installed_version

RTX, OLD = TARGETS["rtx-1.7"], TARGETS["tensorrt-8.6"]
CASE = own("slice_shape", "positive")[0]


def trial(without: str, after: str = "right") -> Trial:
    return Trial(CASE, Outcome(without), Outcome(after))  # type: ignore[arg-type]


def test_needless_wants_numbers_and_a_measured_need() -> None:
    right, fails = trial("right"), trial("sizes")
    assert _answer([right, fails], True) == "needed"
    assert _answer([right, trial("sizes", "build")], True) == "broken"
    assert _answer([right], True) == "needless"
    assert _answer([right], False) == "open"
    assert _answer([right, trial("builds", "builds")], True) == "open"
    assert _answer([], True) == "open"


def test_a_need_that_was_only_read_is_not_judged_by_cases() -> None:
    p = PASSES["slice_shape"]
    assert _is_measured(p, OLD)
    assert _is_measured(p, RTX)  # not declared: the cases alone decide
    assert not _is_measured(replace(p, targets=(Versions("tensorrt", basis="read"),)), OLD)


@pytest.mark.skipif(installed_version(RTX) is None, reason="tensorrt-rtx is not installed")
def test_cases_that_are_not_for_the_target_are_left_out_and_listed() -> None:
    cases = (CASE, replace(CASE, name="another", not_for={RTX.name: "its words"}))
    (verdict,) = still_needed(RTX, cases=cases, only=("slice_shape",))
    assert [t.case.name for t in verdict.trials] == [CASE.name]
    assert verdict.left_out == (("another", "its words"),)
