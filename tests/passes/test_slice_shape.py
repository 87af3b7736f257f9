"""slice_shape: the patterns that TensorRT 8.6 misreads, and their replacements.

The failure (``Resize ... requires second input to be 1D shape tensor with length (12)``) was seen
on TensorRT 8.6.0. The proof of the fix there needs a GPU machine. Here, dropping the two attributes
imitates the parser of 8.6.
"""

from __future__ import annotations

import onnx_graphsurgeon as gs
import pytest
from onnxruntime.capi.onnxruntime_pybind11_state import Fail
from pass_harness import PASSES, apply, assert_same, own, run

from pipeline.passes.case import Case

P = PASSES["slice_shape"]


def read_as_8_6(case: Case, rewritten: bool):
    """The model as 8.6's parser reads it: Shape has no start and end."""
    model = apply(P, case.model())[0] if rewritten else case.model()
    graph = gs.import_onnx(model)
    for inner in (graph, *graph.subgraphs(recursive=True)):
        for node in inner.nodes:
            if node.op == "Shape":
                node.attrs.clear()
        for output in inner.outputs:
            output.shape = None
    return gs.export_onnx(graph)


@pytest.mark.parametrize(
    "case", [c for c in own("slice_shape", "positive") if "Resize" not in c.name], ids=str
)
def test_read_without_the_attributes_it_is_still_right(case: Case) -> None:
    feeds = case.feeds(case.shapes[1])
    right = run(case.model(), feeds)
    assert_same(right, run(read_as_8_6(case, rewritten=True), feeds))
    if case.name not in ("whole", "start 0"):
        with pytest.raises((AssertionError, Fail)):
            assert_same(right, run(read_as_8_6(case, rewritten=False), feeds))


def test_the_case_that_fails_on_8_6() -> None:
    """Two slices of a shape joined into a Resize's sizes: the whole shapes have length 8."""
    (case,) = (c for c in own("slice_shape", "positive") if "Resize" in c.name)
    feeds = case.feeds(case.shapes[1])
    with pytest.raises(Exception, match=r"(?i)resize|size"):
        run(read_as_8_6(case, rewritten=False), feeds)
    assert_same(run(case.model(), feeds), run(read_as_8_6(case, rewritten=True), feeds))


def test_no_shape_keeps_an_attribute() -> None:
    for case in own("slice_shape", "positive"):
        graph = gs.import_onnx(apply(P, case.model())[0])
        for inner in (graph, *graph.subgraphs(recursive=True)):
            assert not any(node.attrs for node in inner.nodes if node.op == "Shape")


def test_an_op_of_another_domain_is_left_alone() -> None:
    x, y = gs.Variable("x", "float32", ["n", 3]), gs.Variable("y", "int64", [1])
    node = gs.Node("Shape", "custom", {"start": 1}, [x], [y], domain="com.example")
    assert not P.run(gs.Graph([node], [x], [y])).modified
    assert node.attrs == {"start": 1}
