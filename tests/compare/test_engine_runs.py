"""An engine in the comparison, with ONNX Runtime in place of the engine.

It tests the handling of an engine's outputs, checks and errors. tests/gpu/test_verify_gpu.py tests
real engines.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from helpers import perturb, refinish

from pipeline.artifact.artifact import Artifact
from pipeline.artifact.manifest import Manifest
from pipeline.commands.report import report_json, report_text
from pipeline.compare import engine_runs, regression, stage
from pipeline.compare.engine_runs import OpenedEngine, opened, why_not_run
from pipeline.compare.runners import failures
from pipeline.convert.driver import run, verify
from pipeline.convert.options import Verify
from pipeline.convert.report import Report
from pipeline.errors import CompareError, OutOfMemory
from pipeline.graph.session import run_onnx
from pipeline.machine.gpu import Gpu
from pipeline.machine.target import TARGETS
from pipeline.runtime.engine import Loading
from pipeline.spec.config import Config
from pipeline.spec.dims import Dim
from pipeline.spec.model import Output, Tolerance
from pipeline.spec.profiles import Profile
from pipeline.spec.verdicts import Check

RTX = TARGETS["rtx-1.7"]
GPU = Gpu("some GPU", (8, 9))
Fault = Callable[["Stand", dict[str, np.ndarray]], None]


class Stand:
    """model.onnx in place of an engine, with its outputs changed by `fault`."""

    def __init__(self, model: Path, fault: Fault) -> None:
        self.model, self.fault = model, fault
        self.poison, self.profile = False, None
        self.calls = 0

    def __call__(self, feed: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        (outputs,) = run_onnx(self.model, [feed])
        self.calls += 1
        self.fault(self, outputs)
        return outputs


@pytest.fixture
def stand(monkeypatch: pytest.MonkeyPatch) -> Callable[[Fault], None]:
    """Replaces every engine by ONNX Runtime, with a fault."""

    def put(fault: Fault) -> None:
        @contextlib.contextmanager
        def opened(
            folder: Path, manifest: Manifest, plugins: Sequence[str] = (), host_code: bool = False
        ) -> Iterator[OpenedEngine]:
            del plugins, host_code
            yield OpenedEngine(Stand(folder / "model.onnx", fault), manifest.interface.profiles)

        for module in (stage, regression):
            monkeypatch.setattr(module, "opened", opened)
            monkeypatch.setattr(module, "why_not_run", lambda *_: "")
        monkeypatch.setattr(stage, "find_gpu", lambda: GPU)

    return put


def none(stand: Stand, outputs: dict[str, np.ndarray]) -> None:
    del stand, outputs


def checks(report: Report) -> dict[tuple[str, str], Check]:
    assert report.manifest.comparison is not None
    return {(check.run, check.name): check for check in report.manifest.comparison.checks}


def failed(report: Report) -> list[str]:
    assert report.manifest.comparison is not None
    return failures(report.manifest.comparison)


def test_what_the_manifest_and_the_summary_say(
    artifact: Path, stand: Callable[[Fault], None]
) -> None:
    stand(none)
    report = verify(artifact)
    assert report.ok
    manifest = report.manifest
    assert manifest.engine_compared and manifest.engine_gpu == "some GPU"
    assert manifest.engine_compared_why == "compared on some GPU"
    assert [check for check in checks(report) if check[0] == "engine"] == [
        ("engine", "determinism"), ("engine", "unwritten outputs"), ("engine", "shuffled order"),
    ]  # fmt: skip
    assert (artifact / "comparison" / "default" / "engine.json").is_file()
    text = report_text(report)
    assert "determinism of engine: 3 runs at each of 7 sizes: bit-identical" in text
    assert "error of engine against torch: " in text
    assert "engine: compared: compared on some GPU" in text
    content = json.loads((artifact / "manifest.json").read_text())
    assert content["comparison"]["checks"][0]["kind"] == "bit-identical"
    assert content["comparison"]["passed"] is True


def test_profiles_are_forced_and_named(tmp_path: Path, stand: Callable[[Fault], None]) -> None:
    seen = []

    def note(stand: Stand, outputs: dict[str, np.ndarray]) -> None:
        seen.append((stand.profile, outputs["y"].shape[2] > 12))

    stand(note)
    profiles = (Profile("small", {"h": (5, 8, 12), "w": (5, 8, 12)}), Profile("large"))
    report = run(Config(tiny.conv(profiles=profiles), out=tmp_path / "a"))
    assert set(seen) == {(0, False), (1, False), (1, True)}
    runs = {run for run, _ in checks(report)} - {"exported"}
    assert runs == {"engine-small", "engine-large"}
    assert (tmp_path / "a" / "comparison" / "small" / "engine-small.json").is_file()


def test_a_check_that_fails_fails_verify(artifact: Path, stand: Callable[[Fault], None]) -> None:
    def chance(stand: Stand, outputs: dict[str, np.ndarray]) -> None:
        if stand.calls > 20:
            outputs["y"] += 0.1 * (stand.calls % 2)

    stand(chance)
    report = verify(artifact)
    assert not report.ok
    assert not checks(report)["engine", "determinism"].passed
    assert any(line.startswith("determinism of engine (h=") for line in failed(report))
    assert "FAILED determinism of engine (h=" in report_text(report)
    assert not Artifact.open(artifact).manifest.comparison.passed  # type: ignore[union-attr]


def test_a_conversion_ends_with_the_check_that_failed(
    tmp_path: Path, stand: Callable[[Fault], None]
) -> None:
    def hole(stand: Stand, outputs: dict[str, np.ndarray]) -> None:
        if stand.poison:
            outputs["y"].view(np.uint8).reshape(-1)[-4:] = 0xFF

    stand(hole)
    with pytest.raises(CompareError, match="unwritten outputs of engine at h=5,w=5: 1 of 100"):
        run(Config(tiny.conv(), out=tmp_path / "a"))
    assert not (tmp_path / "a").exists()


def test_rows_that_an_engine_mixes(tmp_path: Path, stand: Callable[[Fault], None]) -> None:
    b, w = Dim("b", 1, 3, 4), Dim("w", 4, 6, 9)
    spec = tiny.of(lambda x: x.tanh(), shape=(b, 3, w), outputs=(Output("y", (b, 3, w)),))

    def mix(stand: Stand, outputs: dict[str, np.ndarray]) -> None:
        del stand
        if len(outputs["y"]) == 3:
            outputs["y"][0] = outputs["y"].mean(axis=0)

    stand(none)
    good = run(Config(spec, out=tmp_path / "a"))
    assert checks(good)["engine", "batch rows"].sizes == {"b": 3, "w": 6}  # the profile's opt
    assert checks(good)["exported", "batch rows"].sizes == {"b": 2, "w": 4}  # the cheapest
    before = checks(good).keys() - {("exported", "inputs at the edges")}  # it needs torch
    stand(mix)
    report = verify(tmp_path / "a")
    assert checks(report).keys() == before
    bad = checks(report)["engine", "batch rows"]
    assert not bad.passed and bad.kind == "rows-depend" and "a row changes with" in bad.text
    assert {row.kind for row in bad.rows} and not any(row.in_model for row in bad.rows)
    assert checks(report)["exported", "batch rows"].passed


def test_overflow_of_an_fp16_engine(artifact: Path, stand: Callable[[Fault], None]) -> None:
    def overflow(stand: Stand, outputs: dict[str, np.ndarray]) -> None:
        del stand
        outputs["y"][..., -1] = np.inf

    stand(overflow)
    refinish(artifact, precision="fp16")
    (line, *_) = failed(verify(artifact, Verify(engine_tolerance=Tolerance(1e-2, 1e-2, "wide"))))
    assert "engine has NaN or infinity where rewritten has none. fp16 overflows" in line
    assert re.search(r"`pipeline locate ARTIFACT --shape h=\d+,w=\d+` finds where", line)


def test_a_size_that_does_not_fit_into_the_gpu(
    artifact: Path, stand: Callable[[Fault], None]
) -> None:
    def full(stand: Stand, outputs: dict[str, np.ndarray]) -> None:
        del stand
        if outputs["y"].size >= 4 * 40 * 40:
            raise OutOfMemory("at h=40,w=40: 9 GiB are wanted, 1 GiB is free")

    stand(full)
    report = verify(artifact)
    assert report.ok and report.manifest.engine_compared
    assert report.manifest.comparison is not None
    notes = {note.kind: note for note in report.manifest.comparison.notes}
    left_out = notes["engine-out-of-memory"]
    assert left_out.facts["sizes"] == {"h": 40, "w": 40}
    start = "engine was not compared at max (h=40,w=40): at h=40,w=40: 9 GiB"
    assert left_out.text.startswith(start)
    done = checks(report)["engine", "determinism"]
    assert (done.kind, done.text) == ("bit-identical", "3 runs at each of 6 sizes: bit-identical")
    stored = notes["outputs-not-stored"].text
    assert stored == "outputs of engine are not stored: 1 of 7 sizes of profile default did not run"
    assert not (artifact / "comparison" / "default" / "engine.json").exists()

    def always(stand: Stand, outputs: dict[str, np.ndarray]) -> None:
        del stand, outputs
        raise OutOfMemory("full")

    stand(always)
    manifest = verify(artifact).manifest
    assert not manifest.engine_compared
    assert manifest.engine_compared_why == "no size of profile default was compared"


def test_checks_that_do_not_fit_into_the_gpu(
    artifact: Path, stand: Callable[[Fault], None]
) -> None:
    """The comparison fits in memory. The checks do not fit, because another process uses memory."""

    def full(stand: Stand, outputs: dict[str, np.ndarray]) -> None:
        if stand.calls > 7 and outputs["y"].size >= room:
            raise OutOfMemory("9 GiB are wanted, 1 GiB is free")

    def seen(report: Report) -> tuple[set[str], list[str]]:
        assert report.manifest.comparison is not None
        done = {check.name for check in report.manifest.comparison.checks if check.run == "engine"}
        kinds = ("check-out-of-memory", "check-not-done")
        notes = [n for n in report.manifest.comparison.notes if n.kind in kinds]
        assert {n.kind for n in notes} == {kinds[not done]}
        return done, [n.text for n in notes]

    room = 4 * 40 * 40
    stand(full)
    report = verify(artifact)
    assert report.ok and report.manifest.engine_compared and not failed(report)
    done, notes = seen(report)
    assert done == {"determinism", "unwritten outputs", "shuffled order"}
    assert notes[0] == (
        "determinism of engine: not done at max (h=40,w=40): 9 GiB are wanted, 1 GiB is free"
    )
    assert len(notes) == 3
    assert notes[0] in report_text(report)
    room = 0
    report = verify(artifact)
    assert report.ok and report.manifest.engine_compared
    done, notes = seen(report)
    assert not done and len(notes) == 3
    start = (
        "determinism of engine: not done, no size fits into the GPU's memory: at min (h=5,w=5), "
    )
    assert notes[0].startswith(start)
    assert notes[0] in report_text(report) and "determinism of engine: 3 runs" not in report_text(
        report
    )


def test_rows_that_do_not_fit_into_the_gpu(tmp_path: Path, stand: Callable[[Fault], None]) -> None:
    b, w = Dim("b", 1, 3, 4), Dim("w", 4, 6, 9)
    spec = tiny.of(lambda x: x.tanh(), shape=(b, 3, w), outputs=(Output("y", (b, 3, w)),))

    stand(none)
    whole = run(Config(spec, out=tmp_path / "a")).manifest.comparison
    assert whole is not None
    before = 7 * sum(point.compared for point in whole.points)  # once, and six times in checks

    def full(stand: Stand, outputs: dict[str, np.ndarray]) -> None:
        if stand.calls > before and len(outputs["y"]) >= rows:
            raise OutOfMemory("9 GiB are wanted")

    rows = 3
    stand(full)
    report = verify(tmp_path / "a")
    assert report.ok
    assert {name for run, name in checks(report) if run == "engine"} == {
        "determinism", "unwritten outputs", "shuffled order", "batch rows",
    }  # fmt: skip
    assert checks(report)["engine", "batch rows"].sizes["b"] == 2
    assert checks(report)["engine", "batch rows"].passed
    assert report.manifest.comparison is not None
    notes = [n for n in report.manifest.comparison.notes if "check" in n.facts]
    assert {(n.kind, n.facts["check"]) for n in notes} == {("check-out-of-memory", "batch rows")}
    assert notes[0].text == "batch rows of engine: not done at b=3,w=6: 9 GiB are wanted"
    rows = 1
    report = verify(tmp_path / "a")
    assert report.ok and ("engine", "batch rows") not in checks(report)
    assert report.manifest.comparison is not None
    notes = report.manifest.comparison.notes
    (note,) = [n for n in notes if n.facts.get("check") == "batch rows"]
    assert note.kind == "check-not-done"
    assert note.text.startswith(
        "batch rows of engine: not done, no size fits into the GPU's memory: at b=3,w=6, "
    )
    assert note.text.endswith(": 9 GiB are wanted")


def test_why_no_rows_are_checked(tmp_path: Path, stand: Callable[[Fault], None]) -> None:
    def notes(report: Report) -> list[tuple[str, str]]:
        assert report.manifest.comparison is not None
        found = report.manifest.comparison.notes
        return [(n.kind, n.text) for n in found if n.text.startswith("batch rows")]

    stand(none)
    fixed = tiny.of(lambda x: x.tanh(), shape=(1, 3, Dim("w", 4, 6, 9)))
    assert notes(run(Config(fixed, out=tmp_path / "a"))) == [
        (
            "no-batch-dim",
            "batch rows were not checked: no dim is only the first axis of inputs and outputs, and "
            "bounds no values",
        )
    ]
    b, w = Dim("b", 1, 3, 4), Dim("w", 4, 6, 9)
    profiles = (Profile("one", {"b": (1, 1, 1)}), Profile("all"))
    spec = tiny.of(lambda x: x.tanh(), shape=(b, 3, w), outputs=(Output("y", (b, 3, w)),))
    spec = dataclasses.replace(spec, profiles=profiles)
    done = run(Config(spec, out=tmp_path / "b"))
    assert notes(done) == [
        (
            "profile-without-two-rows",
            "batch rows of engine-one were not checked: profile one allows no two rows at the "
            "sizes that ran",
        )
    ]
    assert ("engine-all", "batch rows") in checks(done)
    assert done.manifest.comparison is not None
    least = min(point.estimate_bytes for point in done.manifest.comparison.points)
    tight = notes(verify(tmp_path / "b", Verify(memory_limit=least)))
    text = "batch rows were not checked: two rows are over the memory limit"
    assert tight[0] == ("rows-too-large", text)


def test_the_script_holds_the_engine_to_its_own_tolerance(
    artifact: Path, stand: Callable[[Fault], None]
) -> None:
    stand(none)
    refinish(artifact, precision="tf32")
    verify(artifact, Verify(engine_tolerance=Tolerance(0.02, 0.03, "wide")))
    lines = (artifact / "reproduce.sh").read_text().splitlines()
    engine = [line for line in lines if "--trt" in line]
    others = [line for line in lines if "--onnxrt" in line]
    assert engine and all("--rtol 0.02 --atol 0.03" in line for line in engine)
    assert others and all("--rtol 0.0001 --atol 1e-05" in line for line in others)


class TestAgainst:
    """The regression check with engines."""

    @pytest.fixture
    def old(self, artifact: Path, tmp_path: Path, stand: Callable[[Fault], None]) -> Path:
        import shutil

        stand(none)
        verify(artifact)
        return Path(shutil.copytree(artifact, tmp_path / "old"))

    def test_the_same_engine(self, artifact: Path, old: Path) -> None:
        report = verify(artifact, Verify(against=old))
        assert report.ok and report.regressions == []
        said = f"no regression against {old}. Sizes compared: 7. Engine: compared"
        assert [(note.kind, note.text) for note in report.notes] == [("no-regression", said)]
        assert report_text(report).endswith(f"\n\n{said}")
        (content,) = json.loads(report_json(report))["notes"]
        assert content == {
            "kind": "no-regression", "facts": {"path": str(old), "count": 7}, "text": said,
        }  # fmt: skip

    @pytest.mark.parametrize("room", [4 * 40 * 40, 0])
    def test_an_old_size_that_does_not_fit_into_the_gpu(
        self, artifact: Path, old: Path, stand: Callable[[Fault], None], room: int
    ) -> None:
        def full(stand: Stand, outputs: dict[str, np.ndarray]) -> None:
            del stand
            if outputs["y"].size >= room:
                raise OutOfMemory("9 GiB are wanted, 1 GiB is free")

        stand(full)
        report = verify(artifact, Verify(against=old))
        notes = [n.text for n in report.notes if n.kind == "engine-out-of-memory"]
        where = "new engine was not compared at stored (h=40,w=40): 9 GiB are wanted, 1 GiB is free"
        assert where in notes and len(notes) == (1 if room else 7)
        if room:
            assert report.ok and report.notes[-1].kind == "no-regression"
            assert report.notes[-1].text.endswith("Sizes compared: 7. Engine: compared")
        else:
            (found,) = report.regressions
            assert found.kind == "engine-not-compared"
            assert found.text == (
                "the engine was compared before and is not now: no size of profile default was "
                "compared"
            )

    def test_an_engine_that_got_worse(
        self, artifact: Path, old: Path, stand: Callable[[Fault], None]
    ) -> None:
        def off(stand: Stand, outputs: dict[str, np.ndarray]) -> None:
            del stand
            outputs["y"] += np.float32(7e-6)  # within atol=1e-5

        stand(off)
        report = verify(artifact, Verify(against=old))
        assert report.manifest.comparison is not None and report.manifest.comparison.passed
        assert len(report.regressions) == 7
        assert {one.kind for one in report.regressions} == {"error-grew"}
        line = report.regressions[0].text
        assert line.startswith("y of engine at stored (h=5,w=5): its error grew from ")
        assert line.endswith("% of the tolerance")

    def test_an_engine_that_is_wrong(
        self, artifact: Path, old: Path, stand: Callable[[Fault], None]
    ) -> None:
        def off(stand: Stand, outputs: dict[str, np.ndarray]) -> None:
            del stand
            outputs["y"] += np.float32(0.25)

        stand(off)
        found = verify(artifact, Verify(against=old)).regressions
        assert [one.kind for one in found] == ["error-too-large"] * 7
        start = "y of engine at stored (h=5,w=5): differs from torch by up to 0.25; "
        assert found[0].text.startswith(f"{start}the error before was ")
        assert isinstance(found[0].facts["before"], float)

    def test_an_engine_that_is_not_compared_any_more(
        self, artifact: Path, old: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.undo()
        monkeypatch.setattr(stage, "why_not_run", lambda *_: "no GPU")
        (found,) = verify(artifact, Verify(against=old)).regressions
        assert found.kind == "engine-not-compared"
        assert found.text == "the engine was compared before and is not now: no GPU"

    def test_a_model_that_got_worse_within_the_tolerance(
        self, artifact: Path, converted: Report
    ) -> None:
        perturb(artifact, by=1.5e-6)
        report = verify(artifact, Verify(against=converted.path))
        assert report.manifest.comparison is not None and report.manifest.comparison.passed
        assert not report.ok
        assert report.regressions[0].kind == "error-grew"
        assert "y of rewritten at stored (h=" in report.regressions[0].text
        assert ": its error grew from " in report.regressions[0].text

    def test_a_wider_tolerance_of_the_engine(self, artifact: Path, old: Path) -> None:
        wide = Tolerance(1e-3, 1e-3, "wide")
        (found,) = verify(artifact, Verify(against=old, engine_tolerance=wide)).regressions
        assert found.kind == "engine-tolerance-widened"
        assert found.text == (
            "tolerance of y of the engine widened from rtol 0.0001, atol 1e-05 to rtol 0.001, "
            "atol 0.001"
        )


@pytest.mark.parametrize("shared", [-np.inf, np.nan])
def test_one_infinity_does_not_hide_what_is_wrong_elsewhere(shared: float) -> None:
    want = np.array([1, 2, shared], np.float32)
    tolerance = Tolerance(1e-3, 1e-3, "test")
    assert regression._error(want, want.copy(), tolerance) == (0, 0)
    far, part = regression._error(want, np.array([1, 3, shared], np.float32), tolerance)
    assert (far, part) == (1, pytest.approx(500))


class TestWhyNot:
    """The reasons why an engine is not run."""

    @pytest.fixture
    def manifest(self, artifact: Path, monkeypatch: pytest.MonkeyPatch) -> Manifest:
        monkeypatch.setattr("pipeline.machine.gpu.find_gpu", lambda: GPU)
        return Artifact.open(artifact).manifest

    def test_nothing_is_in_the_way(self, artifact: Path, manifest: Manifest) -> None:
        assert why_not_run(artifact, RTX, manifest) == ""

    def test_no_engine(self, artifact: Path, manifest: Manifest) -> None:
        (artifact / "engine.plan").unlink()
        assert why_not_run(artifact, RTX, manifest) == "no engine was built"

    def test_another_gpu(self, artifact: Path, manifest: Manifest) -> None:
        for wanted, why in (
            ((), ""),
            (("8.6", "8.9"), ""),
            (("9.0",), "the engine needs compute capability 9.0, some GPU has 8.9"),
            (("8.6", "12.0"), "the engine needs compute capability 8.6 or 12.0, some GPU has 8.9"),
        ):
            target = dataclasses.replace(manifest.target, compute_capabilities=wanted)
            changed = dataclasses.replace(manifest, target=target)
            assert why_not_run(artifact, RTX, changed) == why

    def test_another_tensorrt(
        self, artifact: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        built = manifest.target.version
        monkeypatch.setattr(engine_runs, "installed_version", lambda _: "1.7.9")
        why = why_not_run(artifact, RTX, manifest)
        assert why == f"the engine was built with tensorrt_rtx {built}, but 1.7.9 is installed"
        monkeypatch.setattr(engine_runs, "installed_version", lambda _: None)
        assert why_not_run(artifact, RTX, manifest).startswith("tensorrt_rtx is not installed here")

    def test_no_cuda_python(
        self, artifact: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(engine_runs, "_found", lambda name: name != "cuda.core")
        assert why_not_run(artifact, RTX, manifest).startswith("cuda-python is not installed here")

    def test_it_is_said_in_the_manifest(self, artifact: Path, manifest: Manifest) -> None:
        """Without a stand-in: the real reason on this machine."""
        del manifest
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(stage, "why_not_run", lambda *_: "built for another GPU")
            done = verify(artifact).manifest
        assert not done.engine_compared
        assert (done.engine_compared_why, done.engine_gpu) == ("built for another GPU", "")


def test_opened_goes_through_the_runtime(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses the plan in the folder, with its manifest, and closes it afterwards."""
    calls: list[Any] = []

    class Loaded:
        def __enter__(self) -> Loaded:
            return self

        def __exit__(self, *_: object) -> None:
            calls.append("closed")

    def open_plan(
        plan: bytes, manifest: Manifest, *, where: str, plugins: Sequence[str], how: Loading
    ) -> Loaded:
        calls.append((plan, manifest, where, plugins, how.rtx.kernels))
        return Loaded()

    monkeypatch.setattr(engine_runs, "open_plan", open_plan)
    manifest = Artifact.open(artifact).manifest
    with opened(artifact, manifest, ["a.so"]) as engine:
        assert [profile.name for profile in engine.profiles] == ["default"]
        assert calls == [
            ((artifact / "engine.plan").read_bytes(), manifest, "engine.plan", ["a.so"], "eager")
        ]
    assert calls[-1] == "closed"
