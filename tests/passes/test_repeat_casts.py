"""repeat_casts: the readers of each Cast, and that nothing merges the Casts again."""

from __future__ import annotations

import onnx
import onnx.parser
from pass_harness import PASSES, apply, own

from pipeline.commands.still_needed import apply as apply_all
from pipeline.machine.target import TARGETS
from pipeline.passes import DEFAULT_PASSES

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
        "2 Casts, one for each node of this graph that reads the float"
    ] * 2


def test_it_comes_behind_what_merges_duplicates() -> None:
    (case,) = [c for c in own("repeat_casts", "positive") if c.name == "two lookups"]
    needed = [p for p in DEFAULT_PASSES if p.needed_by(TARGETS["tensorrt-8.6"])]
    after = apply_all(case.model(), needed)
    sizes = [node for node in casts(after) if node.input[0].startswith(("w1", "h1"))]
    assert len(sizes) == 4


def test_sizes_made_of_themselves_many_times_take_no_time() -> None:
    steps = " ".join(f"v{n + 1} = Add(v{n}, v{n})" for n in range(60))
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> g (float[n] x) => (float[n] y, float[n] z) '
        f"{{ s = Shape(x) m = Shape(s) v0 = Sub(m, m) {steps} f = Cast<to=1>(v60) "
        "y = Add(x, f) z = Sub(x, f) }"
    )
    after, result = apply(P, model)
    assert len(result.rewritten) == 1
    assert len(casts(after)) == 2
