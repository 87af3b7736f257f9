"""refuse_unsupported: for every entry, TensorRT fails on a real graph."""

from __future__ import annotations

import onnx_graphsurgeon as gs
import pytest
from pass_harness import PASSES, inferred

from pipeline.build.try_graph import attempt
from pipeline.machine.child import Child
from pipeline.machine.target import find_target
from pipeline.passes import refuse_unsupported as module
from pipeline.passes.case import Case
from pipeline.passes.cases import CASES

NAMES = ("refuse_unsupported", "refuse_unsupported_below_10", "refuse_unsupported_rtx")
# graphs that can't be cases: they draw random numbers, ONNX Runtime lacks the op, or
# graph-surgeon can't write their types
OTHERS = {
    "Optional": "(float[n] x) => (float[n] y) { o = Optional(x) y = OptionalGetElement(o) }",
    "Bernoulli": "(float[n] x) => (float[n] y) { y = Bernoulli(x) }",
    "Multinomial": "(float[n,m] x) => (int32[n,3] y) { y = Multinomial<sample_size=3>(x) }",
    "ImageDecoder": "(uint8[n] x) => (uint8[a,b,3] y) { y = ImageDecoder(x) }",
}


@pytest.fixture(scope="module")
def child():
    pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed")
    with Child() as started:
        yield started


@pytest.mark.parametrize("name", OTHERS)
def test_graphs_that_are_no_cases(name: str, child: Child) -> None:
    text = OTHERS[name]
    case = Case("refuse_unsupported", name, "refusal", text, (), opset=20)
    shapes = {"x": (2, 5) if "[n,m]" in text else (5,)}
    model = case.model()
    assert attempt(child, model, [case.feeds(shapes)], find_target("rtx-1.7")).verdict == "parse"
    graph = gs.import_onnx(inferred(model))
    result = PASSES["refuse_unsupported"].run(graph)
    assert name in {change.op for change in result.refused}
    assert not result.modified


def test_every_entry_has_a_graph() -> None:
    """One graph for each op. The cases cover the conditions of an entry."""
    tables = (module._NOWHERE, module._BELOW_10, module._RTX_ONLY)
    for name, entries in zip(NAMES, tables, strict=True):
        tried = set(OTHERS)
        for case in CASES:
            if case.pass_name == name and case.kind == "refusal":
                tried |= {node.op_type for node in case.model().graph.node}
                if "below_10" not in name:
                    assert case.fails["rtx-1.7"] in ("parse", "build")
        for entry in entries:
            assert tried & set(entry.ops), entry


def test_a_reason_says_what_to_do() -> None:
    for case in CASES:
        if case.pass_name in NAMES and case.kind == "refusal":
            graph = gs.import_onnx(inferred(case.model()))
            for change in PASSES[case.pass_name].run(graph).refused:
                reason, _, advice = change.detail.partition(": ")
                assert reason.startswith("TensorRT ")
                assert len(advice.split()) > 2


def test_a_plugin_s_op_is_left_alone() -> None:
    x, y = gs.Variable("x", "float32", ["n", 3, 3]), gs.Variable("y", "float32", ["n"])
    graph = gs.Graph([gs.Node("Det", "mine", {}, [x], [y], domain="com.example")], [x], [y])
    assert not PASSES["refuse_unsupported"].run(graph).refused
