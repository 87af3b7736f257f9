"""Inputs at the edges of their ranges: what random inputs do not show."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest

from pipeline.compare.edge_inputs import (
    Edges,
    check_edges,
    float_edges,
    half_edges,
    may_not_end,
)
from pipeline.compare.half_overflow import first_overflow
from pipeline.compare.half_runner import HalfRunner
from pipeline.compare.half_search import search
from pipeline.compare.runners import Ground
from pipeline.graph.session import OnnxRunner
from pipeline.machine.progress import silent
from pipeline.machine.resources import Stopwatch
from pipeline.spec.dims import Dim
from pipeline.spec.interface import Interface
from pipeline.spec.profiles import Point
from pipeline.spec.recipe import all_but
from pipeline.spec.tensors import Feed, Input, Output, Precision, Tolerance
from pipeline.spec.values import Values
from pipeline.spec.verdicts import Check

FINE = Tolerance(1e-5, 1e-6, "float32 rounding")
ROUGH = Tolerance(1e-2, 0.1, "float16 rounding")
B, H = Dim("b", 1, 2, 4), Dim("h", 8, 16, 64)
IMAGE = Input("x", (B, 8, H, H))
# the mean of an image, by hand: random values of both signs cancel in the sum
MEAN = "a = Mul(x, c40) [pool__sum] s = ReduceSum(a, axes) [pool__mean] y = Div(s, c512)"


def interface(one: Input = IMAGE) -> Interface:
    return Interface((one,), (Output("y", None, FINE),), engine_tolerance={"fp16": ROUGH})


def write(folder: Path, body: str, inputs: str = "float[b,8,h,w] x") -> Path:
    path = folder / "model.onnx"
    model = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["" : 17]> g ({inputs}) => (float[b,m] y)
        <float c40 = {{40}}, float c512 = {{512}}, float one = {{1}}, float small = {{1e-5}},
        float low = {{1e-3}}, float minus = {{-0.5}}, float seven = {{7}}, float tiny = {{1e-15}},
        int64[3] axes = {{1, 2, 3}}, int64[2] shape = {{1, 1}}> {{ {body} }}"""
    )
    for node in model.graph.node:
        node.name = node.name.replace("__", "/")
    onnx.save(model, path)
    return path


def planned(*sizes: tuple[int, int]) -> list[Point]:
    return [Point(f"{b} {h}", {"b": b, "h": h}) for b, h in sizes]


def edges_of(path: Path, declared: Interface, points: list[Point] | None = None) -> Edges:
    return half_edges(
        path, declared, "fp16", points or planned((1, 8), (2, 16), (4, 64)), silent, Stopwatch()
    )


def checked(edges: Edges, *islands: str) -> list[Check]:
    assert isinstance(edges.reference, OnnxRunner)
    model, recipe = edges.reference.model, all_but("fp16", list(islands))
    runner = HalfRunner(model, "fp16", True, recipe=recipe)
    return check_edges(
        edges, runner, {"y": ROUGH}, silent, Stopwatch(),
        lambda feed: first_overflow(model, feed, recipe),
    )  # fmt: skip


def test_a_sum_over_a_bright_image_overflows(tmp_path: Path) -> None:
    path = write(tmp_path, MEAN)
    edges = edges_of(path, interface())
    (found,) = checked(edges)
    assert not found.passed and found.run == "half"
    assert found.sizes == {"b": 1, "h": 64}  # the largest image, and one of them
    assert found.text.startswith(
        "with all inputs least, y is infinity, and up to 2.56e+03 in model.onnx (first overflow in "
        "half precision: the ReduceSum node pool/sum: s reaches 1.31e+06). Build with --precision "
        "auto, or keep nodes"
    )
    (found,) = checked(edges, "pool/*")
    assert found.passed and found.text == "no output is wholly wrong for 4 kinds of inputs"
    # random inputs alone show nothing: the same sum is small
    point = {"b": 4, "h": 64}
    (got,) = HalfRunner(path, "fp16", True, recipe=all_but("fp16", [])).run(
        [{"x": IMAGE.sample(point, 0)}]
    )
    assert np.isfinite(got["y"]).all()


