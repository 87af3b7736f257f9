"""The contract of every pass, on every case of every pass; and the cases on TensorRT-RTX."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import pytest
from pass_harness import PASSES, apply, apply_inferred, assert_same, inferred, run

from pipeline.build.try_graph import Feed, Outcome, attempt
from pipeline.commands.still_needed import apply as after_passes
from pipeline.machine.child import Child
from pipeline.machine.target import TARGETS, installed_version
from pipeline.passes import DEFAULT_PASSES, Pass
from pipeline.passes.case import Case
from pipeline.passes.cases import CASES

RTX = TARGETS["rtx-1.7"]
Feeds = Sequence[Feed]
Attempts = Callable[[onnx.ModelProto, onnx.ModelProto, Feeds], tuple[Outcome, Outcome]]


def interface(model: onnx.ModelProto) -> list[tuple[str, bytes]]:
    values = (*model.graph.input, *model.graph.output)
    return [(value.name, value.type.SerializeToString(deterministic=True)) for value in values]


BY_NAME = {str(case): case for case in CASES}


@cache
def reference(name: str) -> list[list[np.ndarray]]:
    """ONNX Runtime's outputs of the unchanged case, at each of its shapes."""
    case = BY_NAME[name]
    return [run(case.model(), case.feeds(shapes)) for shapes in case.shapes]


class Source:
    """A case's graph as passes get it: as a model, and through graph-surgeon."""

    def __init__(self, case: Case) -> None:
        self.model = inferred(case.model())
        self.graph = gs.export_onnx(gs.import_onnx(self.model))
        self.texts = {"model": text_of(self.model), "graph": text_of(self.graph)}
        self.names = node_names(self.model.graph)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_contract(case: Case) -> None:
    source = Source(case)
    for p in DEFAULT_PASSES:
        try:
            hold(p, case, source)
        except Exception as error:
            raise AssertionError(f"pass {p.name} on {case}: {error}") from error
    assert text_of(source.model) == source.texts["model"]  # no pass changed what it was given


def hold(p: Pass, case: Case, source: Source) -> None:
    before = source.model if p.level == "model" else source.graph
    after, result = apply_inferred(p, source.model)

    # the graph differs if and only if the pass reports a change
    assert result.modified == (source.texts[p.level] != text_of(after))
    # names, types and dims of inputs and outputs, so every dynamic axis
    assert interface(before) == interface(after)
    changes = (*result.rewritten, *result.refused)
    assert all(change.detail for change in changes)
    if p.level == "graph":
        assert {change.node for change in changes} <= source.names
    if p.name == case.pass_name:
        assert result.modified == (case.kind == "positive")
        assert bool(result.refused) == (case.kind == "refusal")
        assert all(case.reason in change.detail for change in result.refused)
    if not result.modified:
        return
    onnx.checker.check_model(after, full_check=True)
    again, second = apply(p, after)
    assert not second.modified
    assert second.refused == result.refused
    assert text_of(again) == text_of(inferred(after) if p.level == "model" else after_gs(after))
    sizes = []
    for shapes, expected in zip(case.shapes, reference(str(case)), strict=True):
        outputs = run(after, case.feeds(shapes))
        assert_same(expected, outputs)
        sizes.append([output.shape for output in outputs])
    assert_dynamic(after, sizes)


def text_of(model: onnx.ModelProto) -> bytes:
    return model.SerializeToString(deterministic=True)


def after_gs(model: onnx.ModelProto) -> onnx.ModelProto:
    return gs.export_onnx(gs.import_onnx(inferred(model)))


@pytest.fixture(scope="module")
def attempts() -> Iterator[Attempts]:
    """Tries two graphs at the same time, each in a child process."""
    # one thread for all, because a child is killed with the thread that started it
    with Child() as one, Child() as other, ThreadPoolExecutor(1) as pool:

        def both(
            first: onnx.ModelProto, second: onnx.ModelProto, feeds: Feeds
        ) -> tuple[Outcome, Outcome]:
            waiting = pool.submit(attempt, one, first, feeds, RTX)
            done = attempt(other, second, feeds, RTX)
            return waiting.result(), done

        yield both


POSITIVE = [case for case in CASES if case.kind == "positive"]


@pytest.mark.skipif(installed_version(RTX) is None, reason="tensorrt-rtx is not installed")
@pytest.mark.parametrize("case", POSITIVE, ids=str)
def test_tensorrt_rtx_fails_as_recorded_and_builds_what_was_rewritten(
    case: Case, attempts: Attempts
) -> None:
    feeds = [case.feeds(shapes) for shapes in case.shapes]
    passes = [p for p in DEFAULT_PASSES if p.name == case.pass_name or p.needed_by(RTX)]
    without, after = attempts(case.model(), after_passes(case.model(), passes), feeds)
    assert (without.verdict if without.failed else "none") == case.fails.get(RTX.name, "none")
    assert not after.failed, after.detail


@pytest.mark.parametrize("p", DEFAULT_PASSES, ids=lambda p: p.name)
def test_every_pass_has_cases_evidence_and_a_reason(p: Pass) -> None:
    kinds = {case.kind for case in CASES if case.pass_name == p.name}
    assert {"near miss"} <= kinds or p.name.startswith("refuse")
    assert kinds & {"positive", "refusal"}
    assert p.evidence
    assert p.summary
    assert p.fault
    if not p.clean_up and p.name != "inline_functions":
        mine = [case for case in CASES if case.pass_name == p.name]
        fails = any(case.fails.get(RTX.name, "none") != "none" for case in mine)
        if any(n.covers(RTX) and n.basis == "measured" for n in p.targets):
            assert fails
        elif fails:
            # another pass of the same module fixes it there
            module = [q for q in DEFAULT_PASSES if q.run.__module__ == p.run.__module__]
            assert any(q.needed_by(RTX) for q in module)


@pytest.mark.parametrize("case", POSITIVE, ids=str)
def test_new_nodes_are_named_after_the_node_they_replace(case: Case) -> None:
    p = PASSES[case.pass_name]
    if p.level == "model":
        return
    source = case.model()
    after, _ = apply(p, source)
    old = node_names(source.graph)
    for name in node_names(after.graph) - old:
        assert any(name[:place] in old for place, c in enumerate(name) if c == "/")


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
    outputs = onnx.shape_inference.infer_shapes(model).graph.output
    for place, value in enumerate(outputs):
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            if len({run_sizes[place][axis] for run_sizes in sizes}) > 1:
                assert not dim.HasField("dim_value")
