"""The tolerance of an engine of another precision, and the messages without a stated tolerance."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
import tiny

from pipeline.artifact.artifact import Artifact
from pipeline.compare.plan import Job, plan_points
from pipeline.compare.runners import conclude, failures
from pipeline.compare.verdict import judge
from pipeline.convert.driver import run_export, verify
from pipeline.errors import InputError
from pipeline.spec.config import Config
from pipeline.spec.dims import Dim
from pipeline.spec.findings import Note, note
from pipeline.spec.interface import Interface
from pipeline.spec.model import Tolerance
from pipeline.spec.profiles import Point
from pipeline.spec.tensors import Input, Output, Precision
from pipeline.spec.verdicts import Verdict

F32 = np.float32
TIGHT = Tolerance(1e-5, 1e-6, "float32 rounding")
WIDE = Tolerance(1e-2, 1e-3, "measured: fp16 rounding")
N = Dim("n", 1, 2, 4)
TEXT = """<ir_version: 8, opset_import: ["" : 18]>
g (float[n,4] x) => (float[n,4] y) { y = Relu(x) }"""


def declared(engine_tolerance: dict[str, Tolerance]) -> Interface:
    """One input and one output, with the tolerance TIGHT except for engines."""
    return Interface(
        (Input("x", (N, 4)),), (Output("y", (N, 4), TIGHT),), engine_tolerance=engine_tolerance
    )


def judged(
    tmp_path: Path, engine: Any, precision: Precision, tolerance: Tolerance | None = None
) -> tuple[list[Verdict], list[str], tuple[Note, ...]]:
    """The results of an engine's profile against values of 1, the failures, and the notes."""
    onnx.save(onnx.parser.parse_model(TEXT), tmp_path / "model.onnx")
    stated = {precision: tolerance} if tolerance else {}
    job = Job(declared(stated), [Point("opt", {"n": 2})], 2**20, precision)
    plan = plan_points(job, tmp_path / "model.onnx")
    good = np.ones((2, 4), F32)
    runs = {"torch": [{"y": good}], "exported": [{"y": good}]}
    runs["engine-small"] = [{"y": (good * engine).astype(F32)}]
    pairs = [("torch", "exported"), ("torch", "engine-small")]
    info = conclude(plan, runs, pairs, job)
    (point,) = info.points
    assert info.passed is (not failures(info))
    return list(point.results), failures(info), info.notes


def test_an_engine_is_held_to_its_own_tolerance_and_nothing_else_is(tmp_path: Path) -> None:
    (exported, engine), failed, notes = judged(tmp_path, 1.005, "fp16", WIDE)
    assert exported.passed and engine.passed and not failed and not notes
    (_, engine), failed, _ = judged(tmp_path, 1.02, "fp16", WIDE)
    assert not engine.passed
    assert engine.text == "differs by up to 0.02 at index [0, 0]; the largest value is 1"
    # the wider tolerance is for the engine only
    off = {"y": np.full((2, 4), 1.005, F32)}
    job = Job(declared({"fp16": WIDE}), [], 0, precision="fp16")
    (result,) = judge("torch", "exported", {"y": np.ones((2, 4), F32)}, off, job.tolerances("e"))
    assert not result.passed
    assert job.tolerances("engine") == job.tolerances("engine-a") == {"y": WIDE}


def test_without_one_it_is_held_to_the_others_and_the_error_is_told(tmp_path: Path) -> None:
    (_, engine), failed, notes = judged(tmp_path, 1.005, "fp16")
    assert not engine.passed
    assert engine.max_abs == pytest.approx(0.005, rel=1e-3)
    assert failed == [
        "y of engine-small against torch at opt (n=2): differs by up to 0.005 at index [0, 0]; the "
        "largest value is 1. No tolerance is stated for fp16: state one (engine_tolerance in the "
        "spec, or --engine-tolerance RTOL,ATOL)"
    ]
    assert engine.kind == "differs" and engine.facts["advice"] == "state-engine-tolerance"
    assert notes == (note("no-engine-tolerance", precision="fp16"),)
    text = "no tolerance is stated for fp16 engines: the fp32 tolerance was used"
    assert notes[0].text == text
    # no such message if an fp32 engine differs
    (_, engine), failed, notes = judged(tmp_path, 1.005, "fp32")
    assert not engine.passed and "advice" not in engine.facts and not notes
    assert "tolerance" not in failed[0]


@pytest.mark.parametrize(
    ("precision", "wider"),
    [("tf32", "fp32, or"), ("fp16", "auto, which keeps in float32 what needs it, or with tf32")],
)
def test_a_measured_tolerance_that_hides_the_output_leads_somewhere(
    tmp_path: Path, precision: Precision, wider: str
) -> None:
    """The order of a topk's values may change by rounding, and so may all boxes it picks."""
    onnx.save(onnx.parser.parse_model(TEXT), tmp_path / "model.onnx")
    wide = Tolerance(1e-3, 84.0, "measured")
    job = Job(declared({}), [Point("opt", {"n": 2})], 2**20, precision, {"y": wide})
    plan = plan_points(job, tmp_path / "model.onnx")
    ones = np.ones((2, 4), F32)
    info = conclude(plan, {"torch": [{"y": ones}], "half": [{"y": ones}]}, [("torch", "half")], job)
    (text,) = failures(info)
    assert "every value of torch is below atol=84, so zeros would pass" in text
    assert f"Rounding to {precision} may change this output by more than its values" in text
    assert f"with --precision {wider}" in text and "Use a smaller atol" not in text