def test_the_search_keeps_the_sum_in_float32(tmp_path: Path) -> None:
    path = write(tmp_path, MEAN)
    points = planned((1, 8), (2, 16), (4, 64))
    feeds = [{"x": IMAGE.sample(point.sizes, 0)} for point in points]
    ground = Ground(points, feeds, silent, Stopwatch())
    found = search(path, interface(), "fp16", ground, [0, 1])
    assert [name for name, how in found.recipe.lines if how == "fp32"] == ["pool"]
    assert len(ground.points) == 3  # the edges are not sizes of the comparison
    # a range in which no image is bright needs no island
    dim = Input("x", (B, 8, H, H), low=-1e-3, high=1e-3)
    feeds = [{"x": dim.sample(point.sizes, 0)} for point in points]
    found = search(path, interface(dim), "fp16", Ground(points, feeds, silent, Stopwatch()), [0, 1])
    assert [name for name, how in found.recipe.lines if how == "fp32"] == []


def test_an_index_that_random_numbers_seldom_draw(tmp_path: Path) -> None:
    """A table has one value near 1, which half precision rounds to 1: 1 - 1 is 0."""
    table = np.linspace(0.2, 0.8, 1000, dtype=np.float32)
    table[0] = 0.99995
    path = write(tmp_path, "g = Gather(t, i) a = Sub(one, g) y = Div(g, a)", "int64[b,1] i")
    model = onnx.load(path)
    model.graph.initializer.append(onnx.numpy_helper.from_array(table, "t"))
    onnx.save(model, path)
    declared = interface(Input("i", (B, 1), "int64", low=0, high=1000))
    points = [Point("1", {"b": 1}), Point("4", {"b": 4})]
    edges = edges_of(path, declared, points)
    assert [feed["i"].tolist() for feed in edges.feeds] == [[[0]], [[0]], [[999]], [[999]]]
    (found,) = checked(edges)
    assert found.kind == "wrong-at-an-edge"
    assert "with all inputs 0, y is infinity, and up to 2e+04 in model.onnx" in found.text


@pytest.mark.parametrize(
    "body",
    [
        # the norm of a constant: rounding alone decides
        """m = ReduceMean<axes = [2, 3]>(x) d = Sub(x, m) q = Mul(d, d)
        v = ReduceMean<axes = [2, 3]>(q) e = Add(v, small) r = Sqrt(e) n = Div(d, r)
        y = ReduceMax<axes = [1, 2, 3]>(n)""",
        # NaN in float32 too
        "l = Sqrt(x) y = ReduceMax<axes = [1, 2, 3]>(l)",
        # 0 for all inputs at an edge
        "a = Relu(x) y = ReduceMax<axes = [1, 2, 3]>(a)",
    ],
)
def test_near_misses(tmp_path: Path, body: str) -> None:
    (found,) = checked(edges_of(write(tmp_path, body), interface()))
    assert found.passed


def test_inputs_at_which_the_model_fails_are_left_out(tmp_path: Path) -> None:
    body = "a = Cast<to = 7>(i) g = Gather(t, a) y = Add(g, one)"
    path = write(tmp_path, body, "float[b,1] i")
    model = onnx.load(path)
    model.graph.initializer.append(
        onnx.numpy_helper.from_array(np.linspace(0, 1, 5, dtype=np.float32), "t")
    )
    onnx.save(model, path)
    edges = edges_of(path, interface(Input("i", (B, 1), low=-3, high=9)), [Point("1", {"b": 1})])
    assert [point.label for point in edges.points] == ["inputs 0", "inputs least"]


def test_without_an_input_of_a_range_there_is_no_check(tmp_path: Path) -> None:
    path = write(tmp_path, "a = Cast<to = 1>(x) y = Mul(a, one)", "int64[b,4] x")
    mask = Input("x", (B, 4), "int64", pattern="prefix")
    assert checked(edges_of(path, interface(mask))) == []


def test_the_values_of_each_edge() -> None:
    image = Input("x", (B, H), low=0.5, high=3)
    ids = Input("i", (B, H), "int32", low=2, high=5)
    sizes = {"b": 1, "h": 8}
    assert np.unique(image.edge(sizes, "0")) == [0.5]
    assert np.unique(image.edge(sizes, "largest")) == [3]
    upper = image.edge(sizes, "in the upper half")
    assert (upper >= 1.75).all() and len(np.unique(upper)) == 8
    assert ids.edge(sizes, "least").tolist() == [[2, 3, 4, 2, 3, 4, 2, 3]]
    assert ids.edge(sizes, "largest").tolist() == [[4, 3, 2, 4, 3, 2, 4, 3]]
    assert ids.edge(sizes, "0").dtype == np.int32
    whole = Input("i", (H,), "int64", low=-(2**63), high=2**63)
    assert whole.edge(sizes, "largest")[0] == 2**63 - 1
    assert whole.edge(sizes, "in the upper half").min() == 2**63 - 8


