"""Which candidates `tune` makes of an artifact, and which one it keeps. Engines need a GPU."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx.parser
import pytest
from helpers import Run, refinish, refused

from pipeline.artifact.artifact import Artifact
from pipeline.artifact.manifest import Manifest
from pipeline.commands.tune.candidates import (
    AS_IT_IS,
    NAIVE,
    Candidate,
    Change,
    as_it_is,
    changes,
    naive,
)
from pipeline.commands.tune.command import report_text
from pipeline.commands.tune.plot import write_plot
from pipeline.commands.tune.search import search
from pipeline.commands.tune.trial import Bench, Time, Trial, why_wrong
from pipeline.commands.tune.tune import OUT_OF_TIME, Tuning, _Tries
from pipeline.convert.driver import run
from pipeline.graph.change import Change as Node
from pipeline.machine.gpu import find_gpu
from pipeline.machine.target import find_target
from pipeline.spec.config import Config
from pipeline.spec.profiles import Point, Profile
from pipeline.spec.recipe import Recipe

PROFILE = Profile("whole", {"b": (1, 8, 32)})
START = Candidate(AS_IT_IS, "the artifact's own build", "tf32", (PROFILE,))
LEVEL = Change("level 5", "optimisation level 5", {"level": 5})
LIBRARIES = Change("libraries", "tactics of cuBLAS and cuDNN", {"libraries": True})
FORM = Change("no form", "without the pass form", {"skip": ("form",)})
WORSE = Change("worse", "slower", {"level": 1})

MODEL = """
<ir_version: 8, opset_import: ["" : 17]>
g (float[b, 8] x) => (float[b, 8] y) { y = Relu (x) }"""


def timed(*ms: float) -> tuple[Time, ...]:
    return tuple(Time({"b": n + 1}, value, True, 1e3 / value) for n, value in enumerate(ms))


class Engines:
    """Stands for engines on a GPU: the times, or the reason against it, of each candidate."""

    def __init__(self, results: Mapping[str, Any], later: Mapping[str, Any] | None = None) -> None:
        self.results, self.later = results, {**results, **(later or {})}
        self.tried: list[Candidate] = []
        self.again_tried: list[str] = []

    def attempt(self, candidate: Candidate) -> Trial:
        self.tried.append(candidate)
        return self._trial(candidate, self.results)

    def again(self, candidate: Candidate) -> Trial:
        self.again_tried.append(candidate.name)
        return self._trial(candidate, self.later)

    def _trial(self, candidate: Candidate, results: Mapping[str, Any]) -> Trial:
        result = results[candidate.name]
        if isinstance(result, str):
            return Trial(candidate.name, candidate.text, why=result)
        return Trial(candidate.name, candidate.text, times=timed(*result))

    def kept(self, *changes: Change, others: tuple[Candidate, ...] = ()) -> str | None:
        found = search(START, others, changes, self.attempt, self.again)
        return None if found.kept is None else found.kept.name


def test_each_change_is_tried_on_top_of_the_good_ones() -> None:
    engines = Engines(
        {AS_IT_IS: (10, 20), "level 5": (9, 18), "level 5 + no form": (8, 16),
         "level 5 + no form + worse": (11, 20), "level 5 + no form + libraries": (8, 16)}
    )  # fmt: skip
    assert engines.kept(LEVEL, FORM, WORSE, LIBRARIES) == "level 5 + no form"
    best = next(one for one in engines.tried if one.name == "level 5 + no form")
    assert (best.level, best.skip, best.libraries) == (5, ("form",), False)
    assert best.text == "optimisation level 5; without the pass form"
    assert engines.again_tried == [AS_IT_IS, "level 5 + no form"]


def test_each_size_counts_the_same() -> None:
    """Half the time at a small size outweighs 1.5 times the time at a large one."""
    assert Engines({AS_IT_IS: (1, 1000), "level 5": (0.5, 1500)}).kept(LEVEL) == "level 5"
    assert Engines({AS_IT_IS: (1, 1000), "level 5": (0.9, 1500)}).kept(LEVEL) == AS_IT_IS


def test_less_than_one_percent_is_noise() -> None:
    assert Engines({AS_IT_IS: (10.0,), "level 5": (9.92,)}).kept(LEVEL) == AS_IT_IS
    assert Engines({AS_IT_IS: (10.0,), "level 5": (9.8,)}).kept(LEVEL) == "level 5"


def test_the_last_timing_decides() -> None:
    engines = Engines({AS_IT_IS: (10,), "level 5": (9,)}, later={"level 5": (10.5,)})
    assert engines.kept(LEVEL) == AS_IT_IS


def test_a_wrong_engine_is_never_kept() -> None:
    assert Engines({AS_IT_IS: (10,), "level 5": "y differs"}).kept(LEVEL) == AS_IT_IS
    assert Engines({AS_IT_IS: "y differs", "level 5": (12,)}).kept(LEVEL) == "level 5"
    assert Engines({AS_IT_IS: "y differs", "level 5": "y differs"}).kept(LEVEL) is None


def test_the_naive_engine_is_kept_if_it_is_right_and_the_fastest() -> None:
    plain = naive(START, find_target("tensorrt-8.6"))
    assert plain is not None and plain.plain and plain.skip
    fast = {AS_IT_IS: (10,), NAIVE: (8,), "level 5": (9,)}
    engines = Engines(fast)
    assert engines.kept(LEVEL, others=(plain,)) == NAIVE
    assert sorted(engines.again_tried) == sorted([AS_IT_IS, NAIVE, "level 5"])
    wrong = Engines({**fast, NAIVE: "y differs"})
    assert wrong.kept(LEVEL, others=(plain,)) == "level 5"


def test_no_naive_engine_in_half_precision_where_the_graph_has_the_types() -> None:
    half = replace(START, precision="fp16")
    assert naive(half, find_target("rtx-1.7")) is None
    assert naive(half, find_target("tensorrt-8.6")) is not None
    assert naive(START, find_target("rtx-1.7")) is not None


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tune")
    onnx.save(onnx.parser.parse_model(MODEL), folder / "m.onnx")
    return run(Config(str(folder / "m.onnx"), out=folder / "m", dims=("b=1:8:32",))).path


def manifest_of(converted: Path, **more: Any) -> Manifest:
    return replace(Artifact.open(converted).manifest, **more)


def names(manifest: Manifest, *sizes: int, target: str = "tensorrt-8.6", **more: Any) -> list[str]:
    start = replace(as_it_is(manifest, (PROFILE,), None), **more)
    points = [Point("asked for", {"b": size}) for size in sizes]
    return [change.name for change in changes(manifest, find_target(target), start, points)]


def test_changes_fit_the_target_and_the_precision(converted: Path) -> None:
    manifest = manifest_of(converted)
    assert names(manifest, 8) == ["libraries", "level 5"]
    assert names(manifest, 8, target="tensorrt-10") == ["level 5"]
    assert names(manifest, 8, target="rtx-1.7") == ["level 5"]
    assert names(manifest, 8, level=5) == ["libraries"]
    assert names(manifest, 8, precision="fp16")[0] == "all half"
    whole = Recipe((("*", "fp16"),))
    assert names(manifest, 8, precision="fp16", recipe=whole)[0] == "rules"
    island = Recipe((("*", "fp16"), ("a", "fp32")))
    assert names(manifest, 8, precision="fp16", recipe=island)[:2] == ["all half", "rules"]


def test_a_profile_for_each_timed_size_keeps_every_size_legal(converted: Path) -> None:
    manifest = manifest_of(converted)
    assert names(manifest, 32)[0] == "own profile"
    start = as_it_is(manifest, (PROFILE,), None)
    points = [Point("asked for", {"b": size}) for size in (1, 32, 1)]
    change = changes(manifest, find_target("tensorrt-8.6"), start, points)[0]
    assert change.fields["profiles"] == (
        Profile("whole", {"b": (1, 1, 32)}), Profile("whole-1", {"b": (1, 32, 32)}),
    )  # fmt: skip
    narrow = (PROFILE, Profile("one", {"b": (1, 1, 1)}))
    start = as_it_is(manifest, narrow, None)
    points = [Point("asked for", {"b": 32})]
    change = changes(manifest, find_target("tensorrt-8.6"), start, points)[0]
    assert change.fields["profiles"] == (Profile("whole", {"b": (1, 32, 32)}), narrow[1])


def test_passes_for_speed_are_left_out_one_by_one(converted: Path) -> None:
    manifest = manifest_of(converted)
    assert manifest.rewrite is not None
    passes = tuple(
        replace(record, rewritten=(Node("n", "Op", "as a test"),))
        if record.name in ("shape_attention", "merge_duplicates", "fold_constants") else record
        for record in manifest.rewrite.passes
    )  # fmt: skip
    changed = replace(manifest, rewrite=replace(manifest.rewrite, passes=passes))
    assert {name for name in names(changed, 8) if name.startswith("no ")} == {
        "no shape_attention", "no merge_duplicates",
    }  # fmt: skip
    own = replace(passes[0], name="mine")
    changed = replace(changed, rewrite=replace(manifest.rewrite, passes=(own, *passes)))
    assert names(changed, 8) == ["libraries", "level 5"]


def test_an_engine_that_was_not_compared_is_not_kept(converted: Path) -> None:
    manifest = manifest_of(converted)
    if not manifest.engine_compared:
        assert "not compared" in why_wrong(manifest)
    assert why_wrong(replace(manifest, engine_compared=True)) == ""
    assert why_wrong(replace(manifest, comparison=None)) != ""


class Counting(Bench):
    """A bench whose candidates need no GPU."""

    def attempt(self, candidate: Candidate, folder: Path, time_limit: float) -> Trial:
        assert time_limit > 0
        folder.mkdir()
        self.announce(f"build {candidate.name}")
        return Trial(candidate.name, candidate.text, times=timed(10))


def test_an_interrupted_run_goes_on(converted: Path, tmp_path: Path) -> None:
    said: list[str] = []
    bench = Counting(
        Artifact.open(converted), find_target("tensorrt-8.6"), (), None, (), said.append  # type: ignore[arg-type]
    )  # fmt: skip
    first = _Tries(bench, tmp_path, ["base"], float("inf")).attempt(START)
    assert first.times and said == ["as it is: the artifact's own build", "build as it is"]
    said.clear()
    again = _Tries(bench, tmp_path, ["base"], float("inf"))
    assert again.attempt(START) == first
    assert said == ["as it is: tried before"]
    (tmp_path / "as-it-is").rmdir()
    other = _Tries(bench, tmp_path, ["another GPU"], float("inf"))
    assert other.attempt(START).key != first.key
    late = _Tries(bench, tmp_path, ["base"], float("-inf"))
    assert late.attempt(LEVEL.of(START)).why == OUT_OF_TIME
    (tmp_path / "trials.json").write_text("[{}]")
    (tmp_path / "as-it-is").rmdir()
    assert _Tries(bench, tmp_path, ["base"], float("inf")).attempt(START).times


def done(*trials: Trial, kept: str = AS_IT_IS) -> Tuning:
    return Tuning("m", "tensorrt-8.6", "8.6.0", "fp16", "NVIDIA H100", "2026-01-01", kept, trials)


FIRST = Trial(AS_IT_IS, "the artifact's own build", build_s=12.0, times=timed(2.0, 4.0))


def test_the_table_says_what_was_kept_and_why_not_the_others() -> None:
    second = Trial("level 5", "optimisation level 5", build_s=80.0, times=timed(1.0, 2.0))
    third = Trial(NAIVE, "exported.onnx, TensorRT's defaults", why="y of engine against torch")
    text = report_text(done(FIRST, second, third, kept="level 5"), Path("a"))
    assert "* level 5" in text and "1.000" in text
    assert "not kept: y of engine against torch" in text
    assert "kept: level 5, 2.00 times as fast as the engine before. a/tuning.json" in text
    late = Trial("libraries", "", why=OUT_OF_TIME)
    assert "To try more: --minutes" in report_text(done(FIRST, late), Path("a"))
    assert "no engine was right" in report_text(done(third, kept=""), Path("a"))


def test_the_plot_has_every_time(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    second = Trial("level 5", "optimisation level 5", times=timed(1.0, 2.5))
    assert write_plot(done(FIRST, second, kept="level 5"), tmp_path / "t.svg")
    assert (tmp_path / "t.svg").read_text().count("<svg") == 1
    content = json.loads(done(FIRST, second).to_json())
    assert [time["ms"] for time in content["trials"][1]["times"]] == [1.0, 2.5]


@pytest.mark.skipif(not isinstance(find_gpu(), str), reason="there is a GPU here")
def test_without_a_gpu_it_says_so_and_writes_nothing(cli: Run, converted: Path) -> None:
    before = {p.name: p.read_bytes() for p in converted.iterdir() if p.is_file()}
    code, _, errors = cli("tune", converted)
    assert code == 2  # as of bench and locate
    assert "tune needs a GPU that runs the engine: " in errors
    assert not converted.with_name(f"{converted.name}.tune").exists()
    assert {p.name: p.read_bytes() for p in converted.iterdir() if p.is_file()} == before


@pytest.mark.parametrize("words", [("--minutes", "0"), ("--minutes", "nan"), ("--repeat", "0")])
def test_bad_numbers_are_refused(cli: Run, converted: Path, words: tuple[str, str]) -> None:
    refused(cli("tune", converted, *words), words[0])


def test_without_stored_outputs_it_fails_before_any_build(cli: Run, converted: Path) -> None:
    folder = converted.with_name("no-outputs")
    shutil.copytree(converted, folder)
    shutil.rmtree(folder / "comparison")
    refinish(folder, reference="torch")
    code, output, errors = cli("tune", folder)
    assert code == 2 and not output
    assert "no outputs of torch are stored, and tune compares each engine with them" in errors
    assert "no-outputs --torch` first" in errors
