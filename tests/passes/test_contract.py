"""The contract of every pass, on every case of every pass.

TensorRT-RTX 1.7 takes all of these graphs as they are; what it shows here is that the rewritten
ones still parse and build. That TensorRT 8.6 needs the rewrites, and takes them, can only be
shown on a machine with a GPU.
"""

from __future__ import annotations

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import pytest
from harness import PASSES, apply, assert_same, build, run

from pipeline.passes import DEFAULT_PASSES, Pass
from pipeline.passes._case import Case
from pipeline.passes.cases import CASES
from pipeline.target import TARGETS


def interface(model: onnx.ModelProto) -> list[tuple[str, bytes]]:
    values = (*model.graph.input, *model.graph.output)
    return [(value.name, value.type.SerializeToString(deterministic=True)) for value in values]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("p", DEFAULT_PASSES, ids=lambda p: p.name)
def test_contract(p: Pass, case: Case) -> None:
    source = case.model()
    before = gs.export_onnx(gs.import_onnx(source))
    after, result = apply(p, source)

    # honest: the graph differs if and only if the pass says so
    same = before.SerializeToString(deterministic=True) == after.SerializeToString(
        deterministic=True
    )
    assert result.modified != same
    # names, types and dims of inputs and outputs, so every dynamic axis
    assert interface(before) == interface(after)
    onnx.checker.check_model(after, full_check=True)

    again, second = apply(p, after)
    assert not second.modified
    assert second.refused == result.refused
    assert again.SerializeToString(deterministic=True) == after.SerializeToString(
        deterministic=True
    )
    sizes = []
    for shapes in case.shapes:
        feeds = case.feeds(shapes)
        outputs = run(after, feeds)
        assert_same(run(source, feeds), outputs)
        sizes.append([output.shape for output in outputs])
    assert_dynamic(after, sizes)

    names = {change.node for change in (*result.rewritten, *result.refused)}
    assert names <= node_names(source.graph)
    assert all(change.detail for change in (*result.rewritten, *result.refused))
    if p.name == case.pass_name:
        assert result.modified == (case.kind == "positive")
        assert bool(result.refused) == (case.kind == "refusal")
        assert all(case.reason in change.detail for change in result.refused)


@pytest.mark.parametrize("case", [c for c in CASES if c.kind == "positive"], ids=str)
def test_tensorrt_rtx_builds_the_rewritten_graph(case: Case) -> None:
    after, _ = apply(PASSES[case.pass_name], case.model())
    assert build(after, case.shapes) == ""


@pytest.mark.parametrize("p", DEFAULT_PASSES, ids=lambda p: p.name)
def test_every_pass_has_cases_of_its_kinds_and_evidence(p: Pass) -> None:
    kinds = {case.kind for case in CASES if case.pass_name == p.name}
    assert {"positive", "near miss"} <= kinds
    assert p.evidence
    assert p.summary


@pytest.mark.parametrize("p", DEFAULT_PASSES, ids=lambda p: p.name)
def test_only_tensorrt_below_10_needs_it(p: Pass) -> None:
    assert [name for name, target in TARGETS.items() if p.needed_by(target)] == ["tensorrt-8.6"]


def test_new_nodes_are_named_after_the_node_they_replace() -> None:
    for case in CASES:
        source = case.model()
        after, _ = apply(PASSES[case.pass_name], source)
        old = node_names(source.graph)
        for name in node_names(after.graph) - old:
            assert name.rpartition("/")[0] in old


def test_values_are_compared_to_the_point() -> None:
    """The numeric check itself: a relative error of 1e-4 does not pass."""
    one = [np.linspace(0.1, 3, 9, dtype=np.float32)]
    assert_same(one, [one[0].copy()])
    with pytest.raises(AssertionError):
        assert_same(one, [one[0] * np.float32(1.0001)])


def node_names(graph: onnx.GraphProto) -> set[str]:
    names = set()
    for node in graph.node:
        names.add(node.name)
        for attribute in node.attribute:
            names |= node_names(attribute.g)
    return names


def assert_dynamic(model: onnx.ModelProto, sizes: list[list[tuple[int, ...]]]) -> None:
    """No output axis that differs between the runs has a number after shape inference."""
    inferred = onnx.shape_inference.infer_shapes(model).graph.output
    for place, value in enumerate(inferred):
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            if len({run_sizes[place][axis] for run_sizes in sizes}) > 1:
                assert not dim.HasField("dim_value")