def in_float(folder: Path, body: str, other: str) -> Check:
    """How the check ends for a model that a pass turned into another one."""
    (folder / "other").mkdir()
    reference = OnnxRunner(write(folder, body), "exported")
    points = planned((1, 8), (2, 16))
    edges = float_edges(reference, interface(), points, silent, Stopwatch())
    runner = OnnxRunner(write(folder / "other", other), "rewritten")
    (found,) = check_edges(edges, runner, {"y": FINE}, silent, Stopwatch())
    return found


SUM = "m = ReduceMean<axes = [1, 2, 3]>(x) q = Mul(m, m) "


def test_an_image_of_zeros_in_float32(tmp_path: Path) -> None:
    """A pass that loses a small addend: no random image shows it."""
    guarded = SUM + "e = Add(q, small) y = Div(q, e)"
    found = in_float(tmp_path, guarded, SUM + "y = Div(q, q)")
    assert found.kind == "wrong-at-an-edge" and found.run == "rewritten"
    assert found.sizes == {"b": 1, "h": 8}
    assert found.text.startswith(
        "with all inputs 0, y is NaN, and up to 0 in exported. Pass such values with --inputs to"
    )


def test_rounding_in_float32_is_no_fault(tmp_path: Path) -> None:
    """The norm of a constant, which an image of zeros becomes: how its mean is rounded decides."""
    norm = """t = Mul(x, small) z = Add(t, small) m = ReduceMean<axes = [2, 3]>(z) d = Sub(z, m)
        q = Mul(d, d) v = ReduceMean<axes = [2, 3]>(q) r = Sqrt(v) g = Add(r, tiny) n = Div(d, g)
        y = ReduceMax<axes = [1, 2, 3]>(n)"""
    other = norm.replace("m = ReduceMean<axes = [2, 3]>(z)", "h = ReduceMean<axes = [2, 3]>(z) "
                         "k = Mul(h, seven) m = Div(k, seven)")  # fmt: skip
    assert in_float(tmp_path, norm, other).passed


def test_edges_at_which_the_reference_fails_are_named(tmp_path: Path) -> None:
    path = write(tmp_path, "y = Gather(c, i)", "int64[b,1] i")
    model = onnx.load(path)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(4, np.float32), "c"))
    onnx.save(model, path)
    declared = interface(Input("i", (B, 1), "int64", low=0, high=9))
    run = OnnxRunner(path, "exported")
    edges = float_edges(run, declared, [Point("1", {"b": 1})], silent, Stopwatch())
    (found,) = check_edges(edges, run, {"y": FINE}, silent, Stopwatch())
    assert found.text == (
        "no output is wholly wrong for 2 kinds of inputs; exported fails, or has no number, with "
        "all inputs largest, in the upper half"
    )


def test_a_size_that_values_decide(tmp_path: Path) -> None:
    """The count of what is above 0.001: none of an image of zeros. The other model loses it."""
    head = "f = ReduceMax<axes = [1, 2, 3], keepdims = 0>(x) p = Greater(f, low) "
    tail = "w = NonZero(p) v = Cast<to = 1>(w) y = Transpose(v)"
    found = in_float(tmp_path, head + tail, head.replace("low", "minus") + tail)
    assert found.kind == "wrong-at-an-edge", found.text
    assert "y is of shape [1, 1], and of shape [0, 1] in exported" in found.text


def test_a_model_that_fails_only_at_an_edge(tmp_path: Path) -> None:
    head = "f = ReduceMax<axes = [1, 2, 3], keepdims = 0>(x) p = Greater(f, low) w = NonZero(p) "
    tail = "v = Cast<to = 1>(w) t = Transpose(v) y = "
    one = head + tail + "Identity(t)"
    found = in_float(tmp_path, one, head + tail + "Reshape(t, shape)")
    assert found.kind == "run-failed" and not found.passed
    assert "fails: with all inputs 0: rewritten fails at" in found.text


