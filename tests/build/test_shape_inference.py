"""The target's inferred sizes, compared with the declared sizes."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnx.parser
import pytest

from pipeline.build.shape_inference import ORACLE, output_sizes, why_not_asked
from pipeline.build.try_graph import static_sizes
from pipeline.compare.plan import Job, plan_points
from pipeline.compare.shape_oracle import check_sizes
from pipeline.machine.target import TARGETS, use
from pipeline.spec.dims import Dim, read_size
from pipeline.spec.findings import Note
from pipeline.spec.interface import Interface
from pipeline.spec.model import Tolerance
from pipeline.spec.profiles import Profile, points
from pipeline.spec.tensors import Input, Output
from pipeline.spec.verdicts import Verdict

RTX = TARGETS["rtx-1.7"]
pytestmark = pytest.mark.skipif(bool(why_not_asked(RTX)), reason=why_not_asked(RTX))
H, W = Dim("h", 4, 8, 40), Dim("w", 4, 10, 40)


def save(folder: Path, body: str, outputs: str = "float[1,3,p,q] y") -> Path:
    path = folder / "m.onnx"
    head = '<ir_version: 8, opset_import: ["" : 18]>'
    model = onnx.parser.parse_model(f"{head} g (float[1,3,h,w] x) => ({outputs}) {body}")
    onnx.save(model, path)
    return path


def ask(path: Path, output: tuple[int | str, ...]) -> tuple[list[Verdict], list[Note]]:
    """The failures and the notes."""
    dims = {"h": H, "w": W}
    declared = Interface(
        (Input("x", (1, 3, H, W)),),
        (Output("y", tuple(read_size(size, dims) for size in output)),),
        tolerance=Tolerance(0, 1e-5, "none"),
    )
    job = Job(declared, points(dims, [Profile("all").resolve(dims)], []), 1 << 30)
    plan = plan_points(job, path)
    notes = check_sizes(path, RTX, job, plan)
    return [r for i in plan.infos for r in i.results if ORACLE in r.pair[1]], notes


def test_right_sizes(tmp_path: Path) -> None:
    path = save(tmp_path, "{ y = MaxPool<kernel_shape=[2,2], strides=[2,2]>(x) }")
    wrong, notes = ask(path, (1, 3, "h//2", "w//2"))
    assert not wrong
    count = len(points_of())
    assert notes[0].kind == "shape-inference-agrees"
    assert notes[0].text.endswith(f"agrees on the output sizes at {count} of {count} sets of sizes")


def points_of() -> list[object]:
    dims = {"h": H, "w": W}
    return list(points(dims, [Profile("all").resolve(dims)], []))


def test_a_baked_size_is_found_and_sizes_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    path = save(tmp_path, "<int64[4] s = {1, 3, 8, 10}> { y = Reshape(x, s) }")
    wrong, notes = ask(path, (1, 3, "h", "w"))
    assert len(wrong) == len(points_of()) - 1  # all but opt
    assert {verdict.kind for verdict in wrong} == {"sizes-refused"}
    assert all(verdict.text.startswith("TensorRT refuses the sizes: ") for verdict in wrong)
    assert all("reshape" in verdict.text.lower() for verdict in wrong)
    assert notes[0].facts["count"] == 1


def test_a_formula_that_is_wrong_at_some_sizes_is_found(tmp_path: Path) -> None:
    path = save(tmp_path, "{ y = MaxPool<kernel_shape=[2,2], strides=[2,2], ceil_mode=1>(x) }")
    wrong, _ = ask(path, (1, 3, "h//2", "w//2"))
    assert wrong
    assert {verdict.kind for verdict in wrong} == {"shape-differs"}
    assert all("its shape is [1, 3, " in verdict.text for verdict in wrong)


@pytest.mark.parametrize(
    "body",
    [
        "<int64[4] s = {1, 3, 8, 10}> { y = Reshape(x, s) }",
        "<int64[3] s = {1, -1, 10}> { y = Reshape(x, s) }",
        "<float[1,1,1,2] s = {1.0, 2.0}> { t = Add(x, s) y = ReduceSum<keepdims=1>(t) }",
        "{ y = MaxPool<kernel_shape=[12,12]>(x) }",
        "{ y = SpaceToDepth<blocksize=4>(x) }",
        "<int64[1] two = {2}, int64[1] c = {3}> { h = Shape<start=2, end=3>(x) half = Div(h, two) "
        "w = Shape<start=3, end=4>(x) n = Concat<axis=0>(c, half, two, w) y = Reshape(x, n) }",
    ],
)
def test_one_parse_for_all_sizes_knows_what_a_parse_for_each_knows(tmp_path: Path, body) -> None:
    path = save(tmp_path, body)
    model, trt = onnx.load(path), use(RTX)
    shapes = [{"x": (1, 3, h, w)} for h, w in [(8, 10), (9, 10), (8, 2), (20, 20), (40, 2), (4, 4)]]
    each = [static_sizes(trt, RTX, model, shape, path) for shape in shapes]
    assert output_sizes(path, shapes, RTX) == each
    assert {isinstance(one, str) for one in each} == {True, False}


def test_sizes_beyond_any_memory_are_asked_all_the_same(tmp_path: Path) -> None:
    path = save(tmp_path, "{ t = Transpose<perm=[0,1,3,2]>(x) y = MatMul(x, t) }")
    (sizes,) = output_sizes(path, [{"x": (1, 3, 20000, 30000)}], RTX)
    assert sizes == {"y": (1, 3, 20000, 20000)}


def test_sizes_that_depend_on_the_data_are_left_open(tmp_path: Path) -> None:
    body = "<float z = {0.0}> { g = Greater(x, z) y = NonZero(g) }"
    (sizes,) = output_sizes(save(tmp_path, body, "int64[4,k] y"), [{"x": (1, 3, 4, 4)}], RTX)
    assert (isinstance(sizes, str) and "NonZero" in sizes) or -1 in sizes["y"]


def test_the_other_flavour_needs_a_gpu() -> None:
    assert why_not_asked(TARGETS["tensorrt-10"])
