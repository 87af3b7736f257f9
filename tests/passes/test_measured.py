"""Measurements on a GPU agree with the passes' claims. On a GPU, they are repeated."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path

import onnx
import pytest
from pass_harness import PASSES

from pipeline.build.try_graph import attempt
from pipeline.commands.still_needed import apply
from pipeline.machine.child import Child
from pipeline.machine.gpu import why_not
from pipeline.machine.target import TARGETS, installed_version
from pipeline.passes import DEFAULT_PASSES, Pass
from pipeline.passes.case import Case
from pipeline.passes.cases import CASES, MEASURED, measured

OLD = TARGETS["tensorrt-8.6"]
VERDICTS = measured(OLD.name)
BY_NAME = {str(case): case for case in CASES}
WHY = (
    why_not(OLD)
    if (installed_version(OLD) or "").startswith("8.6")
    else f"{OLD} is not installed: {OLD.get}"
)
# 8.6 builds right engines for these models, although the issue reports a refusal
REFUSED_ALL_THE_SAME = {"decompose_instance_norm-one_value_a_channel"}


@pytest.fixture(scope="module")
def child() -> Iterator[Child]:
    with Child() as child:
        yield child


@pytest.mark.gpu
@pytest.mark.skipif(bool(WHY), reason=WHY)
@pytest.mark.parametrize("name", VERDICTS)
def test_tensorrt_8_6_does_as_measured(name: str, child: Child) -> None:
    case = BY_NAME[name]
    feeds = [case.feeds(shapes) for shapes in case.shapes]
    without, after = VERDICTS[name]
    if without not in ("-", "error"):
        assert attempt(child, case.model(), feeds, OLD, case.precision).verdict == without
    if after not in ("-", "error"):
        passes = [p for p in DEFAULT_PASSES if p.name == case.pass_name or p.needed_by(OLD)]
        model = apply(case.model(), passes)
        assert attempt(child, model, feeds, OLD, case.precision).verdict == after


def test_writing_what_was_measured_again_changes_no_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[2] / "benchmarks" / "patterns")
    write = importlib.import_module("case_verdicts").write
    again = tmp_path / MEASURED.name
    again.write_bytes(MEASURED.read_bytes())
    write(again, OLD, json.loads(again.read_text())[OLD.name]["on"], VERDICTS)
    assert again.read_bytes() == MEASURED.read_bytes()
    write(again, OLD, "another GPU", {str(CASES[0]): ("crash", "right")})
    assert '"another GPU"' in again.read_text()
    assert again.read_text().count("\n") == MEASURED.read_text().count("\n")


def test_every_verdict_is_of_a_case() -> None:
    assert VERDICTS.keys() <= BY_NAME.keys()


@pytest.mark.parametrize("name", [n for n in VERDICTS if VERDICTS[n][1] != "-"])
def test_what_the_passes_leave_comes_out_right_or_has_a_reason(name: str) -> None:
    assert VERDICTS[name][1] == "right" or BY_NAME[name].not_for.get(OLD.name)


@pytest.mark.parametrize("name", [n for n in VERDICTS if BY_NAME[n].kind == "refusal"])
def test_no_refusal_stops_a_model_that_comes_out_right(name: str) -> None:
    p = PASSES[BY_NAME[name].pass_name]
    stops = p.needed_by(OLD) and not p.tolerable and name not in REFUSED_ALL_THE_SAME
    assert not (stops and VERDICTS[name][0] == "right")


def fails_without(p: Pass) -> list[Case]:
    """The pass's cases that failed without the pass and were right with it.

    A case counts only if the other passes for 8.6 do not change it, except for the opset number. A
    case that other passes fix is no evidence for this pass.
    """
    others = [q for q in DEFAULT_PASSES if q.needed_by(OLD) and q.name != p.name]
    return [
        case
        for name, (without, after) in VERDICTS.items()
        if (case := BY_NAME[name]).pass_name == p.name
        and without not in ("right", "builds", "error")
        and (case.kind == "refusal" or (case.kind == "positive" and after == "right"))
        and nodes(apply(case.model(), others)) == nodes(apply(case.model(), []))
    ]


def nodes(model: onnx.ModelProto) -> list[bytes]:
    return sorted(node.SerializeToString(deterministic=True) for node in model.graph.node)


@pytest.mark.parametrize("p", DEFAULT_PASSES, ids=lambda p: p.name)
def test_measured_is_what_was_measured(p: Pass) -> None:
    claimed = any(n.covers(OLD) and n.basis == "measured" for n in p.targets)
    mine = any(BY_NAME[name].pass_name == p.name for name in VERDICTS)
    if claimed and mine and not p.clean_up:
        assert fails_without(p)