class Fake:
    """A run of a function of the inputs."""

    precision: Precision = "fp32"

    def __init__(self, function: Callable[[Feed], np.ndarray], name: str = "exported") -> None:
        self.function, self.name = function, name
        self.feeds: list[Feed] = []

    def run(self, feeds: Iterable[Feed]) -> Iterator[dict[str, np.ndarray]]:
        for feed in feeds:
            self.feeds.append(feed)
            yield {"y": self.function(feed)}


X = Input("x", (B, 4))


def between(
    want: Callable[[Feed], np.ndarray], got: Callable[[Feed], np.ndarray], *inputs: Input
) -> Check:
    """The check of a run against another one."""
    declared = Interface(inputs, (Output("y", None, FINE),))
    edges = float_edges(Fake(want, "torch"), declared, [Point("1", {"b": 1})], silent, Stopwatch())
    (found,) = check_edges(edges, Fake(got), {"y": FINE}, silent, Stopwatch())
    return found


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(("low", "high"), [(0, 1), (1000, 1001)])
def test_changed_inputs_stay_in_their_range(dtype: str, low: int, high: int) -> None:
    reference = Fake(lambda feed: feed["x"], "torch")
    one = replace(X, low=low, high=high, dtype=dtype)
    declared = Interface((one,), (Output("y", None, FINE),))
    edges = float_edges(reference, declared, [Point("1", {"b": 1})], silent, Stopwatch())
    assert edges.rounded is not None
    plain = edges.feeds
    list(edges.rounded(plain))
    changed = reference.feeds[len(plain) :]
    assert len(changed) == len(plain)
    for before, after in zip(plain, changed, strict=True):
        assert after["x"].dtype == dtype
        assert low <= after["x"].min() and after["x"].max() <= high
        assert not np.array_equal(before["x"], after["x"])


def test_your_own_values_stay_as_they_are() -> None:
    """Values of 200 are beyond the range of random ones, which does not apply to them."""
    mine = np.full((1, 4), 200, np.float32)
    own = Input("img", (B, 4), values=Values.of(mine))
    found = between(lambda f: f["img"] + f["x"], lambda f: 3 * (f["img"] + f["x"]), own, X)
    assert found.kind == "wrong-at-an-edge"
    assert "y is off by up to 400, and up to 200 in torch" in found.text


def test_a_difference_alone_is_no_fault_if_all_inputs_are_integers() -> None:
    whole = Input("x", (B, 4), "int64", low=0, high=9)
    one, two, nan = (np.full((1, 4), value, np.float32) for value in (1, 2, np.nan))
    assert between(lambda _: one, lambda _: 9 * two, whole).passed
    assert between(lambda _: one, lambda _: nan, whole).kind == "wrong-at-an-edge"


def test_each_element_is_judged_by_its_own_rounding() -> None:
    def root(feed: Feed) -> np.ndarray:
        with np.errstate(invalid="ignore"):
            return np.sqrt(feed["x"]) + 1

    def broken(feed: Feed) -> np.ndarray:
        return np.where(feed["x"] == 0, np.nan, root(feed)).astype(np.float32)

    # at 0, about half of the changed inputs have no root: the others show that NaN is a fault
    assert between(root, broken, replace(X, shape=(B, 64))).kind == "wrong-at-an-edge"


def test_an_edge_without_a_number_is_named() -> None:
    def nothing(feed: Feed) -> np.ndarray:
        return np.where(feed["x"] == 0, np.nan, feed["x"]).astype(np.float32)

    found = between(nothing, lambda feed: feed["x"], X)
    assert found.text == (
        "no output is wholly wrong for 3 kinds of inputs; torch fails, or has no number, with all "
        "inputs 0"
    )


def test_a_model_with_a_loop_is_left_out(tmp_path: Path) -> None:
    """An image of zeros never doubles to 100."""
    path = write(tmp_path, "y = Relu(x)")
    assert not may_not_end(path)
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]> g (float[b,8,h,w] x) => (float[b,8,h,w] y) {
        go = Constant<value = bool {1}>()
        y = Loop (, go, x) <body = body (int64 n, bool c, float[b,8,h,w] z) =>
            (bool d, float[b,8,h,w] twice)
            { twice = Add(z, z) s = ReduceMax<keepdims = 0>(twice)
              e = Constant<value = float {100}>() d = Less(s, e) }> }"""
    )
    onnx.save(model, path)
    edges = edges_of(path, interface())
    assert not edges.feeds and checked(edges) == []
