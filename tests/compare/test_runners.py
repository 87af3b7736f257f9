"""Comparing two runs, the points that are left out, and the stored points."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from helpers import FeedRunner

from pipeline.artifact import stored
from pipeline.artifact.manifest import ComparisonInfo
from pipeline.compare import runners as compare
from pipeline.compare.plan import Job, plan_points
from pipeline.compare.runners import collect, conclude, profile_of
from pipeline.compare.verdict import judge
from pipeline.errors import CompareError, PipelineError
from pipeline.graph.session import OnnxRunner, run_onnx
from pipeline.machine.progress import silent
from pipeline.machine.resources import Stopwatch
from pipeline.spec.dims import Dim, read_size
from pipeline.spec.findings import note
from pipeline.spec.interface import Interface
from pipeline.spec.model import Tolerance
from pipeline.spec.profiles import Point, Profile
from pipeline.spec.runner import run_once
from pipeline.spec.tensors import Feed, Input, Output
from pipeline.spec.verdicts import Verdict

TOLERANCE = Tolerance(1e-3, 1e-4, "test")
F32 = np.float32


def judged(a: Any, b: Any, tolerance: Tolerance = TOLERANCE) -> Verdict:
    (result,) = judge("a", "b", {"y": np.asarray(a)}, {"y": np.asarray(b)}, tolerance)
    assert result.passed is (result.text == "") is (result.kind in ("agrees", "no-elements"))
    return result


def verdict(a: Any, b: Any, tolerance: Tolerance = TOLERANCE) -> tuple[bool, str]:
    result = judged(a, b, tolerance)
    return result.passed, result.text


def finding(a: Any, b: Any) -> tuple[str, str]:
    result = judged(a, b)
    return result.kind, result.text


@pytest.mark.parametrize(
    ("a", "b", "passed"),
    [
        ([1.0, 100.0], [1.0, 100.09], True),  # within rtol
        ([1.0, 100.0], [1.0, 100.11], False),
        ([1.0, 0.0], [1.0, 0.00009], True),  # within atol
        ([1.0, 0.0], [1.0, 0.00011], False),
        ([1.0, 1.0], [1.00105, 1.0], False),  # one of the two is enough; their sum does not count
        ([1.0, -1.0], [1.0, 1.0], False),
    ],
)
def test_either_tolerance_holds_for_every_element(a: Any, b: Any, passed: bool) -> None:
    assert verdict(np.array(a, F32), np.array(b, F32))[0] is passed


def test_rtol_is_of_the_reference() -> None:
    wide = Tolerance(0.5, 1e-6, "test")
    assert verdict(np.array([2.0], F32), np.array([1.01], F32), wide)[0]
    assert not verdict(np.array([1.01], F32), np.array([2.0], F32), wide)[0]


def test_one_element_among_many() -> None:
    a = np.ones((1, 2, 100, 100), F32)
    b = a.copy()
    b[0, 1, 99, 99] = 1.01
    result = judged(a, b)
    assert not result.passed and result.kind == "differs"
    assert result.facts["index"] == (0, 1, 99, 99)
    assert result.facts["rtol"] == 1e-3 and result.facts["atol"] == 1e-4
    assert result.text == ("differs by up to 0.01 at index [0, 1, 99, 99]; the largest value is 1")


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_never_pass(bad: float) -> None:
    good, poor = np.array([1.0, 2.0], F32), np.array([1.0, bad], F32)
    assert finding(good, poor) == ("not-finite", "b has NaN or infinity")
    assert finding(poor, good) == ("not-finite", "a has NaN or infinity")
    assert finding(poor, poor) == ("not-finite", "a has NaN or infinity")


@pytest.mark.filterwarnings("error")
def test_tolerance_under_which_zeros_pass_is_inconclusive() -> None:
    small = np.full(5, 1e-5, F32)
    result = judged(small, small)
    assert not result.passed and result.kind == "inconclusive"
    assert result.text == (
        "cannot be judged: every value of a is below atol=0.0001, so zeros would pass. "
        "Use a smaller atol, such as --tolerance y=RTOL,ATOL"
    )
    assert verdict(np.zeros(5, F32), np.zeros(5, F32))[0] is False
    assert verdict(np.zeros(5, np.int64), np.zeros(5, np.int64))[0]
    assert judged(np.zeros((0, 3), F32), np.zeros((0, 3), F32)).kind == "no-elements"


def test_zeros_are_judged_where_atol_is_0() -> None:
    exact, zeros = Tolerance(1e-4, 0.0, "test"), np.zeros(5, F32)
    assert verdict(zeros, zeros, exact)[0]
    assert judged(zeros, zeros, exact).facts["largest"] == 0
    assert verdict(zeros, np.array([0, 0, 0, 0, 1e-30], F32), exact) == (
        False,
        "differs by up to 1e-30 at index [4]; the largest value is 0",
    )
    parts = Tolerance(1e-4, 1e-4, "test", axis=0, parts=(0.0, 0.0, 0.0, 0.0, 1e-5))
    assert judged(zeros, zeros, parts).kind == "inconclusive"


@pytest.mark.parametrize(("second", "said"), [(0, ["only-zeros"]), (1, [])])
def test_an_output_of_zeros_at_all_sizes_is_noted(
    model: Path, second: float, said: list[str]
) -> None:
    plan = plan_points(job(), model)
    run = [{"y": np.full((n, 4), value, F32)} for n, value in ((1, 0), (10, second))]
    exact = replace(job(), interface=replace(job().interface, tolerance=Tolerance(1e-4, 0, "test")))
    info = conclude(plan, {"torch": run, "exported": run}, [("torch", "exported")], exact)
    assert info.passed and [found.kind for found in info.notes] == said


def test_shape_and_dtype_are_held_to() -> None:
    one = np.ones((2, 3), F32)
    shape, dtype = "shape-differs", "dtype-differs"
    assert finding(one, one.T.copy()) == (shape, "its shape is [3, 2], not [2, 3]")
    assert finding(one, np.ones((1, 3), F32)) == (shape, "its shape is [1, 3], not [2, 3]")
    assert finding(one, one.astype(np.float64)) == (dtype, "its dtype is float64, not float32")
    assert finding(one, one.astype(np.float16)) == (dtype, "its dtype is float16, not float32")


@pytest.mark.filterwarnings("error")
def test_integers_and_bools() -> None:
    n = np.array([1, 2, 300], np.int64)
    assert verdict(n, n.copy())[0]
    assert verdict(n, n.astype(np.int32))[0]  # as TensorRT up to 9 returns them
    assert not verdict(n.astype(np.int32), n)[0]
    assert not verdict(n, n + np.array([0, 0, 1]))[0]
    small = np.array([0, 255], np.uint8)
    assert verdict(small, small)[0]
    assert not verdict(small, small[::-1].copy())[0]
    b = np.array([True, False])
    assert verdict(b, b)[0]
    assert not verdict(b, ~b)[0]


def test_names_have_to_be_the_same() -> None:
    a = np.ones(3, F32)
    results = judge("a", "b", {"y": a, "z": a}, {"z": a, "w": a}, TOLERANCE)
    assert {r.output: (r.kind, r.text) for r in results} == {
        "y": ("missing", "only a has this output"),
        "z": ("agrees", ""),
        "w": ("missing", "only b has this output"),
    }


TEXT = """<ir_version: 8, opset_import: ["" : 18]>
g (float[n,4] x) => (float[n,4] y) { y = Relu(x) }"""
N = Dim("n", 1, 10, 10**6)
POINTS = [Point(label, {"n": n}) for label, n in (("min", 1), ("opt", 10), ("max", 10**6))]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.onnx"
    onnx.save(onnx.parser.parse_model(TEXT), path)
    return path


def job(limit: int = 2**20, outputs: Any = None, points: Any = None) -> Job:
    shapes = outputs or {"y": ("n", 4)}
    declared = Interface(
        (Input("x", (N, 4)),),
        tuple(
            Output(name, tuple(read_size(size, {"n": N}) for size in shape))
            for name, shape in shapes.items()
        ),
        tolerance=TOLERANCE,
    )
    return Job(declared, points or POINTS, limit)


def test_points_over_the_limit_are_left_out_with_the_estimate(model: Path) -> None:
    plan = plan_points(job(), model)
    assert [p.label for p in plan.run] == ["min", "opt"]
    large = plan.infos[2]
    assert not large.compared
    assert large.estimate_bytes == pytest.approx(2 * 16 * 10**6 * 1.25, rel=0.01)
    assert large.left_out is not None and large.left_out.kind == "too-large"
    assert large.left_out.text == "needs about 38.1 MiB, the limit is 1.0 MiB"
    assert plan.shapes[2] == {"x": (10**6, 4)}


def test_output_shape_is_checked_also_where_nothing_runs(model: Path) -> None:
    plan = plan_points(job(outputs={"y": ("2*n", 4)}), model)
    for info, n in zip(plan.infos, (1, 10, 10**6), strict=True):
        (result,) = info.results
        assert not result.passed
        assert result.kind == "shape-differs"
        assert result.text == f"its shape is [{n}, 4], not [{2 * n}, 4]"
    result_info = conclude(plan, {"a": [{}, {}], "b": [{}, {}]}, [("a", "b")], job())
    assert not result_info.passed


def test_conclusion_takes_every_pair_at_every_point(model: Path) -> None:
    plan = plan_points(job(), model)
    good = [{"y": np.ones((n, 4), F32)} for n in (1, 10)]
    bad = {"y": np.full((10, 4), 2, F32)}
    runs = {"a": good, "b": good, "c": [good[0], bad]}
    assert conclude(plan, runs, [("a", "b")], job()).passed
    info = conclude(plan, runs, [("a", "b"), ("a", "c")], job(), [note("source-is-onnx")])
    assert not info.passed
    assert info.notes == (note("source-is-onnx"),)
    assert compare.failures(info) == [
        "y of c against a at opt (n=10): differs by up to 1 at index [0, 0]; the largest value is 1"
    ]
    assert [len(p.results) for p in info.points] == [2, 2, 0]


def test_the_metric_of_an_output_stands_beside_its_verdict(model: Path) -> None:
    asked = job()
    outputs = (replace(asked.interface.outputs[0], metric="top-1"),)
    asked = replace(asked, interface=replace(asked.interface, outputs=outputs))
    want = [{"y": np.tile(np.array([1, 2, 3, 4], F32), (n, 1))} for n in (1, 10)]
    got = [want[0], {"y": want[1]["y"].copy()}]
    got[1]["y"][:2] = got[1]["y"][:2, ::-1]
    info = conclude(plan_points(asked, model), {"a": want, "b": got}, [("a", "b")], asked)
    facts = [result.facts for point in info.points for result in point.results]
    assert [(one["metric"], one["measured"]) for one in facts] == [("top-1", 1.0), ("top-1", 0.8)]
    assert [result.passed for point in info.points for result in point.results] == [True, False]


def test_one_nan_is_one_problem(model: Path) -> None:
    """Over all pairs and points. In another run, or elsewhere, it is another problem."""
    plan = plan_points(job(), model)
    good = [{"y": np.ones((n, 4), F32)} for n in (1, 10)]
    bad = [{"y": np.where(np.arange(4) == 1, np.nan, run["y"]).astype(F32)} for run in good]
    worse = [{"y": np.where(np.arange(4) < 2, np.nan, run["y"]).astype(F32)} for run in good]
    pairs = [("torch", "exported"), ("exported", "rewritten"), ("torch", "rewritten")]

    def told(torch: Any, exported: Any, rewritten: Any) -> list[str]:
        runs = {"torch": torch, "exported": exported, "rewritten": rewritten}
        info = conclude(plan, runs, pairs, job())
        assert not info.passed
        return [line.partition(". ")[0] for line in compare.failures(info)]

    one = "y of exported against torch at min (n=1) and 1 more size: torch has NaN or infinity"
    assert told(bad, bad, bad) == told(bad, good, good) == [one]
    assert told(bad, worse, worse) == [f"{one}, and exported has others"]
    assert told(bad, bad, worse) == [
        one,
        "y of rewritten against exported at min (n=1) and 1 more size: torch has NaN or infinity, "
        "and rewritten has others",
    ]
    assert told(good, good, bad) == [
        "y of rewritten against exported at min (n=1) and 1 more size: rewritten has NaN or "
        "infinity"
    ]
    assert told(bad, good, bad[:1] + worse[1:]) == [
        one,
        "y of rewritten against exported at opt (n=10): rewritten has NaN or infinity",
    ]


def test_what_is_no_nan_stays_beside_one(model: Path) -> None:
    plan = plan_points(job(), model)
    ones, twos = ([{"y": np.full((n, 4), size, F32)} for n in (1, 10)] for size in (1, 2))
    nan = {"y": np.full((1, 4), np.inf, F32)}
    runs = {"torch": [nan, ones[1]], "exported": [nan, ones[1]], "rewritten": [nan, twos[1]]}
    pairs = [("torch", "exported"), ("exported", "rewritten"), ("torch", "rewritten")]
    info = conclude(plan, runs, pairs, job())
    off = "at opt (n=10): differs by up to 1 at index [0, 0]; the largest value is 1"
    first, *others = compare.failures(info)
    assert first.startswith("y of exported against torch at min (n=1): torch has NaN or infinity. ")
    assert others == [f"y of rewritten against {run} {off}" for run in ("exported", "torch")]
    assert [sum(not r.passed for r in p.results) for p in info.points] == [3, 2, 0]  # all are kept


def test_an_output_that_cannot_be_judged_is_one_problem(model: Path) -> None:
    plan = plan_points(job(), model)
    zeros = [{"y": np.zeros((n, 4), F32)} for n in (1, 10)]
    pairs = [("torch", "exported"), ("exported", "rewritten"), ("torch", "rewritten")]
    runs = {"torch": zeros, "exported": zeros, "rewritten": zeros}
    (line,) = compare.failures(conclude(plan, runs, pairs, job()))
    assert line.startswith(
        "y of exported against torch at min (n=1) and 1 more size: cannot be judged"
    )


SMALL = 1e-6  # below the atol of the job's tolerance


def near_zero(model: Path, *values: tuple[float, float]) -> ComparisonInfo:
    """The comparison of two runs with these values of y, at min and opt."""
    runs = [
        [{"y": np.full((n, 4), pair[k], F32)} for n, pair in zip((1, 10), values, strict=True)]
        for k in range(2)
    ]
    plan = plan_points(job(), model)
    return conclude(plan, {"torch": runs[0], "exported": runs[1]}, [("torch", "exported")], job())


def test_a_size_that_says_nothing_is_no_failure_beside_one_that_does(model: Path) -> None:
    info = near_zero(model, (SMALL, SMALL), (1, 1))
    assert info.passed and not compare.failures(info)
    assert [r.kind for p in info.points for r in p.results] == ["near-zero", "agrees"]
    (said,) = info.notes
    assert said.text == (
        "y of exported: 1 of 2 sets of sizes say nothing, because every value of torch is below "
        "atol there. The others were judged"
    )


@pytest.mark.parametrize(
    "values",
    [
        ((SMALL, SMALL), (SMALL, SMALL)),  # no size says anything
        ((SMALL, SMALL), (0, 0)),
        ((SMALL, 1), (1, 1)),  # a fault where the reference is near zero
        ((0, 2e-3), (1, 1)),
        ((SMALL, SMALL), (1, 1.1)),  # a fault at the size that says something
        ((SMALL, SMALL), (1, SMALL)),
        ((SMALL, np.nan), (1, 1)),
    ],
)
def test_near_zero_hides_no_fault(model: Path, values: Any) -> None:
    assert not near_zero(model, *values).passed


def test_an_empty_output_says_nothing_of_one_near_zero(model: Path) -> None:
    plan = plan_points(job(), model)
    some = [{"y": np.zeros((0, 4), F32)}, {"y": np.full((9, 4), SMALL, F32)}]
    empty = job(outputs={"y": ("n - 1", 4)})
    info = conclude(plan, {"a": some, "b": some}, [("a", "b")], empty)
    assert [r.kind for p in info.points for r in p.results] == ["no-elements", "inconclusive"]
    assert not info.passed


def test_an_output_without_elements_was_not_compared(model: Path) -> None:
    plan = plan_points(job(), model)
    none = [{"y": np.zeros((n, 0), F32)} for n in (1, 10)]
    info = conclude(plan, {"a": none, "b": none}, [("a", "b")], job(outputs={"y": ("n", 0)}))
    results = [result for point in info.points for result in point.results]
    assert [(r.kind, r.compared, r.max_abs) for r in results] == [("no-elements", False, None)] * 2
    (said,) = info.notes
    assert said.text == "y has no elements at the compared sizes: nothing was compared"
    some = [{"y": np.zeros((0, 4), F32)}, {"y": np.ones((9, 4), F32)}]
    some_elements = job(outputs={"y": ("n - 1", 4)})
    info = conclude(plan, {"a": some, "b": some}, [("a", "b")], some_elements)
    assert info.passed and not info.notes


def test_one_output_says_nothing_of_another(model: Path) -> None:
    plan = plan_points(job(), model)
    runs = [{"y": np.ones((n, 4), F32), "z": np.zeros(n, F32)} for n in (1, 10)]
    both = job(outputs={"y": ("n", 4), "z": ("n",)})
    info = conclude(plan, {"a": runs, "b": runs}, [("a", "b")], both)
    assert not info.passed
    assert {r.kind for p in info.points for r in p.results if r.output == "z"} == {"inconclusive"}


def test_nothing_compared_does_not_pass(model: Path) -> None:
    plan = plan_points(job(limit=1), model)
    info = conclude(plan, {"a": [], "b": []}, [("a", "b")], job())
    assert not info.passed
    assert [(one.kind, one.fails) for one in info.notes] == [("nothing-compared", True)]
    assert compare.failures(info) == [
        "nothing was compared: every set of sizes is over the memory limit. Raise --memory-limit"
    ]


def test_a_run_that_fails_names_the_sizes(model: Path) -> None:
    feeds = [{"x": np.ones((1, 4), F32)}, {"x": np.ones((10, 5), F32)}]
    said: list[str] = []
    with pytest.raises(CompareError, match=r"exported fails at opt \(n=10\): ") as caught:
        collect(OnnxRunner(model, "exported"), feeds, POINTS[:2], said.append, Stopwatch())
    assert "\n" not in str(caught.value)
    assert said == ["exported at min (n=1), 1 of 2", "exported at opt (n=10), 2 of 2"]
    runner = FeedRunner("a", lambda feed: {"y": feed["x"]})
    (short,) = collect(runner, feeds, POINTS[:1], silent, Stopwatch())
    assert short["y"].shape == (1, 4)
    with pytest.raises(CompareError, match="a fails at opt"):  # fewer results than points
        collect(runner, feeds[:1], POINTS[:2], silent, Stopwatch())


def test_own_errors_pass_through() -> None:
    def refuse(_: Feed) -> Any:
        raise PipelineError("said already")

    with pytest.raises(PipelineError, match=r"^said already$"):
        collect(FeedRunner("a", refuse), [{}], POINTS[:1], silent, Stopwatch())


def test_onnx_runs_unoptimised(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import onnxruntime

    seen = []
    real = onnxruntime.InferenceSession

    def session(path: str, options: Any, **words: Any) -> Any:
        seen.append(options.graph_optimization_level)
        return real(path, options, **words)

    monkeypatch.setattr(onnxruntime, "InferenceSession", session)
    (out,) = run_onnx(model, [{"x": -np.ones((2, 4), F32)}])
    assert (out["y"] == 0).all()
    assert seen == [onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL]


def test_torch_is_put_into_inference_mode() -> None:
    import torch

    class Two(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            assert torch.is_inference_mode_enabled()
            return x + 1, x.sum()

    out = run_once(compare.TorchRunner(Two(), ["a", "b"]), {"x": np.ones((2, 2), F32)})
    assert out["a"].dtype == F32
    assert out["b"] == 4
    with pytest.raises(CompareError, match=r"the spec names the outputs a\. Return"):
        run_once(compare.TorchRunner(Two(), ["a"]), {"x": np.ones((2, 2), F32)})


def test_a_later_call_has_to_give_what_a_first_call_gives() -> None:
    import torch

    class Last(torch.nn.Module):
        """Does something else after a call of three rows."""

        def __init__(self) -> None:
            super().__init__()
            self.last = torch.zeros(())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = -x if self.last == 3 else x
            self.last = torch.tensor(float(len(x)))
            return y

    class Table(torch.nn.Module):
        """Keeps a table for each size."""

        def __init__(self) -> None:
            super().__init__()
            self.tables: dict[int, torch.Tensor] = {}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.tables.setdefault(len(x), torch.arange(2.0))

    feeds = [{"x": np.ones((n, 2), F32)} for n in (1, 2, 3, 1)]
    module = Last()
    run = compare.TorchRunner(module, ["y"]).run(feeds)
    for _ in range(3):
        next(run)
    with pytest.raises(
        CompareError, match=r"x \[1, 2\], a later call .* keeps last\..*--state last"
    ):
        next(run)
    assert module.last == 0
    assert len(list(compare.TorchRunner(module, ["y"], first=True).run(feeds))) == 4
    table = Table()
    assert len(list(compare.TorchRunner(table, ["y"]).run(feeds))) == 4
    assert not table.tables


def test_profile_of_a_point() -> None:
    profiles = [Profile("a", {"n": (1, 2, 3)}), Profile("b", {"n": (3, 4, 9)})]
    assert [profile_of(Point("p", {"n": n}), profiles) for n in (1, 3, 4, 10)] == [0, 0, 1, None]


def test_what_is_stored_comes_back(tmp_path: Path) -> None:
    feeds = [{"x": np.ones((n, 2), F32), "n": np.array([n], np.int64)} for n in (1, 5)]
    stored.save_feeds(feeds, tmp_path / "inputs.json")
    stored.save_run("torch", feeds, tmp_path / "torch.json")
    for loaded in (
        stored.load_feeds(tmp_path / "inputs.json"),
        stored.load_run(tmp_path / "torch.json"),
    ):
        assert len(loaded) == 2
        for got, want in zip(loaded, feeds, strict=True):
            assert got.keys() == want.keys()
            for name, array in want.items():
                assert got[name].dtype == array.dtype
                np.testing.assert_array_equal(got[name], array)


@pytest.mark.parametrize(
    ("a", "b", "passes"),
    [
        ([200000, 1], [200000, 1], True),
        ([200000, 1], [200010, 1], False),  # within rtol as a float
        ([2**62], [-(2**62)], False),  # the difference overflows
        ([True, False], [True, True], False),
    ],
)
def test_integers_and_booleans_have_to_be_equal(a: list[int], b: list[int], passes: bool) -> None:
    wide = Tolerance(1e-2, 1e2, "wide")
    (result,) = judge("a", "b", {"y": np.array(a)}, {"y": np.array(b)}, wide)
    assert result.passed is passes
    assert result.kind == ("agrees" if passes else "values-differ")
    assert bool(result.text) is not passes
    assert result.max_abs is not None and (result.max_abs > 0) is not passes


def test_views_are_compared_and_stored_like_arrays() -> None:
    """A crop is a view, and Polygraphy refuses to reshape an array that is not contiguous."""
    whole = np.arange(1, 65, dtype=F32).reshape(8, 8)
    cut = {"y": whole[1:5, 2:7]}
    assert not cut["y"].flags["C_CONTIGUOUS"]
    (same,) = judge("a", "b", cut, {"y": whole[1:5, 2:7]}, Tolerance(0, 1e-6, "equal"))
    (moved,) = judge("a", "b", cut, {"y": whole[1:5, 1:6]}, Tolerance(0, 1e-6, "equal"))
    assert same.passed and not moved.passed


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_one_wrong_element_of_many_is_noticed(dtype: type) -> None:
    rng = np.random.default_rng(0)
    a = rng.standard_normal((3, 1 << 20)).astype(dtype)
    tolerance = Tolerance(1e-3, 1e-3, "a test")
    near = (a * (1 + 5e-4 * np.sign(rng.standard_normal(a.shape)))).astype(dtype)
    (result,) = judge("a", "b", {"y": a}, {"y": near}, tolerance)
    assert result.passed, result.text
    wrong = near.copy()
    wrong[2, 77] = a[2, 77] * dtype(1.01) + dtype(0.01)
    (result,) = judge("a", "b", {"y": a}, {"y": wrong}, tolerance)
    assert not result.passed
    assert result.max_abs == pytest.approx(float(abs(wrong[2, 77] - a[2, 77])), rel=1e-2)


@pytest.mark.parametrize("dtype", ["int64", "bool"])
def test_indices_that_differ_may_be_of_values_that_tie(dtype: str) -> None:
    a, b = np.array([0, 1]).astype(dtype), np.array([1, 0]).astype(dtype)
    (result,) = judge("torch", "exported", {"y": a}, {"y": b}, TOLERANCE)
    words = ("topk", "argsort", "stable=True", "in place of the indices", "--inputs FILE")
    assert all((word in result.text) == (dtype == "int64") for word in words)
    assert "No tolerance helps: at most 0.1 of the values may differ" in result.text  # all do


@pytest.mark.parametrize(
    ("count", "allowed", "words"),
    [
        (1, 0.0, "(none now, at most 0.1): Tolerance(..., differing=0.001), "),
        (23, 0.02, "(0.02 now, at most 0.1): Tolerance(..., differing=0.03), "),
        (93, 0.08, "--tolerance RTOL,ATOL,0.1"),
        (101, 0.08, "at most 0.1 of the values may differ, and 0.08 is allowed here"),
    ],
)
def test_the_advised_share_covers_what_differs(count: int, allowed: float, words: str) -> None:
    a, b = np.zeros(1000, np.int64), (np.arange(1000) < count).astype(np.int64)
    (result,) = judge("a", "b", {"y": a}, {"y": b}, Tolerance(0, 0, "one", differing=allowed))
    assert words in result.text