def test_integers_have_no_tolerance_to_state(tmp_path: Path) -> None:
    """An ArgMax in fp16 gives other labels where rounding changes which value is larger."""
    onnx.save(onnx.parser.parse_model(TEXT), tmp_path / "model.onnx")
    job = Job(declared({}), [Point(p, {"n": 2}) for p in ("a", "b")], 2**20, precision="fp16")
    plan = plan_points(job, tmp_path / "model.onnx")
    labels = np.zeros((2, 4), np.int64)
    other = labels.copy()
    other[0, 0] = 3
    runs = {"torch": [{"y": labels}] * 2, "half": [{"y": other}] * 2}
    info = conclude(plan, runs, [("torch", "half")], job)
    assert failures(info)[0].startswith("y of half against torch at a (n=2): 1 of 8 int64 values")
    (text, *_) = failures(info)
    assert "state one" not in text and "tie" not in text and "torch.sort" not in text
    assert "Rounding to fp16 changes which values are larger" in text
    assert "build the engine with --precision auto" in text
    assert "No tolerance helps: at most 0.1 of the values may differ" in text  # 1 of 8
    # torch and ONNX compute in float32 alike: there, equal values are the cause
    exported = {"torch": runs["torch"], "exported": runs["half"]}
    text = failures(conclude(plan, exported, [("torch", "exported")], job))[0]
    assert "sort or topk gives this output, values may tie" in text and "--precision" not in text
    assert [r.kind for p in info.points for r in p.results] == ["values-differ"] * 2
    ties = declared({"fp16": Tolerance(1e-2, 1e-2, "ties", 0.1)})
    stated = dataclasses.replace(job, interface=ties)
    assert conclude(plan, runs, [("torch", "half")], stated).passed is False  # 1 of 8
    runs["half"] = [{"y": np.tile(other, (1, 2))}] * 2
    runs["torch"] = [{"y": np.tile(labels, (1, 2))}] * 2
    (result,) = judge("torch", "half", runs["torch"][0], {"y": other[:, :0]}, TIGHT)
    assert not result.passed
    more = np.tile(labels, (1, 5))
    few = more.copy()
    few[0, :4] = 1
    (result,) = judge("torch", "half", {"y": more}, {"y": few}, stated.tolerances("half"))
    assert result.passed and result.max_abs == 1.0
    with pytest.raises(InputError, match=r"differing=0\.2: must be a share from 0 to 0\.1"):
        Tolerance(0, 0, "-", 0.2)


def test_overflow_is_called_so(tmp_path: Path) -> None:
    (_, engine), _, _ = judged(tmp_path, np.inf, "fp16", WIDE)
    assert not engine.passed
    assert engine.kind == "not-finite" and engine.facts["advice"] == "fp16-overflow"
    assert engine.text == (
        "engine-small has NaN or infinity where torch has none. fp16 overflows beyond 65504: "
        "build the engine with --precision auto, bf16 or tf32"
    )
    (_, engine), _, _ = judged(tmp_path, np.nan, "fp32")
    assert engine.kind == "not-finite" and engine.text == "engine-small has NaN or infinity"


@pytest.mark.parametrize("stated", [{"fp8": WIDE}, {"fp16": 1e-2}])
def test_a_spec_states_them_by_precision(stated: Any) -> None:
    with pytest.raises(InputError, match=r"engine_tolerance .*pass a Tolerance for each precision"):
        dataclasses.replace(tiny.conv(), engine_tolerance=stated)


def test_what_is_given_goes_before_what_the_spec_states(tmp_path: Path) -> None:
    stated = {"fp16": TIGHT, "tf32": TIGHT}
    spec = dataclasses.replace(tiny.conv(), engine_tolerance=stated)
    config = Config(spec, out=tmp_path / "a", precision="tf32", engine_tolerance=WIDE)
    manifest = run_export(config).manifest
    assert manifest.interface.engine_tolerance["fp16"] == Tolerance(1e-5, 1e-6, TIGHT.why)
    assert manifest.engine_tolerances() == {"y": WIDE}
    plain = dataclasses.replace(manifest, precision="fp32")
    assert plain.engine_tolerances() == plain.tolerances() == {"y": spec.tolerance}
    # when a conversion continues an artifact, the spec's tolerances count
    again = manifest.interface.with_tolerances(spec.interface)
    assert again.engine_tolerances("tf32") == {"y": TIGHT}


def test_verify_writes_it_down(artifact: Path, cli: Any) -> None:
    said = "given with --engine-tolerance"
    code, out, err = cli("verify", artifact, "--engine-tolerance", "1e-2,1e-3")
    assert code == 0, err
    manifest = Artifact.open(artifact).manifest
    assert manifest.interface.engine_tolerance == {"fp32": Tolerance(1e-2, 1e-3, said)}
    assert f"tolerance of the engine: rtol 0.01 or atol 0.001 ({said})" in out
    assert manifest.keys == {}  # the next conversion uses the spec's tolerances again
    assert verify(artifact).manifest.interface == manifest.interface
    code, _, err = cli("verify", artifact, "--engine-tolerance", "2,1e-3")
    assert code == 2 and "rtol=2.0: 1 or more would pass anything" in err
