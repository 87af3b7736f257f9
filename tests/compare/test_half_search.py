"""The search for a recipe: islands where the tolerance needs them, and nowhere else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import numpy_helper

from pipeline.artifact.manifest import PointInfo
from pipeline.compare.half_runner import HalfRunner
from pipeline.compare.half_search import Searched, few_of, search
from pipeline.compare.half_trials import MOST, share_of
from pipeline.compare.plan import ComparisonPlan
from pipeline.compare.runners import Ground
from pipeline.graph.session import run_onnx
from pipeline.machine.progress import silent
from pipeline.machine.resources import Stopwatch
from pipeline.spec.dims import Dim
from pipeline.spec.findings import note
from pipeline.spec.interface import Interface
from pipeline.spec.profiles import Point
from pipeline.spec.recipe import Recipe
from pipeline.spec.tensors import Feed, Input, Output, Precision, Tolerance

TIGHT = Tolerance(1e-5, 1e-6, "float32 rounding")
N = Dim("n", 1, 8, 64)
SIZES = (2, 8, 64)
# four modules of a model that half precision can hold
FINE = """
    [a__product] a = MatMul(x, k) [a__gelu] a1 = Erf(a) [a__gate] a2 = Mul(a, a1)
    [b__product] b = MatMul(a2, k) [b__softmax] b1 = Softmax(b) [b__mixed] b2 = MatMul(b1, k)
    [c__squared] c = Mul(b2, b2) [c__mean] c1 = ReduceMean<axes = [1]>(c) [c__root] c2 = Sqrt(c1)
    [c__normal] c3 = Div(b2, c2) [d__product] y = MatMul(c3, k) """
# a module whose values go far beyond 65504, and come back
HUGE = """
    [loud__up] l1 = Mul(a2, thousand) [loud__more] l2 = Mul(l1, thousand)
    [loud__down] l3 = Mul(l2, millionth) """
LOUD = FINE.replace("[b__product] b = MatMul(a2, k)", HUGE + "[b__product] b = MatMul(l3, k)")


class Case:
    """A model of x [n, 64] with one output, and its inputs at three sizes."""

    def __init__(self, folder: Path, body: str, loud_at: int | None = None):
        self.path = folder / "model.onnx"
        model = onnx.parser.parse_model(
            f"""<ir_version: 8, opset_import: ["" : 17]>
            g (float[n,64] x) => (float[n,m] y)
            <float thousand = {{1000}}, float millionth = {{1e-6}}> {{ {body} }}"""
        )
        weights = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32) / 8
        model.graph.initializer.append(numpy_helper.from_array(weights, "k"))
        for node in model.graph.node:
            node.name = node.name.replace("__", "/")  # module/name
        onnx.save(model, self.path)
        self.feeds: list[Feed] = [
            {"x": np.random.default_rng(n).standard_normal((n, 64)).astype(np.float32)}
            for n in SIZES
        ]
        if loud_at is not None:
            self.feeds[loud_at] = {"x": self.feeds[loud_at]["x"] * np.float32(3e3)}
        points = [Point(str(n), {"n": n}) for n in SIZES]
        self.ground = Ground(points, self.feeds, silent, Stopwatch())
        self.plain = list(run_onnx(self.path, self.feeds))

    def search(self, limit: int = 60, stated: Tolerance | None = None) -> Searched:
        tolerance = {} if stated is None else {"fp16": stated}
        declared = Interface(
            (Input("x", (N, 64)),), (Output("y", (N, 64), TIGHT),), engine_tolerance=tolerance
        )
        return search(self.path, declared, "fp16", self.ground, [0, 1], limit)

    def far(self, recipe: Recipe, precision: Precision = "fp16") -> float:
        """The largest error of a recipe."""
        found = HalfRunner(self.path, precision, True, recipe=recipe).run(self.feeds)
        pairs = zip(self.plain, found, strict=True)
        return max(share_of(a["y"], b["y"], Tolerance(0, 1, "one")) for a, b in pairs)


def test_where_half_precision_holds_there_is_no_island(tmp_path: Path) -> None:
    case = Case(tmp_path, FINE)
    found = case.search()
    assert found.recipe == Recipe((("*", "fp16"),))
    assert found.info.half == len(onnx.load(case.path).graph.node) and not found.info.islands
    assert found.info.runs == 1 and not found.info.stopped
    assert found.info.share is not None and 0 < found.info.share <= MOST


def test_an_overflow_is_mended_by_one_island(tmp_path: Path) -> None:
    case = Case(tmp_path, LOUD)
    assert np.isinf(case.far(Recipe((("*", "fp16"),))))
    found = case.search()
    (island,) = found.info.islands
    assert island.pattern.startswith("loud") and island.nodes <= 3
    assert case.far(found.recipe) < 0.1
    assert found.info.runs < 20
    assert f"{found.info.half} nodes in half precision, {island.nodes} in 1 island" in (
        found.info.text
    )


def test_an_overflow_in_a_product_is_found_too(tmp_path: Path) -> None:
    """The rules keep products in half precision, so they are no help here."""
    body = FINE.replace("[b__product] b = MatMul(a2, k)", "[b__product] b = MatMul(a2, large)")
    body = "[big__weights] large = Mul(k, million) " + body + " "
    body = body.replace("[b__softmax] b1 = Softmax(b)", "[b__scaled] s = Mul(b, millionth) "
                        "[b__softmax] b1 = Softmax(s)")  # fmt: skip
    body = "million = Constant<value = float {1e6}>() " + body
    case = Case(tmp_path, body)
    found = case.search()
    assert found.info.share is not None and found.info.share <= MOST
    assert all(island.pattern.split("/")[0] in ("b", "big") for island in found.info.islands)


def test_two_overflows_are_two_islands(tmp_path: Path) -> None:
    again = HUGE.replace("loud", "shrill").replace("l1", "s1").replace("l2", "s2")
    again = again.replace("a2", "c3").replace("l3", "s3")
    body = LOUD.replace("[d__product] y = MatMul(c3, k)", again + "[d__product] y = MatMul(s3, k)")
    found = Case(tmp_path, body).search()
    assert sorted(i.pattern.split("/")[0] for i in found.info.islands) == ["loud", "shrill"]


def test_it_finds_the_same_twice(tmp_path: Path) -> None:
    case = Case(tmp_path, LOUD)
    one, other = case.search(), case.search()
    assert one.recipe == other.recipe and one.info.islands == other.info.islands


def test_an_overflow_at_one_size_only_is_found(tmp_path: Path) -> None:
    """The last size is not among those at which each recipe is tried."""
    body = FINE.replace("MatMul(a2, k)", "MatMul(l3, k)").replace(
        "[b__product]", "[loud__up] l1 = Mul(a2, thousand) [loud__down] l2 = Mul(l1, millionth) "
        "[loud__back] l3 = Mul(l2, thousand) [b__product]",
    )  # fmt: skip
    case = Case(tmp_path, body, loud_at=2)
    found = case.search()
    assert [i.pattern.split("/")[0] for i in found.info.islands] == ["loud"]
    assert found.info.share is not None and found.info.share <= MOST


def test_at_its_limit_the_result_still_holds(tmp_path: Path) -> None:
    case = Case(tmp_path, LOUD)
    found = case.search(limit=3)
    assert found.info.stopped and "fewer islands may do" in found.info.text
    assert len(found.info.islands) > 1
    assert found.info.share is not None and found.info.share <= MOST


def test_recipes_are_tried_at_min_opt_and_an_odd_size_of_the_first_profile() -> None:
    labels = ("few: min", "few: max", "few: opt", "few: odd, below opt", "many: min", "many: opt")
    plan = ComparisonPlan(run=[Point(label, {"n": n}) for n, label in enumerate(labels)])
    needs = [10, 90, 20, 15, 5, 6]
    plan.infos = [
        PointInfo(
            "too large", {"n": 99}, 100, left_out=note("too-large", need_bytes=2, limit_bytes=1)
        )
    ]
    plan.infos += [PointInfo(p.label, p.sizes, n) for p, n in zip(plan.run, needs, strict=True)]
    assert few_of(plan) == [0, 3, 2]
    plan.run, plan.infos = [Point("asked for", {"n": 1})], [PointInfo("asked for", {"n": 1}, 1)]
    assert few_of(plan) == [0]


def test_a_stated_tolerance_decides(tmp_path: Path) -> None:
    case = Case(tmp_path, FINE)
    found = case.search(stated=Tolerance(1e-6, 1e-6, "as float32"))
    assert found.info.islands
    assert found.info.share is not None and found.info.share <= MOST


@pytest.mark.parametrize(
    ("want", "got", "share"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([1.0, 2.0], [1.1, 2.0], 1.0),
        ([1.0, np.nan], [1.0, np.nan], 0.0),
        ([1.0, 2.0], [1.0, np.inf], np.inf),
        ([1.0, np.inf], [1.0, np.inf], 0.0),
        ([], [], 0.0),
    ],
)
def test_the_share_of_a_tolerance(want: list[float], got: list[float], share: float) -> None:
    arrays = [np.array(values, np.float64) for values in (want, got)]
    found = share_of(arrays[0], arrays[1], Tolerance(0.0, 0.1, "a tenth"))
    assert found == pytest.approx(share)


def test_the_share_of_integers() -> None:
    want, got = np.arange(20), np.arange(20)
    got[0] += 1
    assert share_of(want, got, Tolerance(0.0, 0.1, "one", differing=0.1)) == 0.5
    assert share_of(want, got, Tolerance(0.0, 0.1, "none")) == np.inf


def test_values_that_become_whole_numbers_stay_float32(tmp_path: Path) -> None:
    """A fused kernel rounds elsewhere than the simulation: 16.0 and 15.998 are two buckets."""
    body = """
        [embed__product] a = MatMul(x, k)
        [bucket__scale] b = Mul(a, thousand) [bucket__shift] b1 = Add(b, millionth)
        [bucket__floor] b2 = Floor(b1) [bucket__back] b3 = Mul(b2, millionth)
        [out__product] y = MatMul(b3, k) """
    case = Case(tmp_path, body)
    found = case.search(stated=Tolerance(0.5, 1e3, "almost anything passes"))
    assert found.info.runs == 1
    kept = sorted(island.pattern for island in found.info.islands)
    assert kept == ["bucket/Add", "bucket/Mul", "embed/MatMul"]
    half = Case(tmp_path, FINE).search(stated=Tolerance(0.5, 1e3, "almost anything passes"))
    assert not half.info.islands
