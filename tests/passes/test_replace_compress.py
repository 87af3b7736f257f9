"""replace_compress: compared with numpy, and a wrong index is noticed."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from pass_harness import apply, assert_same, own, run

from pipeline.passes.replace_compress import PASS

POSITIVE = own("replace_compress", "positive")


def test_as_numpy_compresses() -> None:
    (case,) = (c for c in POSITIVE if c.name == "no axis")
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    after, _ = apply(PASS, case.model())
    assert_same([np.compress([0, 1, 0, 1, 0, 0, 0, 1], x)], run(after, {"x": x}))


def test_a_wrong_index_is_caught() -> None:
    (case,) = (c for c in POSITIVE if c.name == "constant condition")
    model, _ = apply(PASS, case.model())
    (node,) = model.graph.node
    (indices,) = (t for t in model.graph.initializer if t.name == node.input[1])
    wrong = onnx.numpy_helper.from_array(np.array([0, 3]), indices.name)
    indices.CopyFrom(wrong)
    feeds = case.feeds(case.shapes[1])
    with pytest.raises(AssertionError):
        assert_same(run(case.model(), feeds), run(model, feeds))
