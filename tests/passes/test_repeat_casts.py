"""repeat_casts: what reads it where, and that nothing merges the Casts again."""

from __future__ import annotations

import onnx
from harness import PASSES, apply, own

from pipeline.passes import DEFAULT_PASSES
from pipeline.still_needed import apply as apply_all
from pipeline.target import TARGETS

P = PASSES["repeat_casts"]


def casts(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    return [node for node in model.graph.node if node.op_type == "Cast"]


def readers(model: onnx.ModelProto, name: str) -> int:
    return sum(name in node.input for node in model.graph.node)


def test_every_reader_has_a_cast_of_its_own() -> None:
    (case,) = [c for c in own("repeat_casts", "positive") if c.name == "two lookups"]
    before = case.model()
    assert [readers(before, node.output[0]) for node in casts(before)] == [2, 2]
    after, result = apply(P, before)
    assert [readers(after, node.output[0]) for node in casts(after)] == [1, 1, 1, 1]
    assert len({tuple(node.input) for node in casts(after)}) == 2
    assert [change.detail for change in result.rewritten] == [
        "2 Casts, one for each node that reads it"
    ] * 2


def test_it_comes_behind_what_merges_duplicates() -> None:
    (case,) = [c for c in own("repeat_casts", "positive") if c.name == "two lookups"]
    needed = [p for p in DEFAULT_PASSES if p.needed_by(TARGETS["tensorrt-8.6"])]
    after = apply_all(case.model(), needed)
    sizes = [node for node in casts(after) if node.input[0].startswith(("w1", "h1"))]
    assert len(sizes) == 4
