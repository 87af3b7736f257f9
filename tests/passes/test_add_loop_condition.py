"""Loops without a condition in the standard, in ONNX Runtime and in TensorRT."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from pass_harness import PASSES, apply, own, run

PASS = PASSES["add_loop_condition"]
ONE = {"x": np.ones((1, 4), np.float32)}


def named(kind: str, name: str) -> onnx.ModelProto:
    (case,) = (case for case in own("add_loop_condition", kind) if case.name == name)
    return case.model()


def test_the_condition_is_a_scalar() -> None:
    after, _ = apply(PASS, named("positive", "none"))
    loop = next(node for node in after.graph.node if node.op_type == "Loop")
    (condition,) = (t for t in after.graph.initializer if t.name == loop.input[1])
    assert list(condition.dims) == []
    assert condition.data_type == onnx.TensorProto.BOOL


def test_why_a_loop_that_its_body_ends_is_refused() -> None:
    """ONNX Runtime uses the body's condition, here False at once. The standard ignores it."""
    model = named("refusal", "none, ended by the body")
    (one_step,) = run(model, ONE)
    assert one_step[0, 0] == 2
    body = model.graph.node[0].attribute[0].g
    body.node[0].op_type = "Equal"
    body.node[0].input[1] = body.node[0].input[0]  # i == i: True, the same as ignoring it
    (three_steps,) = run(model, ONE)
    assert three_steps[0, 0] == 2 * (2 * 2 + 1) + 2


@pytest.mark.parametrize("value", [True, False])
def test_the_copied_condition_is_the_input(value: bool) -> None:
    model = named("positive", "a network input")
    after, _ = apply(PASS, model)
    feeds = {**ONE, "k": np.array(value)}
    np.testing.assert_array_equal(run(model, feeds)[0], run(after, feeds)[0])
    assert (run(after, feeds)[0] == 1).all() == (not value)
