"""scale_resize: sizes that are whole multiples, and sizes that only seem so.

tensorrt-rtx builds RAFT-small's upsampling as torch exports it. TensorRT 8.6 does not, but accepts
constant scales. The proof of this needs a GPU machine (onnx-tensorrt#389, #398).
"""

from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs
import pytest
import sympy
from pass_harness import PASSES, apply, assert_same, own, run

from pipeline.passes.lib.sizes import dims_of, elements_of

P = PASSES["scale_resize"]
POSITIVE = own("scale_resize", "positive")


@pytest.mark.parametrize("case", POSITIVE, ids=str)
def test_nothing_of_the_arithmetic_is_left(case) -> None:
    model, result = apply(P, case.model())
    ops = {node.op_type for node in model.graph.node}
    assert not ops & {"Shape", "Concat", "Mul", "Cast"}
    assert "in place of computed" in result.rewritten[0].detail


def test_wrong_scales_are_caught() -> None:
    case = POSITIVE[0]
    model, _ = apply(P, case.model())
    (scales,) = (t for t in model.graph.initializer if t.name.endswith("/scales"))
    scales.raw_data = np.array([1, 1, 2, 3], np.float32).tobytes()
    feeds = case.feeds(case.shapes[0])
    with pytest.raises(AssertionError):
        assert_same(run(case.model(), feeds), run(model, feeds))


def test_sizes_that_something_else_reads_stay() -> None:
    graph = gs.import_onnx(POSITIVE[0].model())
    sizes = graph.nodes[-1].inputs[3]
    graph.outputs.append(sizes)
    sizes.dtype, sizes.shape = np.int64, [4]
    assert P.run(graph).modified
    assert sizes.inputs
    assert {"Shape", "Concat", "Mul", "Resize"} == {node.op for node in graph.nodes}


def test_disagreeing_sources_are_refused() -> None:
    graph = gs.import_onnx(POSITIVE[0].model())
    x, y = graph.nodes[-1].inputs[0], graph.nodes[-1].outputs[0]
    x.shape, y.shape = ["n", 2, "h", "w"], ["n", 2, "3*h", "3*w"]
    (refused,) = P.run(graph).refused
    assert "the computed sizes are [1, 1, 2, 2]" in refused.detail


@pytest.mark.parametrize(
    ("before", "after", "ratio"),
    [
        ("s17", "8*s17", 8),
        ("(h + 7)//8", "8*((h + 7)//8)", 8),
        ("s0//2", "2*(s0//2)", 2),
        ("Max(1, h)", "4*Max(1, h)", 4),
        ("a.b c", "a.b c", 1),  # not an expression, but the same name
        (5, 15, 3),
    ],
)
def test_ratios_of_dims(before: str | int, after: str | int, ratio: int) -> None:
    (a,), (b,) = (
        dims_of(gs.Variable(n, np.float32, [d])) for n, d in (("x", before), ("y", after))
    )
    assert sympy.cancel(b / a) == ratio


@pytest.mark.parametrize(
    ("before", "after"),
    [(None, None), ("h", "w"), ("h", "__import__('os').getpid()"), ("h", "2**h"), ("h", "1/0")],
)
def test_no_ratio_of_dims(before: str | None, after: str | None) -> None:
    """Unnamed dims are all different. A text that is not arithmetic is only a name."""
    (a,), (b,) = (
        dims_of(gs.Variable(n, np.float32, [d])) for n, d in (("x", before), ("y", after))
    )
    assert not sympy.cancel(b / a).is_number


def test_float_division_is_not_followed() -> None:
    """float32(h / 49 * 49) is less than h for some h, and the cast then rounds down."""
    h = np.arange(1, 4000).astype(np.float32)
    assert (np.floor(h / np.float32(49) * np.float32(49)) != h).any()
    (case,) = (c for c in own("scale_resize", "refusal") if "float" in c.name)
    graph = gs.import_onnx(case.model())
    assert elements_of(graph.nodes[-1].inputs[3]) is None
